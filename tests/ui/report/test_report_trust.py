"""The panel of trust: curves follow the shares, ways of scoring are told apart, verdicts and limits are said."""

import math

import pytest
import torch

from report_dom import Node, parse, words
from unde import UndeError, Weights
from unde.index.retrieval_curve import Curve, Trust, wilson
from unde.ui.report import Page, TrustCurve, TrustPanel
from unde.ui.report.panels import trust_panel, verdict
from unde.ui.report.trust import LIMITS, trust_section

STRENGTHS = [0.05, 0.125, 0.3125, 0.78125, 1.953125]  # each 2.5 times the one before
BEFORE, AFTER = [1.0, 0.75, 0.5, 0.25, 0.0], [1.0, 0.8, 0.6, 0.3, 0.1]


def with_interval(shares: list[float]) -> list[tuple[float, float, float]]:
    return [(share, *wilson(share, 20)) for share in shares]


def curve(**shares: list[float]) -> TrustCurve:
    return TrustCurve("noise", 20, STRENGTHS, {way: with_interval(some) for way, some in shares.items()})


def points(node: Node) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in (node.attributes["points"] or "").split())
    return [(float(x), float(y)) for x, y in pairs]


def test_curves_bands_and_table_follow_the_shares():
    panel = TrustPanel(
        [curve(unweighted=BEFORE, weighted=AFTER)], {"unweighted": "50 %", "weighted": "56 % (+6.0 ± 2.0)"}
    )
    root = parse(trust_section(panel))
    before, after = (points(node) for node in root.all("polyline"))
    steps = [b[0] - a[0] for a, b in zip(before, before[1:])]
    assert steps == pytest.approx([steps[0]] * 4, abs=0.03)  # strengths are even in the logarithm
    height = before[4][1] - before[0][1]
    assert height > 100
    for drawn, shares in ((before, BEFORE), (after, AFTER)):
        assert [y for _, y in drawn] == pytest.approx([before[4][1] - height * s for s in shares], abs=0.02)
    band = points(root.all("polygon")[0])
    expected = [wilson(s, 20)[0] for s in BEFORE] + [wilson(s, 20)[1] for s in reversed(BEFORE)]
    assert [y for _, y in band] == pytest.approx([before[4][1] - height * s for s in expected], abs=0.02)
    rows = [[words(cell) for cell in row.all("td") + row.all("th")] for row in root.all("tbody tr")]
    assert len(rows) == 5
    assert set(rows[1]) == {"0.12", "75 [53, 89]", "80 [58, 92]"}
    assert [words(node) for node in root.all("dd")] == ["50 %", "56 % (+6.0 ± 2.0)"]
    assert words(root.one("caption")) == "In %, 20 examples"
    assert LIMITS in words(root.one("#trust"))


def test_a_curve_alone_needs_no_key():
    alone = parse(trust_section(TrustPanel([curve(unweighted=BEFORE)], {"unweighted": "50 %"})))
    both = parse(
        trust_section(
            TrustPanel(
                [curve(unweighted=BEFORE, weighted=AFTER)], dict.fromkeys(["unweighted", "weighted"], "")
            )
        )
    )
    assert len(alone.all("svg.key")) == 0 and len(both.all("svg.key")) == 2


def test_names_stay_text_and_the_page_lists_the_section():
    word = "<b>&'\""
    told = TrustCurve(word, 20, [0.1, 1.0], {word: with_interval([0.5, 0.1])})
    page = Page("t", trust=TrustPanel([told], {word: word}, {word: word, "other": "fine"}, word)).html()
    assert "<b>" not in page
    root = parse(page)
    assert "#trust" in [link.attributes["href"] for link in root.all("nav a")]
    assert words(root.all("#trust p.lead")[1]) == f"{word}: {word}"
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TrustCurve("noise", 20, [], {"a": []}), "expected positive numbers, one at least"),
        (lambda: TrustCurve("noise", 20, [0.0], {"a": [(0.5, 0.1, 0.9)]}), "expected positive numbers"),
        (lambda: TrustCurve("noise", 20, [math.nan], {"a": [(0.5, 0.1, 0.9)]}), "expected positive numbers"),
        (lambda: TrustCurve("noise", 20, [1.0], {}), "no shares of 'noise'"),
        (
            lambda: TrustCurve("noise", 20, [1.0, 2.0], {"a": [(0.5, 0.1, 0.9)]}),
            "1 shares of 'a' for 2 strengths",
        ),
        (lambda: TrustCurve("noise", 20, [1.0], {"a": [(0.5, 0.6, 0.9)]}), "inside their intervals"),
        (lambda: TrustCurve("noise", 20, [1.0], {"a": [(1.5, 0.6, 1.9)]}), "numbers from 0 to 1"),
        (lambda: TrustPanel([], {}), "one curve at least"),
        (lambda: TrustPanel([curve(a=BEFORE)], {"b": "3 %"}), "expected a mean for every way"),
    ],
)
def test_what_cannot_be_drawn(make, says):
    with pytest.raises(UndeError, match=says):
        make()


def told(after: list[float] | None, held_out: bool = True) -> Trust:
    gain = None if after is None else sum(after) / 5 - 0.5
    one = Curve("noise", STRENGTHS, BEFORE, after, 20)
    mean = None if after is None else sum(after) / 5
    return Trust("TRAK", [one], 0.5, mean, gain, None if gain is None else 0.03, 20, held_out, 0)


def test_from_an_index_to_the_panel():
    skewed, same = Weights(torch.tensor([0.5, 1.5]), ["a", "b"]), Weights.uniform(["a", "b"])
    panel = trust_panel(
        {"one": told(AFTER), "same": told(BEFORE)}, {"one": skewed, "same": same}, unweighted="plain"
    )
    [drawn] = panel.curves
    assert list(drawn.shares) == ["plain", "one"]  # uniform weights are the unweighted method
    assert [share for share, _, _ in drawn.shares["one"]] == AFTER
    assert drawn.shares["plain"][1] == (0.75, *wilson(0.75, 20))
    assert panel.means == {"plain": "50 %", "one": "56 % (+6.0 ± 3.0)"}
    assert panel.note == "" and panel.verdicts == {}
    few = trust_panel({"unweighted": told(None, held_out=False)}, {})
    assert list(few.curves[0].shares) == ["unweighted"] and "too few training examples" in few.note


def test_verdicts_of_the_guard():
    def given(**provenance) -> Weights:
        return Weights(torch.ones(1), ["a"], [], provenance)

    found = {"noise": {"unweighted": 0.25, "weighted": 0.4, "copies": 100}}
    good = given(found=found, refused=None, strength={"noise": 0.3})
    assert verdict(good) == "Held-out copies that find their original: noise (strength 0.3) 25 % → 40 %."
    bad = given(found=found, refused="weak copies (noise) became harder to find (t = -7.1)", strength={})
    assert verdict(bad).startswith("Weights stay uniform") and verdict(bad).endswith("(t = −7.1).")
    assert "confirmed none" in verdict(given(confirmed=False))
    assert verdict(given(k=3)) == ""
    panel = trust_panel({"w": told(BEFORE)}, {"w": bad})
    assert panel.verdicts == {"w": verdict(bad)} and list(panel.curves[0].shares) == ["unweighted"]
