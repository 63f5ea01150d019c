"""Whatever draws from the global generators of python, numpy and torch draws the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def isolated_rng(seed: int | None = None) -> Generator[None]:
    """The caller's generators are afterwards as they were."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            if seed is not None:
                seed_all(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
