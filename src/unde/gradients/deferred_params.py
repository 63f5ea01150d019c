"""Parameters that serve all examples at once until they meet one: tables of relative positions, mostly.

T5 looks up a bias for every pair of positions, Swin for every pair in a window; it is turned around, gets an axis of
length one, and is added to the scores of all examples. The parameter is replaced by a tensor that remembers what is
done to it. Where it meets a tensor with examples in front, it becomes a leaf with a copy for each of them, whose
gradient goes back through what was remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LOOKUPS = (
    Tensor.__getitem__,
    F.embedding,
    torch.index_select,
    Tensor.index_select,
    torch.take,
    torch.gather,
)


class Later:
    """The parameters `names` of a model in a pass of `batch` examples: `swapped` take their place.

    After the forward pass, `leaves` are to be differentiated by; `gradients` gives (B, *shape) from what that gave.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], batch: int) -> None:
        parameters = dict(model.named_parameters()) if names else {}
        self.batch = batch
        self.swapped: dict[str, Tensor] = {
            n: _pending(parameters[n].detach(), self, _Trace(n)) for n in names
        }
        self.leaves: list[Tensor] = []
        self._traces: list[_Trace] = []
        self._parameters = {n: parameters[n].detach() for n in names}

    def leaf(self, value: Tensor, trace: _Trace, rows: int) -> Tensor:
        if rows % self.batch:
            raise NotImplementedError("the parameter meets a tensor without examples in front")
        leaf = value.detach().expand(rows, *value.shape[1:]).clone().requires_grad_()
        self.leaves.append(leaf)
        self._traces.append(trace)
        return leaf

    def gradients(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        sums: dict[_Trace, Tensor] = {}
        for trace, g in zip(self._traces, grads):
            if g is not None:
                each = g.unflatten(0, (self.batch, -1)).sum(1)
                sums[trace] = sums[trace] + each if trace in sums else each
        for trace, g in sums.items():
            with torch.enable_grad():
                start = self._parameters[trace.name].requires_grad_()
                end = trace.run(start)
            g = g.reshape(self.batch, *end.shape)
            (found,) = torch.autograd.grad(end, start, g, is_grads_batched=True)
            yield trace.name, found.detach()


class _Trace:
    """What was done to a parameter: one step after another, from its beginning."""

    def __init__(
        self, name: str, before: _Trace | None = None, step: Callable[[Tensor], Tensor] | None = None
    ):
        self.name, self.before, self.step = name, before, step

    def run(self, value: Tensor) -> Tensor:
        if self.before is None or self.step is None:
            return value
        return self.step(self.before.run(value))


class Pending(Tensor):
    """A tensor on its way from a parameter."""

    later: Later
    path: _Trace

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _followed(func, args, kwargs or {})


def _followed(func: Any, args: Any, kwargs: Any) -> Any:
    found = {id(x): x for x in _tensors((args, kwargs))}
    own, *more = (x for x in found.values() if isinstance(x, Pending))
    others = [x for x in found.values() if not isinstance(x, Pending)]
    if more or getattr(func, "__name__", "") == "apply":
        raise NotImplementedError("two parameters meet, or one meets a function of somebody's own")
    later, trace, plain = own.later, own.path, own.as_subclass(Tensor)

    def step(value: Tensor) -> Any:
        return func(*_swapped(args, own, value), **_swapped(kwargs, own, value))

    meets = any(x.requires_grad for x in others)
    out = step(plain)
    if not isinstance(out, Tensor):
        return out
    widened = out.dim() == own.dim() and out.dim() > 0 and len(own) == 1 < len(out)
    grown = widened or (bool(others) and out.dim() == own.dim() + 1)
    if not meets and (func in _LOOKUPS or not grown):
        return _pending(out.detach(), later, _Trace(trace.name, trace, step))
    if any(x.dim() == own.dim() + 1 for x in others):
        plain, trace = plain.unsqueeze(0), _Trace(trace.name, trace, lambda x: x.unsqueeze(0))
    elif len(own) != 1:
        raise NotImplementedError("the parameter meets examples in a way that is not followed")
    return step(later.leaf(plain, trace, len(out)))


def _pending(value: Tensor, later: Later, trace: _Trace) -> Tensor:
    made: Any = value.as_subclass(Pending)
    made.later, made.path = later, trace
    return made


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))


def _swapped(tree: Any, old: Tensor, new: Tensor) -> Any:
    if tree is old:
        return new
    if isinstance(tree, (tuple, list)):
        return type(tree)(_swapped(part, old, new) for part in tree)
    if isinstance(tree, Mapping):
        return {k: _swapped(v, old, new) for k, v in tree.items()}
    return tree
