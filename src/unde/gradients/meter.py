"""A meter for running torch code: its floating point operations, and the bytes of tensors alive at once.

It sees every operation that torch dispatches, of real tensors and of fake ones (shapes without content) alike.
What a kernel uses inside itself, as some convolutions do, it does not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Operations that torch's own table of formulas leaves out, and which formula of it is theirs.
_ALSO = {
    "addmm_": "addmm",
    "baddbmm_": "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


def _formulas() -> dict[Any, Callable[..., int]]:
    also = {getattr(aten, name): flop_registry[getattr(aten, like)] for name, like in _ALSO.items()}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        also[torch.ops.mkldnn._linear_pointwise] = _of_linear
    return {**flop_registry, **also}


def _of_linear(x: Tensor, w: Tensor, *_rest: Any, **_more: Any) -> int:
    return 2 * x.numel() * w.shape[0]


class Cost(NamedTuple):
    """Of a pass of so many examples: the most bytes alive at once, operations, calls of them."""

    examples: int
    peak: int
    flops: int
    calls: int


class Meter(TorchDispatchMode):
    """`flops` of matrix products, convolutions and attention; `calls` of operations; `live` bytes now and their `peak`.

    Tensors made before are alive for the meter once it is told to `hold` them.

    >>> with Meter() as meter:
    ...     x = torch.ones(8, 4) @ torch.ones(4, 2)
    >>> meter.flops, meter.live, meter.peak
    (128, 64, 224)
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.calls = self.live = self.peak = 0
        self._formulas = _formulas()
        self._seen: dict[int, weakref.ref[Any]] = {}  # storages that are alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside, and torch asks again for every operation."""
        return False

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that are there already; returns the bytes that this adds."""
        before = self.live
        for t in tensors:
            self._note(t)
        return self.live - before

    def restart(self) -> None:
        """Forget the operations and the peak, not what is alive."""
        self.flops, self.calls, self.peak = 0, 0, self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.equal.default and any(isinstance(x, FakeTensor) for x in args):
            return True  # fake tensors have no content that could have changed
        out = func(*args, **kwargs)
        self.calls += func is not torch.ops.prim.device.default  # only fake tensors have to be asked
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += _counted(formula, args, kwargs, out)
        if isinstance(out, Tensor):
            self._note(out)
        else:
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self._note(t)
        return out

    def cost(self, examples: int) -> Cost:
        return Cost(examples, self.peak, self.flops, self.calls)

    def _note(self, t: Tensor) -> None:
        if t.layout != torch.strided:
            for part in (t._indices(), t._values()) if t.layout == torch.sparse_coo else ():
                self._note(part)
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, partial(self._gone, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int, _storage: object) -> None:
        del self._seen[key]
        self.live -= size


def _counted(formula: Callable[..., int], args: Any, kwargs: Any, out: Any) -> int:
    """What torch's wrapper of a formula does, for operations whose tensors are in no deeper list."""
    inner = getattr(formula, "__wrapped__", None)
    if inner is None:
        return formula(*args, **kwargs, out_val=out)
    shapes = tuple(map(_shape, out)) if isinstance(out, (tuple, list)) else _shape(out)
    return inner(*map(_shape, args), **{k: _shape(x) for k, x in kwargs.items()}, out_shape=shapes)


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else x
