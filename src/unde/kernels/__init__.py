"""Similarity kernels K: objects that are bound to sizes, fitted to features in rounds, and applied to rows."""

from unde.kernels.base import (
    BoundKernel,
    FeatureLayout,
    Fitted,
    Kernel,
    KernelSource,
    Moments,
    Needs,
    ParameterColumns,
    Round,
    TensorSource,
    chunks,
    fit_kernel,
    read,
)
from unde.kernels.diagonal import Diagonal, Identity
from unde.kernels.ekfac import EKFACKernel
from unde.kernels.trak import Gram

__all__ = [
    "BoundKernel",
    "Diagonal",
    "EKFACKernel",
    "FeatureLayout",
    "Fitted",
    "Gram",
    "Identity",
    "Kernel",
    "KernelSource",
    "Moments",
    "Needs",
    "ParameterColumns",
    "Round",
    "TensorSource",
    "chunks",
    "fit_kernel",
    "read",
]
