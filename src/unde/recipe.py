"""Setup, all that the command line needs to know about a user's project; and Recipe, how to make one elsewhere."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unde.data import Collate
from unde.errors import UndeError
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


@dataclass(frozen=True)
class Recipe:
    """An importable function and plain arguments for it: a `Setup` that another process can make for itself."""

    function: str  # "module:function"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Setup:
        """
        >>> Recipe("os:getcwd").make()
        Traceback (most recent call last):
        unde.errors.UndeError: os:getcwd returned a str: expected an unde.Setup
        """
        made = imported(self.function)(**self.arguments)
        if not isinstance(made, Setup):
            raise UndeError(f"{self.function} returned a {type(made).__name__}: expected an unde.Setup")
        return made


def imported(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names; modules in the current folder are found too.

    >>> imported("json:dumps")([1])
    '[1]'
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise UndeError(
            f"{name!r} names no function: expected MODULE:FUNCTION, such as my_project.setup:make"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise UndeError(
            f"cannot import {module!r} ({e}): run from the folder that it is in, or install it"
        ) from e
    if not callable(getattr(found, function, None)):
        raise UndeError(f"{module} has no function {function!r}: expected MODULE:FUNCTION")
    return getattr(found, function)
