"""Similarity kernels K: pure functions of feature blocks."""

from whence.kernels.gram import Gram

__all__ = ["Gram"]
