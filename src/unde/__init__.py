"""Training data attribution for PyTorch: which training examples made a trained model do that?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unde.errors import UndeError
from unde.version import __version__

if TYPE_CHECKING:
    from unde import evaluate, methods, tasks
    from unde.groups import Groups
    from unde.index import Index
    from unde.index.exact import attribute
    from unde.index.select import select
    from unde.scoring import GroupScores
    from unde.setup import Setup
    from unde.tasks import Task
    from unde.weights import Weights, learn_weights

__all__ = [
    "GroupScores",
    "Groups",
    "Index",
    "Setup",
    "Task",
    "UndeError",
    "Weights",
    "__version__",
    "attribute",
    "evaluate",
    "learn_weights",
    "methods",
    "select",
    "tasks",
]

# Loaded on first use, so that `unde --help` does without torch.
_MODULES = {
    "GroupScores": "unde.scoring",
    "Groups": "unde.groups",
    "Index": "unde.index",
    "Setup": "unde.setup",
    "Task": "unde.tasks",
    "Weights": "unde.weights",
    "attribute": "unde.index.exact",
    "learn_weights": "unde.weights",
    "select": "unde.index.select",
}
_SUBMODULES = [
    "evaluate",
    "groups",
    "index",
    "kernels",
    "methods",
    "parallel",
    "projection",
    "scoring",
    "setup",
    "tasks",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"unde.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'unde' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
