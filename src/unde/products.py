"""x Wᵀ in float32, by the library that is faster on the processor at hand.

torch multiplies matrices on CPUs with MKL, which on processors of AMD uses half of the width of AVX-512. oneDNN, which
torch has for convolutions and for compiled models, uses all of it: half of the time on a Zen 5. Which one it is depends
on the processor alone, so the same machine always gives the same bits.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = 2**18  # multiplications from which on finding the kernel takes little beside them


def times(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., C) by (r, C) → (..., r). Not to be differentiated.

    >>> times(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]]))
    tensor([[11., 17.,  2.]])
    """
    return by_onednn(x, w, bias) if faster_by_onednn(x, w) else F.linear(x, w, bias)


def by_onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, of float32 on a CPU; x is copied if it is not contiguous."""
    made = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    # Of more than two axes it is a view of what nobody else holds; autograd lets nobody change views in place.
    return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made


def available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def faster_by_onednn(x: Tensor, w: Tensor) -> bool:
    """Whether it is worth while for these."""
    return (
        onednn_is_faster()
        and x.dtype == w.dtype == torch.float32
        and x.device.type == w.device.type == "cpu"
        and x.numel() * w.shape[0] >= _LEAST
        and (w.is_contiguous() or w.T.is_contiguous())  # of others its products take a thousand times as long
    )


@cache
def onednn_is_faster() -> bool:
    """On this processor: one of AMD with AVX-512, where torch has both."""
    return (
        _amd()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and available()
    )


def _amd() -> bool:
    info = Path("/proc/cpuinfo")
    try:
        return "AuthenticAMD" in (info.read_text() if info.exists() else platform.processor())
    except OSError:
        return False
