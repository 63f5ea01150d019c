"""Similarity kernels K: objects that are settled on sizes, fitted to features in rounds, and applied to rows."""

from unde.kernels.base import (
    Fitted,
    InMemory,
    Kernel,
    Moments,
    Needs,
    Part,
    Round,
    Settled,
    Sizes,
    Source,
    chunks,
    fitting,
    read,
)
from unde.kernels.diagonal import Diagonal
from unde.kernels.ekfac import EKFACKernel
from unde.kernels.gram_products import Gram
from unde.kernels.identity import Identity

__all__ = [
    "Diagonal",
    "EKFACKernel",
    "Fitted",
    "Gram",
    "Identity",
    "InMemory",
    "Kernel",
    "Moments",
    "Needs",
    "Part",
    "Round",
    "Settled",
    "Sizes",
    "Source",
    "chunks",
    "fitting",
    "read",
]
