"""Count the modules of the package that each main call runs through.

    python -m benchmarks.corridor

Runs `build`, `score`, `learn` and `report` on a small index. Imports are not counted: all modules are loaded first, and
module bodies and lazy attributes of packages are skipped. Threads of the call are counted.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

import unde
from unde.data import Rows

ROOT = Path(unde.__file__).parent
GOALS = {"build": 25, "score": 20, "learn": 25, "report": 45}
T = TypeVar("T")


class ModuleCounter:
    """Record the modules of the package whose functions run in a `with` block."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in ("<module>", "__getattr__"):
            return
        if code.co_filename.startswith(str(ROOT)):
            self.files.add(code.co_filename)

    def __enter__(self) -> ModuleCounter:
        threading.setprofile(self.record)
        sys.setprofile(self.record)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def modules(self) -> list[str]:
        return sorted(str(Path(name).relative_to(ROOT).with_suffix("")) for name in self.files)


def import_all() -> None:
    """Import every module of the package that its installed dependencies allow."""
    for module in pkgutil.walk_packages([str(ROOT)], "unde.", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(module.name)


def count(name: str, run: Callable[[], T], verbose: bool) -> T:
    with ModuleCounter() as counter:
        result = run()
    print(f"{name:8} {len(counter.modules):3} modules (goal {GOALS[name]})")
    if verbose:
        print("".join(f"    {module}\n" for module in counter.modules), end="")
    return result


def main() -> None:
    import_all()
    from unde.ui.report.panels import page_of

    verbose = "-v" in sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(800, 8)
    data, queries = (x, x[:, :3].argmax(1)), (torch.randn(30, 8), torch.randint(3, (30,)))
    setup = unde.Setup(model, unde.tasks.Classification(), data, eval_queries=queries)
    with tempfile.TemporaryDirectory() as folder:
        index = count(
            "build",
            lambda: unde.Index.build(
                model, setup.task, data, Path(folder) / "index", method="trak", progress=False
            ),
            verbose,
        )
        weights = unde.Weights.uniform(index.groups.names)
        count("score", lambda: index.score(queries).top(10, weights), verbose)
        scores = index.score(queries)
        weights = count("learn", lambda: unde.learn_weights(scores), verbose)
        few = Rows((torch.randn(3, 8), torch.randint(3, (3,))))
        few_scores = index.score(few)
        count(
            "report",
            lambda: page_of(index, setup, few, few_scores, {"learned": weights}, title="A page").html(),
            verbose,
        )


if __name__ == "__main__":
    main()
