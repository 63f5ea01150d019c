"""Where a module has the examples of a batch: guesses, likeliest first."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde.gradients.collector import FRONT, SECOND, SHARED, HookedModule, share
from unde.gradients.hooks import attach

FAILURES = (  # of a wrong guess; fake tensors assert what real ones raise
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AssertionError,
)


@contextmanager
def guessing(
    uses: Sequence[HookedModule], batch: int, sharing: bool = False
) -> Generator[dict[str, list[str]]]:
    """Inside, a pass of `batch` examples gives every hooked module its likeliest layout, before anyone else that is
    attached to it later is called; what is yielded are those left to try, in the order of calls.

    With `sharing`, modules behind one that seems to be shared get what they will get if it is.
    """
    options: dict[str, list[str]] = {}
    handles = []

    def note(use: HookedModule, _m: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or not x.dim():
            return None  # as if it had not been called: its parameters go another way
        possible = _layouts(tuple(x.shape), batch)
        if use.name not in options:
            use.layout, options[use.name] = possible[0], possible[1:]
            use.lone = x.shape[0] == 1
        else:  # called again
            options[use.name] = [layout for layout in options[use.name] if layout in possible]
        return share(out, batch, use.lone) if sharing and use.layout == SHARED else None

    try:
        for use in uses:
            use.layout = None
            handles.append(attach(use, partial(note, use)))
        yield options
    finally:
        for remove in handles:
            remove()


def first_guess(uses: Sequence[HookedModule], batch: int, run: Callable[[], object]) -> dict[str, list[str]]:
    """Gives every hooked module the likeliest layout in a pass of its own, `run`; returns those left to try."""
    try:
        with torch.no_grad(), guessing(uses, batch, sharing=True) as options:
            run()
    except FAILURES:
        with torch.no_grad(), guessing(uses, batch) as options:
            run()
    return options


def _layouts(shape: tuple[int, ...], batch: int) -> list[str]:
    """Layouts to try, likeliest first."""
    second = [SECOND] if len(shape) > 1 and shape[1] == batch else []
    if shape[0] % batch == 0:
        return [FRONT, *second, SHARED]
    return [*second, SHARED, FRONT]  # in front it may be, behind a module that turns out to be shared


def next_layouts(uses: list[HookedModule], options: dict[str, list[str]]) -> list[HookedModule]:
    """Moves modules on to their next layout; to SHARED only the first called: those behind it may be right then."""
    moved: list[HookedModule] = []
    for use in sorted(uses, key=lambda use: list(options).index(use.name)):
        if options[use.name][0] != SHARED or not any(m.layout == SHARED for m in moved):
            use.layout = options[use.name].pop(0)
            moved.append(use)
    return moved
