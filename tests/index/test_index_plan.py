"""What a build says: the plan before it starts, the expected time after the first batches, then a bar."""

import io
import re
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import toy
from unde import console


def said(capsys) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_bytes_are_predicted(tmp_path, capsys, dtype, checkpoints):
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    states = [model.state_dict(), {k: v * 2 for k, v in model.state_dict().items()}][:checkpoints]
    options = {"store_dtype": dtype, "checkpoints": states, "progress": True, "shard_passes": 10}
    index = toy.build(tmp_path / "i", 100, model=model, **options)
    printed = re.search(r"([\d.]+) ([kM])B on disk", said(capsys))
    on_disk = sum(p.stat().st_size for p in toy.shard_files(index))
    assert float(printed[1]) * {"k": 1e3, "M": 1e6}[printed[2]] == pytest.approx(on_disk, rel=0.03)


def test_the_plan_comes_first(tmp_path, capsys):
    seen = []
    task = toy.Watched(lambda batch: seen.append((len(batch[0]), said(capsys))))
    toy.build(tmp_path / "i", task=task, progress=True, method="trak")
    first = [i for i, (size, _) in enumerate(seen) if size == 4][1]  # passes of 4, after one that was tried
    before = "".join(text for _, text in seen[: first + 1])
    assert "22 examples × 57 features (4 parameters in 2 groups)" in before
    assert "in float32, 3 shards" in before
    assert "its kernel will take 9.98 kB more" in before
    assert "by layer rules: 2 × Linear" in before


def test_a_resumed_build_says_what_is_left(tmp_path, capsys):
    index = toy.build(tmp_path / "i")
    toy.shard_files(index)[2].unlink()
    toy.build(tmp_path / "i", progress=True)
    assert "going on: 6 of 22 are still to do" in said(capsys)


def test_the_time_is_estimated_after_the_first_batches(tmp_path, capsys):
    """40 batches, each of which takes 20 ms; said on a pipe too, once, before a third is done."""
    done = []

    def look(batch):
        time.sleep(0.02)
        done.append((len(batch[0]), said(capsys)))

    toy.build(tmp_path / "i", 160, task=toy.Watched(look), progress=True)
    said_at = [i for i, (_, text) in enumerate(done) if "about" in text]
    assert len(said_at) == 1
    batches = sum(size == 4 for size, _ in done[: said_at[0]])
    assert 3 <= batches <= 14
    number = re.search(r"about (\d+) s for 160 examples", done[said_at[0]][1])
    assert 1 <= int(number[1]) <= 10


def test_quiet_builds_are_quiet(tmp_path, capsys):
    toy.build(tmp_path / "i", 80)
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "")


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "_err", Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(console, "PATIENCE", 0.1)
    toy.build(tmp_path / "i", 160, task=toy.Watched(lambda batch: time.sleep(0.01)), progress=True)
    assert "features" in screen.getvalue()
    assert re.search(r"\d+/160", screen.getvalue())
    assert "/s" in screen.getvalue()


def test_paths_are_printed_as_they_are(tmp_path, capsys):
    folder = tmp_path / "runs[bold]" / ("long" * 30)
    index = toy.build(folder, progress=True)
    assert f"{folder}: 22 examples" in said(capsys)
    path = toy.shard_files(index)[0]
    path.write_bytes(b"")
    toy.build(folder)
    assert str(path) in said(capsys)


def test_what_goes_another_way_is_listed(tmp_path, capsys):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.shift = nn.Linear(5, 3), nn.Parameter(torch.zeros(3))
            self.spare = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.body(x) + self.shift

    toy.build(tmp_path / "i", model=Odd(), progress=True)
    text = said(capsys)
    assert "by layer rules: 1 × Linear" in text
    assert re.search(r"by (one copy|torch.func).*: shift\n", text)
    assert "no gradient on the examples tried: spare" in text
