"""Meter of running torch code: floating point operations, calls, and bytes of tensors alive at once.

It sees every operation that torch dispatches, not the work space inside one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from unde.data import parts

aten = torch.ops.aten

# Operations without a formula in torch's table, and the operation whose formula they share.
_ALIASES = {
    "addmm_": "addmm",
    "baddbmm_": "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


def _read_formulas() -> dict[Any, Callable[..., int]]:
    more = {getattr(aten, name): flop_registry[getattr(aten, like)] for name, like in _ALIASES.items()}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        more[torch.ops.mkldnn._linear_pointwise] = _count_linear
    return {**flop_registry, **more}


def _count_linear(x: Tensor, w: Tensor, *_rest: Any, **_more: Any) -> int:
    return 2 * x.numel() * w.shape[0]


class PassCost(NamedTuple):
    """Peak bytes, operations and calls of a pass of so many examples."""

    examples: int
    peak: int
    flops: int
    calls: int


class Meter(TorchDispatchMode):
    """Count `flops` of matrix products, convolutions and attention, `calls`, `live` bytes and their `peak`.

    Tensors made before count once they are passed to `hold`, and never if they are passed to `ignore`. With a `device`
    only bytes there count.

    >>> with Meter() as meter:
    ...     x = torch.ones(8, 4) @ torch.ones(4, 2)
    >>> meter.flops, meter.live, meter.peak
    (128, 64, 224)
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self.flops = self.calls = self.live = self.peak = 0
        self._formulas = _read_formulas()
        self._seen: dict[int, weakref.ref[Any]] = {}  # storages that are alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch a check for each operation: nothing is compiled inside."""
        return False

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that exist already; returns the bytes that this adds."""
        before = self.live
        for t in tensors:
            self._add(t)
        return self.live - before

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count these, such as weights, nor views of them."""
        for t in tensors:
            for part in parts(t):
                storage = part.untyped_storage()
                self._seen[storage._cdata] = weakref.ref(storage, partial(self._drop, storage._cdata, 0))

    def restart(self) -> None:
        """Reset operations and peak; live tensors stay."""
        self.flops, self.calls, self.peak = 0, 0, self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls += 1
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        if isinstance(out, Tensor):
            self._add(out)
        else:
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self._add(t)
        return out

    def cost(self, examples: int) -> PassCost:
        return PassCost(examples, self.peak, self.flops, self.calls)

    def _add(self, t: Tensor) -> None:
        if t.layout != torch.strided:
            for part in (t._indices(), t._values()) if t.layout == torch.sparse_coo else ():
                self._add(part)
            return
        if self.device is not None and t.device != self.device:
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, partial(self._drop, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int, size: int, _storage: object) -> None:
        del self._seen[key]
        self.live -= size
