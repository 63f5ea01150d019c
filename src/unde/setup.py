"""Setup: a user's model, task and data for the command line. Recipe: how another process makes one."""

from __future__ import annotations

import importlib
import inspect
import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from unde.data import Collate, Rows, choose_collate, plain_text, plain_texts
from unde.errors import UndeError, unknown
from unde.tasks.base import Task

_LINES = 3  # of the user's code in an error message
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
    each of these names. Pages mark them with letters.

    `classes` names the classes that a classifier tells apart, in the order of its outputs: a list, or {0: "cat", …} as
    in the config of a Hugging Face model, which is used by itself where nothing is given. `true_labels` says what the
    labels of the training data should be, one for each example, where that is known: it is used to tell how well wrong
    labels are found. `train` repeats the training on some of the examples, for `unde calibrate`: a function (indices,
    seed) -> model, or an `unde.evaluate.TrainingSpec`. `ask` tells the live page how to read texts and to make images;
    pictures to ask about are made like those of the training data without it.

    `checkpoints` are several sets of weights that features are computed under, of one training or of an ensemble of
    models trained independently: state dicts or .safetensors files. `checkpoint_weights` are their shares of a score.

    >>> Setup(nn.Linear(2, 2), Task(), [], classes={1: "dog", 0: "cat"}).classes
    ['cat', 'dog']
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
    classes: Sequence[str] | Mapping[int, str] | None = None
    true_labels: Sequence[int] | Sequence[str] | Any = None
    ask: Ask = field(default_factory=Ask)
    train: Callable[[Any, int], nn.Module] | None = None
    checkpoints: Sequence[Any] | None = None
    checkpoint_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        count, weights = len(self.checkpoints or ()), self.checkpoint_weights
        if weights is not None and len(weights) != count:
            raise UndeError(
                f"{len(weights)} checkpoint_weights for {count} checkpoints: expected one for each"
            )
        if self.classes is not None:
            self.classes = _class_names(self.classes)

    def rows(self, data: Any) -> Rows:
        """Training data or queries as rows, with the collate function of the setup, the data or the task."""
        return Rows(data, self.collate or choose_collate(self.task.collate, data))

    def text(self, example: Any) -> str | None:
        """The text of an example: its field "text" or "sentence", or else what `show` gives; None without one.

        >>> Setup(nn.Linear(2, 2), Task(), [], show=lambda example: {"text": f"number {example}"}).text(7)
        'number 7'
        """
        text = plain_text(example)
        if text is not None or self.show is None:
            return text
        shown = self.show(example)
        return shown if isinstance(shown, str) else plain_text(shown)

    def texts(self, rows: Rows) -> list[str] | None:
        """Texts of all examples, as `plain_texts` gives them."""
        return plain_texts(rows, self.text)


def _class_names(classes: Any) -> list[str]:
    """Names in the order of the model's outputs."""
    if isinstance(classes, Mapping):
        by_number = {int(n): name for n, name in classes.items()}
        if sorted(by_number) != list(range(len(classes))):
            raise UndeError(
                f"Setup(classes=) numbers its classes {sorted(by_number)[:5]}…: expected 0 to {len(classes) - 1}, the "
                "order of the model's outputs"
            )
        classes = [by_number[n] for n in range(len(classes))]
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise UndeError(f"Setup(classes={classes!r}): expected a list of names, one for each class")
    names = list(classes)
    for name in names:
        if not isinstance(name, str):
            raise UndeError(
                f"Setup(classes=) holds {name!r}, a {type(name).__name__}: expected names (texts), one for each class"
            )
        if names.count(name) > 1:
            raise UndeError(f"Setup(classes=) names {name!r} twice: expected another name for each class")
    if not names:
        raise UndeError("Setup(classes=) is empty: expected another name for each class")
    return names


@dataclass(frozen=True)
class Recipe:
    """An importable function and plain arguments for it: a `Setup` that another process can make for itself."""

    function: str  # "module:function"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None  # training data in place of those of the setup
    collate: Collate | None = None  # for `data`

    def make(self) -> Setup:
        """
        >>> Recipe("platform:node").make()
        Traceback (most recent call last):
        unde.errors.UndeError: platform:node gave a str: expected an unde.Setup(model, task, train_data, …)
        """
        setup = import_target(self.function)
        if callable(setup):
            self._check_arguments(setup)
            with _locate_errors(self.function):
                setup = setup(**self.arguments)
        if not isinstance(setup, Setup):
            hint = ". Does it end with a return?" if setup is None else ""
            raise UndeError(
                f"{self.function} gave a {type(setup).__name__}: expected an unde.Setup(model, task, train_data, …)"
                + hint
            )
        return setup if self.data is None else replace(setup, train_data=self.data, collate=self.collate)

    def _check_arguments(self, function: Callable[..., Any]) -> None:
        try:
            inspect.signature(function).bind(**self.arguments)
        except TypeError as e:
            given = f"it is called with {', '.join(self.arguments)}" if self.arguments else "without any"
            raise UndeError(
                f"{self.function} takes other arguments ({e}): expected a function {given}"
            ) from None
        except ValueError:  # no signature: written in C
            return


@contextmanager
def _locate_errors(what: str) -> Generator[None]:
    """Put the lines of the user's code that failed into the message."""
    try:
        yield
    except UndeError as e:
        if lines := _lines(e):
            raise UndeError(f"{e}{lines}") from e
        raise
    except SystemExit as e:
        raise UndeError(f"{what} ended the program (SystemExit: {e.code}){_lines(e)}") from e
    except Exception as e:
        lines = _lines(e) or f" ({_place(traceback.extract_tb(e.__traceback__)[-1])})"
        raise UndeError(f"{what} raised {type(e).__name__}: {e}{lines}") from e


def _lines(error: BaseException) -> str:
    """The user's lines on the way to an error, the last first, and the line of a library that raised it."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename is not None and error.lineno is not None:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text))
    user = [frame for frame in frames if _is_user_file(frame.filename)]
    if not user:
        return ""
    out = "".join(f"\n  {_place(f)}\n    {_code(f)}" for f in user[: -_LINES - 1 : -1])
    if not _is_user_file(frames[-1].filename) and not isinstance(error, UndeError):
        out += f"\n  raised in {_place(frames[-1])}"
    return out


def _is_user_file(file: str) -> bool:
    """Whether a file is no part of Python, of installed packages or of unde."""
    if file.startswith("<"):
        return False
    others = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others += [site.getusersitepackages(), os.path.dirname(__file__)]
    real = os.path.realpath(file)
    return not any(real.startswith(os.path.realpath(other) + os.sep) for other in others)


def _place(frame: traceback.FrameSummary) -> str:
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"{frame.filename}, line {frame.lineno}{inside}"


def _code(frame: traceback.FrameSummary) -> str:
    return (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()


def import_target(target: str) -> Any:
    """The object that MODULE:FUNCTION names; the current folder is searched too.

    >>> import_target("json:dumps")([1])
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
    with _locate_errors(module_name):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as e:
            if not e.name or not f"{module_name}.".startswith(f"{e.name}.") or _lines(e):
                raise  # a module that the user's code imports
            raise UndeError(
                f"no module {module_name!r} here: expected a file {module_name.replace('.', '/')}.py below "
                f"{os.getcwd()}, or an installed package"
            ) from None
    if not hasattr(module, attribute):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise unknown(f"function of {module_name}", attribute, known)
    return getattr(module, attribute)
