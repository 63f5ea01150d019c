"""The million digits, rows that are kept, and the page that is written from them."""

import json

import pytest
import torch

from benchmarks import digits, scale, scale_page
from unde import Setup

PIXELS = torch.arange(6 * 3 * 28 * 28).remainder(251).add(1).to(torch.uint8).view(6, 3, 28, 28)
LABELS = torch.tensor([7, 1, 4])


def test_no_two_digits_are_alike():
    data = digits.Digits(PIXELS, LABELS, 3 * 294)
    seen = {bytes(x.numpy().tobytes()) for x, _ in (data[i] for i in range(len(data)))}
    assert len(seen) == len(data) == 882
    assert [int(y) for _, y in (data[i] for i in (0, 1, 2, 3, 881))] == [7, 1, 4, 7, 4]
    assert torch.equal(data[1][0] * 255, PIXELS[0, 1].float())  # first as they are
    with pytest.raises(ValueError, match="883 examples: expected 1 to 882"):
        digits.Digits(PIXELS, LABELS, 883)
    with pytest.raises(IndexError):
        data[882]


def test_a_shift_moves_pixels_and_leaves_zeros_behind():
    data = digits.Digits(PIXELS, LABELS, 882)
    at = digits.SHIFTS.index((2, -1))
    moved = (data[3 * (6 * at + 4) + 2][0] * 255).round()  # digit 2, turned by the fifth angle
    assert torch.equal(moved[2:, :-1], PIXELS[4, 2, :-2, 1:].float())
    assert not moved[:2].any() and not moved[:, -1].any()


def test_turning():
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 2:6, 13:15] = 1  # a stroke above the middle
    turned = digits._turned(image, 8)
    assert turned.sum() == pytest.approx(8, rel=0.1)
    assert torch.allclose(digits._turned(image, 0), image, atol=1e-4)
    columns = torch.arange(28.0)
    there = (turned[0, 0].sum(0) * columns).sum() / turned.sum()
    assert abs(float(there) - 13.5) == pytest.approx(10 * 0.139, rel=0.15)  # ten pixels above, sin 8°


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "RESULTS", tmp_path / "scale.json")
    return tmp_path / "scale.json"


def test_rows_are_kept_and_replaced(results):
    for seconds, budget in ((1, "1GB"), (2, "2GB"), (3, "1GB")):
        scale.keep("memory", {"examples": 5, "budget": budget, "seconds": seconds}, ("examples", "budget"))
    rows = json.loads(results.read_text())["memory"]
    assert [(r["budget"], r["seconds"]) for r in rows] == [("1GB", 3), ("2GB", 2)]
    assert rows[0]["machine"]["instructions"] and rows[0]["seed"] == 0
    assert scale._there("memory", examples=5, budget="2GB")
    assert not scale._there("memory", examples=6, budget="2GB")
    assert [f.name for f in results.parent.iterdir()] == ["scale.json"]


def test_what_is_there_is_not_measured_again(results, monkeypatch):
    asked = []

    def measured(folder, examples, budget, allocator):
        asked.append((examples, budget, allocator))
        return {
            "examples": examples,
            "budget": budget,
            "allocator": allocator,
            "before": 1,
            "beyond": {"build": 1},
            "seconds": {"build": 1.0},
        }

    monkeypatch.setattr(scale, "measured", measured)
    for again in (False, False, True):
        scale.memory("folder", [10, 20], ["1GB", "2GB"], again)
    series = [(n, "1GB", allocator) for allocator in ("usual", "exact") for n in (10, 20)]
    assert asked == 2 * [*series, (20, "2GB", "usual")]


def test_engines_are_compared_within_a_round():
    """Once the machine is half as fast: ratios are those of its round, and start-up is told apart."""
    rows = []
    for run, slow in enumerate((1, 2, 1)):
        for engine, seconds, first in (("serial", 60, 2), ("processes:1", 66, 5)):
            row = {"engine": engine, "examples": 9, "run": run, "seconds": slow * seconds}
            rows.append(row | {"first_shard": slow * first})
    rows.append({"engine": "ray", "examples": 8, "run": 0, "seconds": 1, "first_shard": 1})  # no serial one
    made = scale_page.engines({"engines": rows}).splitlines()
    assert made[2] == "| `serial` | 9 | 3 | 60.0 s | 1.000 | – | – |"
    assert made[3] == "| `processes:1` | 9 | 3 | 66.0 s | 1.100 | 3.0 s | 1.050 |"
    assert len(made) == 4


def test_a_million_in_small(tmp_path, results):
    """The whole of a measurement on a few examples, in its own process."""
    torch.manual_seed(0)
    x, y = torch.rand(200, 1, 28, 28), torch.randint(10, (200,))
    digits.write(tmp_path, x, y, x[:3], y[:3], digits.network())
    assert isinstance(made := digits.make(str(tmp_path), 700), Setup) and len(made.train_data) == 700
    row = scale.measured(str(tmp_path), 700, "512MB", "exact")
    assert (row["examples"], row["shards"], row["features"]) == (700, 1, 778)
    assert set(row["seconds"]) == {"build", "open", "query features", "kernel", "scoring"}
    assert 1e8 < row["before"] <= row["peak"] < row["before"] + 5e8
    assert row["bytes_on_disk"] > 700 * 2 * 778


def test_the_page_is_what_the_results_say():
    """No number was copied by hand."""
    page = scale_page.PAGE.read_text()
    found = json.loads((scale.RESULTS).read_text())
    assert scale_page.filled(page, found) == page
    assert scale_page.FIGURE.read_text() == scale_page.figure(found)
