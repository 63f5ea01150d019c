"""Products with weights by oneDNN, rather than by the BLAS that torch was built with.

MKL keeps to AVX2 on processors that are not Intel's. oneDNN, which torch has for convolutions, makes use of all that
a processor knows: of AVX-512 that is twice as many multiplications a second. Numbers are float32 as before, and sums
differ in their order alone. Where a product cannot go this way (another device or type, a layout that is neither that
of a matrix nor of its transpose) it goes as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unde.evaluate.bank.activations import gelu_tanh
from unde.evaluate.bank.vmap_ops import attention
from unde.onednn import by_onednn

LEAST = 2**20  # multiplications; calling oneDNN from here takes as long as fewer do
SHORT = 32  # tokens, up to which attention in single steps is quicker than the kernel of torch


class Products(TorchFunctionMode):
    """While it is entered, products with weights go to oneDNN, and attention over a few tokens is single steps."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, instead = kwargs or {}, _INSTEAD.get(func)
        found = None if instead is None else instead(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return _product(input, weight, bias)


def _addmm(*given: Tensor, **named: Any) -> Tensor | None:
    if len(given) != 3 or named or given[2].ndim != 2:
        return None
    bias, x, weight = given
    return _product(x, weight.t(), bias)


def _matmul(*given: Tensor, **named: Any) -> Tensor | None:
    if len(given) != 2 or named or given[1].ndim != 2:
        return None
    x, weight = given
    return _product(x, weight.t())


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **others: Any,
) -> Tensor | None:
    """Without a mask: tokens that attend to none are a matter of their own."""
    if attn_mask is not None or dropout_p or max(query.shape[-2], key.shape[-2]) > SHORT:
        return None
    return attention(query, key, value, **others)


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor | None:
    return gelu_tanh(input) if approximate == "tanh" and is_plain(input) else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x weightᵀ + bias, or None if that is not for oneDNN."""
    if (
        x.numel() * weight.shape[0] < LEAST
        or x.ndim < 2
        or weight.ndim != 2
        or x.shape[-1] != weight.shape[1]
        or not (weight.is_contiguous() or weight.t().is_contiguous())
        or not all(is_plain(t) for t in (x, weight))
        or (
            bias is not None
            and not (is_plain(bias) and bias.is_contiguous() and bias.shape == weight.shape[:1])
        )
        or torch.is_autocast_enabled("cpu")
    ):
        return None
    return _Product.apply(x, weight, bias)


def is_plain(tensor: Tensor) -> bool:
    """Whether oneDNN can be given its memory."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        [gradient], (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        multiply = F.linear if torch.is_grad_enabled() else by_onednn  # for gradients of these gradients
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        inputs = x.reshape(-1, x.shape[-1]).contiguous()
        return (
            multiply(rows, weight.t()).view(x.shape) if of_x else None,
            _weight_gradient(rows, inputs, weight, multiply) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """gradientᵀ x. One of the two is copied as its transpose, and so is a result in another layout than the weight's:
    whatever is less."""
    after = weight.numel() if weight.is_contiguous() else -weight.numel()
    if gradient.numel() <= x.numel() + after:
        return multiply(gradient.t(), x.t())
    return multiply(x.t(), gradient.t()).t()


# What each function of torch is replaced by, which gives None where it should be as ever.
_INSTEAD: dict[Callable, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    F.scaled_dot_product_attention: _attention,
    F.gelu: _gelu,
}
