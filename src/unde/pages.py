"""Memory of one pass that is there for the next: to get a new page from the system takes longer than to fill it.

What a pass allocates is all free when it ends. glibc then returns it to the system, depending on how much it is and
where it happens to lie, and the next pass pays for every page anew: a tenth to a third of its time. These functions
tell malloc to keep it. Where there is another allocator they do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALWAYS, _MEANWHILE = 2**26, 2**30  # bytes that are kept: between single passes, and while there are many
_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_ALONE = 2**25  # bytes: larger blocks are not kept, as they would leave gaps that nothing fits into

_lock, _inside = Lock(), 0


@cache
def keep_pages() -> None:
    """Lets malloc keep up to 64 MiB that are free, in this process and from now on."""
    with _lock:
        if not _inside:
            _keep(_ALWAYS)


@contextmanager
def kept_pages() -> Generator[None]:
    """Inside, malloc keeps up to 1 GiB that are free; they go back to the system when the outermost block ends."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _keep(_MEANWHILE)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _keep(_ALWAYS)
                _libc("malloc_trim")(0)


def large(*shape: int) -> Tensor:
    """An array of float32 and of any content. NumPy asks the system for large pages: there are fewer to get."""
    return torch.from_numpy(np.empty(shape, dtype=np.float32))


def _keep(most: int) -> None:
    mallopt = _libc("mallopt")
    mallopt(_MMAP, _ALONE)
    mallopt(_TRIM, most)


@cache
def _libc(name: str) -> Callable[..., Any]:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # not of this system
        return lambda *args: 0
