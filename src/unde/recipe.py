"""Setup, all that the command line needs to know about a user's project; and Recipe, how to make one elsewhere."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unde.data import Collate
from unde.errors import UndeError, unknown
from unde.tasks.base import Task

Advance = Callable[[int, int], None]  # steps done, of how many


@dataclass(frozen=True)
class Ask:
    """How what people type or drop in the live page becomes queries; each function gives data as `eval_queries` are.

    `text` reads a text, `picture` one of Pillow's with its prompt ("" for none), `prompt` generates an image of a
    prompt and a seed, telling how far it is, with the trajectory on which it was sampled where that is asked for.
    """

    text: Callable[[str], Any] | None = None
    picture: Callable[[Any, str], Any] | None = None
    prompt: Callable[[str, int, bool, Advance], Any] | None = None
    prompted: bool = True  # whether images are made from prompts, or from seeds alone


@dataclass
class Setup:
    """What `make()` returns in `unde build my_project.setup:make`.

    `learn_queries` and `eval_queries` are two disjoint sets, neither part of the training data. `show` turns
    an example into something a page can show: an image array, a text, or a dict with image, text, label and prompt.
    `pieces` gives the text of every token of an example, for pages that shade tokens. `contributors` says which
    training examples are known to have given each of `eval_queries` its subject, style, …: a (Q, N) bool array for
    each of these names. Pages mark them with letters. `ask` tells the live page how to read texts and to make images;
    pictures to ask about are made like those of the training data without it.
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
    ask: Ask = field(default_factory=Ask)


@dataclass(frozen=True)
class Recipe:
    """An importable function and plain arguments for it: a `Setup` that another process can make for itself."""

    function: str  # "module:function"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Setup:
        """
        >>> Recipe("platform:node").make()
        Traceback (most recent call last):
        unde.errors.UndeError: platform:node gave a str: expected an unde.Setup(model, task, train_data, …)
        """
        found = imported(self.function)
        with _told(self.function):
            setup = found(**self.arguments) if callable(found) else found
        if not isinstance(setup, Setup):
            raise UndeError(
                f"{self.function} gave a {type(setup).__name__}: expected an unde.Setup(model, task, train_data, …)"
            )
        return setup


@contextmanager
def _told(what: str, but: type[Exception] = UndeError) -> Generator[None]:
    """A user's own code that fails is named with the line where it did; the traceback is that of the cause."""
    try:
        yield
    except (UndeError, but):
        raise
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise UndeError(f"{what} raised {type(e).__name__}: {e} ({at.filename}, line {at.lineno})") from e


def imported(target: str) -> Any:
    """What MODULE:FUNCTION names; modules are found from the current folder too.

    >>> imported("json:dumps")([1])
    '[1]'
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        hint = f". For the model in this folder: --hf-model {target}" if os.path.isdir(target) else ""
        raise UndeError(
            f"cannot read {target!r}: expected MODULE:FUNCTION, for example my_project.setup:make{hint}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _told(module_name, but=ModuleNotFoundError):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise UndeError(
                f"no module {module_name!r} here: expected a file {module_name.replace('.', '/')}.py below "
                f"{os.getcwd()}, or an installed package"
            ) from None
        raise
    if not hasattr(module, attribute):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise unknown(f"function of {module_name}", attribute, known)
    return getattr(module, attribute)
