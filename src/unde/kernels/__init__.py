"""Similarity kernels K: pure functions of feature blocks."""

from unde.kernels.base import Block, Kernel, Part
from unde.kernels.ekfac import EKFACKernel
from unde.kernels.gram import Gram

__all__ = ["Block", "EKFACKernel", "Gram", "Kernel", "Part"]
