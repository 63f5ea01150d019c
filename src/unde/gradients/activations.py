"""Activations that a library spells out, operation by operation, as the one kernel that torch has for them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

# x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), eight operations each way: an eighth of a frozen pass of GPT-2.
_SPELLED_OUT = {
    ("transformers.activations", "NewGELUActivation"): partial(F.gelu, approximate="tanh"),
}


@contextmanager
def quick_activations(model: nn.Module) -> Generator[None]:
    """Inside: such activations are one operation, the same up to rounding."""
    changed: list[nn.Module] = []
    try:
        for module in model.modules():
            cls = type(module)
            kernel = _SPELLED_OUT.get((cls.__module__, cls.__qualname__))
            if kernel is not None and "forward" not in vars(module):
                vars(module)["forward"] = partial(_forward, kernel, module.forward)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _forward(kernel: Callable[[Tensor], Tensor], own: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Of half precision as the module has it: it rounds after every operation."""
    return kernel(input) if input.dtype.itemsize >= 4 else own(input)
