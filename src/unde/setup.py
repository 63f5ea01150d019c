"""Setup: everything the command line needs to know about a user's project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from unde.data import Collate
from unde.tasks.base import Task


@dataclass
class Setup:
    """What `make()` returns in `unde build my_project.setup:make`.

    `learn_queries` and `eval_queries` are two disjoint sets, neither part of the training data. `show` turns
    an example into something a page can show: an image array, a text, or a dict with image, text, label and prompt.
    `pieces` gives the text of every token of an example, for pages that shade tokens. `contributors` says which
    training examples are known to have given each of `eval_queries` its subject, style, …: a (Q, N) bool array for
    each of these names. Pages mark them with letters.
    """

    model: nn.Module
    task: Task
    train_data: Any
    learn_queries: Any = None
    eval_queries: Any = None
    collate: Collate | None = None
    show: Callable[[Any], Any] | None = None
    ids: Sequence[Any] | None = None
    pieces: Callable[[Any], list[str]] | None = None
    contributors: Mapping[str, Any] | None = None
