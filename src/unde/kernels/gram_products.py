"""The empirical kernel, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2): whole, in the smaller of two forms, from leading singular vectors, or
layer by layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unde.errors import UndeError
from unde.kernels.base import Settled, Sizes
from unde.kernels.block_diagonal import ByLayer
from unde.kernels.gram import Dual, Primal
from unde.kernels.low_rank import Truncated


@dataclass(frozen=True)
class Gram:
    """`form` is "primal", "dual" or "auto", the smaller, or "svd(256)", from so many singular vectors; `blocks` is
    "full", or "layer" as LoGRA has it. `damping_scope` is what relative damping of layers is a multiple of: the mean
    diagonal of each "layer", or of the whole "model"."""

    damping: float
    relative: bool = True
    form: str = "auto"
    blocks: str = "full"
    fisher: str = "empirical"
    damping_scope: str = "layer"

    def on(self, sizes: Sizes) -> Settled:
        if self.blocks == "layer":
            return ByLayer(self.damping, self.relative, sizes, self.damping_scope)
        if (rank := svd_rank(self.form)) is not None:
            return Truncated(self.damping, self.relative, sizes, rank)
        primal = self.form == "primal" or (self.form == "auto" and sizes.width <= sizes.examples)
        return (Primal if primal else Dual)(self.damping, self.relative, sizes)


def svd_rank(form: str) -> int | None:
    """t of "svd(t)"; None of other forms.

    >>> svd_rank("svd(256)"), svd_rank("dual")
    (256, None)
    """
    match = re.fullmatch(r"svd\(([0-9]{1,9})\)", form)
    if match is not None and int(match[1]) < 1:
        raise UndeError(f"form {form!r}: expected at least one singular vector, as in 'svd(256)'")
    return None if match is None else int(match[1])
