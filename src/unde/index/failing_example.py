"""Which example a model cannot run on, where torch says no more than that some number is out of bounds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from unde.data import Rows, to_device
from unde.errors import BadExample, UndeError
from unde.gradients.parameters import placement
from unde.tasks.base import Task
from unde.tasks.tokens import Unreadable

_FOREIGN = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


@contextmanager
def blaming(
    model: nn.Module,
    task: Task,
    rows: Rows,
    where: Callable[[], Iterable[int]],
    names: Sequence[object] | None = None,
    what: str = "example",
) -> Generator[None]:
    """An error inside the block is that of the first example among `where` that fails on its own, if any does; else
    it is left as it is. `what` they are called."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _FOREIGN as error:
        if isinstance(error, UndeError) and not isinstance(error, Unreadable):
            raise
        for i in where():
            found = _alone(model, task, rows, i)
            name = i if names is None else names[i]
            if isinstance(found, Unreadable):
                raise BadExample(f"{what} {name!r} {found.what}") from None
            if found is not None:
                raise BadExample(
                    f"the model cannot run on {what} {name!r} ({type(found).__name__}: {_first_line(found)}): look at "
                    "it, is it like the examples that the model was trained on, with a label that it knows?"
                ) from error
        raise


def _alone(model: nn.Module, task: Task, rows: Rows, i: int) -> Exception | None:
    device, _ = placement(model)
    try:
        with torch.no_grad():
            task.loss(model, to_device(rows.batch([i]), device))
    except _FOREIGN as e:
        return e
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
