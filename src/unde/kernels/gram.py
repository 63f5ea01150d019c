"""The empirical kernel, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2): whole, in the smaller of two forms, or layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from unde.kernels.base import Settled, Sizes
from unde.kernels.by_layer import ByLayer
from unde.kernels.full import Dual, Primal


@dataclass(frozen=True)
class Gram:
    """`form` is "primal", "dual" or "auto", the smaller; `blocks` is "full", or "layer" as LoGRA has it."""

    damping: float
    relative: bool = True
    form: str = "auto"
    blocks: str = "full"

    @property
    def fisher(self) -> str:
        return "empirical"

    def on(self, sizes: Sizes) -> Settled:
        if self.blocks == "layer":
            return ByLayer(self.damping, self.relative, sizes)
        primal = self.form == "primal" or (self.form == "auto" and sizes.width <= sizes.examples)
        return (Primal if primal else Dual)(self.damping, self.relative, sizes)
