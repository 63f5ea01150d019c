"""Similarity kernels K: objects that are settled on sizes, fitted to features in rounds, and applied to rows."""

from unde.kernels.base import Fitted, InMemory, Kernel, Needs, Part, Sizes, Source, fitting
from unde.kernels.ekfac import EKFACKernel
from unde.kernels.gram import Gram
from unde.kernels.identity import Identity

__all__ = [
    "EKFACKernel",
    "Fitted",
    "Gram",
    "Identity",
    "InMemory",
    "Kernel",
    "Needs",
    "Part",
    "Sizes",
    "Source",
    "fitting",
]
