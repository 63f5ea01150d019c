"""Where a layer is watched: at a module's door, or at one call inside its forward.

A module may do more than its layer: scale what an embedding gives, shift the positions that it looks up, choose among
experts by what a linear map gives. There the call of torch's own function with the module's weight is the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unde.gradients.layers import Rule

_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)


class Watched(Protocol):
    @property
    def module(self) -> nn.Module: ...
    @property
    def rule(self) -> Rule: ...


# (module, args, kwargs, output) → what takes the place of the output; None: nothing does
Seen = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


def attach(use: Watched, seen: Seen) -> Callable[[], None]:
    """Calls `seen` at every call of the layer, until what is returned is called."""
    function = use.rule.inside
    if function is None:
        return use.module.register_forward_hook(seen, with_kwargs=True).remove
    open_calls: list[_Inside] = []

    def enter(module: nn.Module, _args: Any) -> None:
        call = _Inside(module, function, seen)
        call.__enter__()
        open_calls.append(call)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        open_calls.pop().__exit__(None, None, None)

    before = use.module.register_forward_pre_hook(enter)
    after = use.module.register_forward_hook(leave, always_call=True)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


class _Inside(TorchFunctionMode):
    """Watches for one function with the module's own weight, as it is or in another precision."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], seen: Seen) -> None:
        super().__init__()
        self.module, self.function, self.seen = module, function, seen
        self.weights: list[Any] = [module.weight]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is self.function:
            if any(x is w for x in (*args[1:], *kwargs.values()) for w in self.weights):
                x = args[0] if args else kwargs["input"]
                with torch._C.DisableTorchFunction():
                    made = self.seen(self.module, (x,), {}, out)
                return out if made is None else made
        elif func in _CASTS and any(args[0] is w for w in self.weights):
            self.weights.append(out)
        return out
