"""A pass that stays open from one job to the next."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from unde.checkpoints import Checkpoint, loaded
from unde.gradients.feature_pass import FeaturePass


class Closable(Protocol):
    def close(self) -> None: ...


class Running:
    """One pass at a time, under one checkpoint or step; the model is as it was after `close`."""

    def __init__(self) -> None:
        self._open: tuple[int, FeaturePass, ExitStack] | None = None

    def under(
        self,
        c: int,
        model: nn.Module,
        checkpoint: Checkpoint | None,
        made: Callable[[], FeaturePass],
        also: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    ) -> FeaturePass:
        """The pass under checkpoint or step c, `made` with its weights loaded, if it is not the one that is open."""
        if self._open is not None and self._open[0] == c:
            return self._open[1]
        self.close()
        with ExitStack() as stack:
            stack.enter_context(loaded(model, checkpoint))
            stack.enter_context(also(model))
            run = stack.enter_context(made())
            self._open = (c, run, stack.pop_all())
        return run

    def close(self) -> None:
        if self._open is not None:
            stack = self._open[2]
            self._open = None
            stack.close()


@contextmanager
def close_on_error(jobs: Closable) -> Generator[None]:
    """After an error inside the block the model has no hooks: it is run again, to see which example it was."""
    try:
        yield
    except Exception:
        jobs.close()
        raise
