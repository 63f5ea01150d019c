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
_MANY = 256  # rows of x: with fewer, to arrange w takes longer than it saves
_SHORT = 16  # columns: of fewer, most of a vector is empty
_SOME = 32  # rows of w: the same


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


def times_each(x: Tensor, w: Tensor) -> Tensor:
    """(r, M, C) by (n, M, C) → (r, M, n), each of M matrices by its own, by oneDNN: a convolution of single points has
    its channels in groups, and is one call. x is copied if it is not contiguous, w always.

    >>> times_each(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[1.0, 0.0], [1.0, 1.0]]]))
    tensor([[[1.],
             [7.]]])
    """
    (r, m, c), n = x.shape, len(w)
    points = x.reshape(1, 1, r, m * c).permute(0, 3, 1, 2)
    kernels = w.transpose(0, 1).reshape(m * n, c, 1, 1)
    made = torch.ops.mkldnn._convolution_pointwise(
        points, kernels, None, [0, 0], [1, 1], [1, 1], m, "none", [], ""
    )
    return made.permute(0, 2, 3, 1).reshape(r, m, n)


def each_faster_by_onednn(x: Tensor, rows: int | None = None) -> bool:
    """Whether that is worth while for (r, M, C), and so many rows of w; without them, for some."""
    r, m, c = x.shape
    return (
        onednn_is_faster()
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and m > 1
        and r >= max(_MANY, c)  # else w is larger than what is made
        and c >= _SHORT
        and (rows is None or (rows >= _SOME and rows % 16 == 0))
    )


def arranged(r: int, rows: int, width: int) -> int:
    """Bytes of copies of w (rows, width) that `times_each` makes for r rows of x, at most."""
    return 2 * 4 * rows * width if r >= _MANY and onednn_is_faster() else 0


def available() -> bool:
    names = ("_linear_pointwise", "_convolution_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


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
