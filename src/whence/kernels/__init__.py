"""Similarity kernels K: pure functions of feature blocks."""

from whence.kernels.base import Block, Kernel, Part
from whence.kernels.ekfac import EKFACKernel
from whence.kernels.gram import Gram

__all__ = ["Block", "EKFACKernel", "Gram", "Kernel", "Part"]
