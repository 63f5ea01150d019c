"""Memory that a step gives back is there for the next one."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

# The largest block that glibc takes as a hint, and a page less than it.
_BLOCK = 2**25 - 2**12


@cache
def keep_pages() -> None:
    """Lets malloc keep up to 64 MB that are free, in this process and from now on.

    What a step of training allocates is all free when it ends. glibc then returns it to the system, depending on where
    it happens to lie, and the next step pays for every page anew: a tenth to a third of a step of small models. But it
    takes the size of a large block that is freed as a hint of what the program does, and keeps twice as much from then
    on. Other allocators allocate a block and free it.
    """
    with _disable_current_modes():  # no meter counts it, and it is no fake
        torch.empty(_BLOCK, dtype=torch.uint8)
