"""GELU by its tanh, in less time than the kernel of torch, and a quarter of that of transformers.

½ x (1 + tanh(u)) is x σ(2u), and the sigmoid of torch takes a fifth of the time of its tanh.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LINEAR = math.sqrt(8 / math.pi)  # 2u = x (_LINEAR + _CUBIC x²)
_CUBIC = 0.044715 * _LINEAR


def gelu_tanh(x: Tensor) -> Tensor:
    """`F.gelu(x, approximate="tanh")`."""
    return _GeluTanh.apply(x)


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = _sigmoid(x)
        ctx.save_for_backward(x, share)
        return x * share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [gradient], (x, share) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of these gradients
            share = torch.sigmoid(x * (_LINEAR + _CUBIC * x * x))
            return gradient * share * (1 + x * (_LINEAR + 3 * _CUBIC * x * x) * (1 - share))
        slope = torch.addcmul(x.new_tensor(_LINEAR), x, x, value=3 * _CUBIC).mul_(x)
        return torch.ops.aten.sigmoid_backward(slope, share).add_(share).mul_(gradient)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.addcmul(x.new_tensor(_LINEAR), x, x, value=_CUBIC).mul_(x).sigmoid_()


def written_out(model: nn.Module) -> list[nn.Module]:
    """Modules that compute it in eight operations: those of GPT-2 and others, not of subclasses."""
    theirs = getattr(sys.modules.get("transformers.activations"), "NewGELUActivation", None)
    return [module for module in model.modules() if type(module) is theirs and "forward" not in vars(module)]


@contextmanager
def in_one(modules: Sequence[nn.Module]) -> Generator[None]:
    """While it is entered, these modules call `F.gelu`."""
    for module in modules:
        vars(module)["forward"] = _gelu
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _gelu(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")
