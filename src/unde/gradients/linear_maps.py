"""Linear maps of the frozen pass by the faster library, forward and backward, where there is one (`unde.onednn`)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from unde.gradients.layers.linear import is_conv1d
from unde.onednn import faster_by_onednn, onednn_is_faster, times


@contextmanager
def quick_linears(model: nn.Module) -> Generator[None]:
    """Inside: linear layers that do nothing else, of weights that are frozen, multiply by the faster library."""
    changed: list[nn.Module] = []
    try:
        for module in model.modules() if onednn_is_faster() else ():
            turned = is_conv1d(module)
            if not (turned or type(module).forward is nn.Linear.forward) or "forward" in vars(module):
                continue
            weight = module._parameters.get("weight")
            if type(weight) is nn.Parameter and weight.dtype == torch.float32:
                # Not by setattr, which asks what kind of thing it is.
                vars(module)["forward"] = partial(_forward, module, module.forward, turned)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _forward(
    module: nn.Module, own: Callable[..., Tensor], turned: bool, *args: Any, **kwargs: Any
) -> Tensor:
    given, weight = [*args, *kwargs.values()], module._parameters.get("weight")
    # Somebody may have put another tensor in its place, or differentiates in a way of his own.
    if (
        len(given) != 1
        or type(given[0]) not in (Tensor, FakeTensor)
        or type(weight) is not nn.Parameter
        or weight.requires_grad
        or not faster_by_onednn(given[0], weight)
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
    ):
        return own(*args, **kwargs)
    return FrozenLinear.apply(given[0], weight.T if turned else weight, module._parameters.get("bias"))


class FrozenLinear(torch.autograd.Function):
    """x Wᵀ + b, of which x alone is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.w = w
        return times(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        [g] = grads
        return FrozenLinear.apply(g, ctx.w.T, None), None, None
