"""Matrix products in float32 by oneDNN on AMD processors with AVX-512. `UNDE_ONEDNN=0` switches it off.

torch multiplies matrices on CPUs with MKL, which uses half of the width of AVX-512 on AMD. oneDNN, which torch has for
convolutions and for compiled models, uses all of it: language features take 0.7 of the time, scores 0.6. On other
processors these functions call torch's public ones. The choice depends on the processor alone, so one machine always
gives the same bits.

This is the only module with private functions of torch: `mkldnn._linear_pointwise`, and
`_are_functorch_transforms_active`, which tells when a custom autograd function would fail.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEAST = 2**18  # multiplications below which finding the kernel takes too long


def times(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., C) by (r, C) → (..., r), as `F.linear`. Not differentiable.

    >>> times(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]]))
    tensor([[11., 17.,  2.]])
    """
    if not faster_by_onednn(x, w):
        return F.linear(x, w, bias)
    product = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    # With more than two axes it is a view that nobody else holds; autograd forbids in-place changes of views.
    return torch.ops.aten._unsafe_view(product, product.shape) if product._is_view() else product


def faster_by_onednn(x: Tensor, w: Tensor) -> bool:
    """Whether oneDNN is faster for these."""
    return (
        onednn_is_faster()
        and x.dtype == w.dtype == torch.float32
        and x.device.type == w.device.type == "cpu"
        and x.numel() * w.shape[0] >= _LEAST
        and (w.is_contiguous() or w.T.is_contiguous())  # oneDNN takes a thousand times as long for others
    )


@cache
def onednn_is_faster() -> bool:
    """Whether this is a processor of AMD with AVX-512, torch has both libraries, and UNDE_ONEDNN is not 0."""
    return (
        os.environ.get("UNDE_ONEDNN", "1") != "0"
        and _amd()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and available()
    )


def available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _amd() -> bool:
    info = Path("/proc/cpuinfo")
    try:
        return "AuthenticAMD" in (info.read_text() if info.exists() else platform.processor())
    except OSError:
        return False


# --- linear layers of a frozen model ------------------------------------------------------------------------


@contextmanager
def frozen_linears(model: nn.Module) -> Generator[None]:
    """Inside, plain linear layers with frozen float32 weights multiply by oneDNN where it is faster."""
    changed: list[nn.Module] = []
    try:
        for module in model.modules() if onednn_is_faster() else ():
            transposed = is_conv1d(module)
            if not (transposed or type(module).forward is nn.Linear.forward) or "forward" in vars(module):
                continue
            weight = module._parameters.get("weight")
            if type(weight) is nn.Parameter and weight.dtype == torch.float32:
                # setattr would look for parameters and modules
                vars(module)["forward"] = partial(_forward, module, module.forward, transposed)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D: a linear layer whose weight is stored (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _forward(
    module: nn.Module, forward: Callable[..., Tensor], transposed: bool, *args: Any, **kwargs: Any
) -> Tensor:
    inputs, weight = [*args, *kwargs.values()], module._parameters.get("weight")
    if (
        len(inputs) != 1
        or type(inputs[0]) is not Tensor
        or type(weight) is not nn.Parameter
        or weight.requires_grad
        or not faster_by_onednn(inputs[0], weight)
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
    ):
        return forward(*args, **kwargs)
    return FrozenLinear.apply(inputs[0], weight.T if transposed else weight, module._parameters.get("bias"))


class FrozenLinear(torch.autograd.Function):
    """x Wᵀ + b, differentiable by x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.w = w
        return times(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        [g] = grads
        return FrozenLinear.apply(g, ctx.w.T, None), None, None
