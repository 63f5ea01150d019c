"""How far one has to walk to follow what happens: files that a call runs through, and steps between them.

    python benchmarks/corridor.py

Builds, scores, learns weights and makes a page on a small index, and prints for each how many files of the package ran,
and how many different pairs of files called one another. Run it on two commits to compare them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import unde
from unde.tasks import Classification

HOME = str(Path(unde.__file__).parent)


class Walk:
    """Inside, notes which file of the package calls which."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.steps: set[tuple[str, str]] = set()

    def note(self, frame: FrameType, event: str, _arg: Any) -> None:
        here = frame.f_code.co_filename
        if event != "call" or not here.startswith(HOME):
            return
        self.files.add(here)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(HOME):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != here:
            self.steps.add((caller.f_code.co_filename, here))

    def __enter__(self) -> Walk:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)


def walked(name: str, run: Callable[[], Any]) -> Any:
    with Walk() as walk:
        out = run()
    print(f"{name:8} {len(walk.files):3} files, {len(walk.steps):3} steps between them")
    return out


def main() -> None:
    _ = unde.Index, unde.Weights  # imports are no part of the count
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(800, 8)
    data, queries = (x, x[:, :3].argmax(1)), (torch.randn(30, 8), torch.randint(3, (30,)))
    with tempfile.TemporaryDirectory() as folder:
        index = walked(
            "build",
            lambda: unde.Index.build(model, Classification(), data, Path(folder) / "i", progress=False),
        )
        scores = walked("score", lambda: index.score(queries))
        walked("total", scores.total)
        walked("learn", index.learn_weights)


if __name__ == "__main__":
    main()
