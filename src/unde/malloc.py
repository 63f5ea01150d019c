"""Keep free memory between passes instead of returning it to the system. `UNDE_MALLOC=0` switches it off.

A pass frees all that it allocates, and glibc returns it to the system; the next pass pays for every page again, about a
fifth of a build of GPT-2. Other allocators, macOS and Windows are left as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

_DURING, _AFTER = 2**30, 2**26  # bytes of free memory that stay with the process
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE = 2**30  # bytes: larger blocks would leave gaps that nothing fits into

_lock, _depth = Lock(), 0


@contextmanager
def keep_memory() -> Generator[None]:
    """Keep up to 1 GiB of free memory in this block; it is returned when the outermost block ends."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _set_thresholds(_DURING)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _set_thresholds(_AFTER)
                _libc("malloc_trim")(0)


def machine_memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _set_thresholds(trim: int) -> None:
    _libc("mallopt")(_M_MMAP_THRESHOLD, _LARGE)
    _libc("mallopt")(_M_TRIM_THRESHOLD, trim)


@cache
def _libc(name: str) -> Callable[..., Any]:
    """A function of glibc; one that does nothing where there is none, or where it is switched off."""
    try:
        if os.environ.get("UNDE_MALLOC") == "0":
            raise AttributeError
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return lambda *args: 0
