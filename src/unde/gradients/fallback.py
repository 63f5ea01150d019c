"""Per-example gradients of parameters that no layer rule covers: four general ways, each slower than the last.

expanded    the parameter is replaced by one copy for each example (class tokens, position embeddings)
deferred    the same, at its first operation with a batched tensor (tables of relative positions)
vmap        torch.func over the examples
loop        one backward pass for each example
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from unde.data import map_tensors, tensors
from unde.default_device import program_default
from unde.tasks.base import Task


class MeasureModule(nn.Module):
    """The task's measure as a module, so that torch.func can swap parameters of the user's model in it."""

    def __init__(
        self, model: nn.Module, task: Task, measure: str, extra_measures: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.training = model.training  # registering a child must not be followed by a mode change
        self.model = model
        self.task, self.measure, self.extra_measures = task, measure, extra_measures

    def forward(self, batch: Any, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        values = compute_measures(self.task, self.model, batch, [self.measure, *self.extra_measures], ids)
        main = values[self.measure]
        extra = [values[name].detach() for name in self.extra_measures]
        return main, torch.stack(extra, 1) if extra else main.new_zeros(len(ids), 0)

    def values(self, swapped: Mapping[str, Tensor], batch: Any, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The measure, (B,), and the extra ones, (B, ·), with the `swapped` parameters."""
        if not swapped:
            return self(batch, ids)
        return functional_call(self, {f"model.{n}": t for n, t in swapped.items()}, (batch, ids))


def compute_measures(
    task: Any, model: nn.Module, batch: Any, names: Sequence[str], ids: Sequence[int]
) -> dict[str, Tensor]:
    """Several measures; from one forward pass if the task knows how, as diffusion does."""
    with program_default():
        if len(names) > 1 and hasattr(task, "measures"):
            return task.measures(model, batch, names, ids)
        return {name: task.measure(model, batch, name=name, ids=ids) for name in names}


# --- expanded -----------------------------------------------------------------------------------------------


def expand_copies(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], batch: int) -> dict[str, Tensor]:
    """Leaves of shape (B, *shape) for the named parameters, where `shape` is that of one copy."""
    parameters = dict(model.named_parameters()) if shapes else {}
    return {
        n: parameters[n].detach().reshape(shape).expand(batch, *shape).clone().requires_grad_()
        for n, shape in shapes.items()
    }


def copy_shapes(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes to try for one example's copy: broadcasting decides which, if any, is right."""
    tries = [tuple(shape[1:])] if shape and shape[0] == 1 else []
    return [*tries, tuple(shape), (1, *shape)]


class FirstAxisWatch(TorchFunctionMode):
    """Notices a slice of the first axis of expanded copies of these shapes, as in `positions[:length]`.

    It would slice examples, not positions; on a batch shorter than the slice no gradient shows it.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.cut = shapes, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x: Any = args[0] if args else None
        if func is Tensor.__getitem__ and x.is_leaf and x.requires_grad and x.shape in self.shapes:
            first = args[1][0] if isinstance(args[1], tuple) else args[1]
            self.cut |= isinstance(first, slice) and first != slice(None)
        return func(*args, **(kwargs or {}))


# --- deferred -----------------------------------------------------------------------------------------------

_LOOKUPS = (
    Tensor.__getitem__,
    F.embedding,
    torch.index_select,
    Tensor.index_select,
    torch.take,
    torch.gather,
)


class DeferredParams:
    """Unbatched parameters (relative-position tables): expanded per example on first batched use.

    T5 and Swin look up a bias for every pair of positions, permute it, and add it to the scores of all examples. The
    `swapped` tensors record these operations. At the first one with a batched tensor they become a leaf with a copy
    for each example; `gradients` takes the gradients of `leaves` back through the record, as (B, *shape).
    """

    def __init__(self, model: nn.Module, names: Sequence[str], batch: int) -> None:
        parameters = dict(model.named_parameters()) if names else {}
        self.batch = batch
        self._parameters = {n: parameters[n].detach() for n in names}
        self.swapped: dict[str, Tensor] = {n: _defer(p, self, _Trace(n)) for n, p in self._parameters.items()}
        self.leaves: list[Tensor] = []
        self._traces: list[_Trace] = []

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
                start = self._parameters[trace.name].detach().requires_grad_()
                end = trace.run(start)
            g = g.reshape(self.batch, *end.shape)
            (gradient,) = torch.autograd.grad(end, start, g, is_grads_batched=True)
            yield trace.name, gradient.detach()


class _Trace:
    """The operations on a parameter, as a linked list from the last to the first."""

    def __init__(
        self, name: str, before: _Trace | None = None, step: Callable[[Tensor], Tensor] | None = None
    ):
        self.name, self.before, self.step = name, before, step

    def run(self, value: Tensor) -> Tensor:
        if self.before is None or self.step is None:
            return value
        return self.step(self.before.run(value))


class DeferredTensor(Tensor):
    """A tensor made from a deferred parameter; `value` is the same as a plain tensor."""

    value: Tensor
    params: DeferredParams
    path: _Trace

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(func, args, kwargs or {})


def _defer(value: Tensor, params: DeferredParams, trace: _Trace) -> Tensor:
    deferred: Any = value.as_subclass(DeferredTensor)
    deferred.value, deferred.params, deferred.path = value, params, trace
    return deferred


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation to the plain tensor; record it, or make the leaf if an operand is batched."""
    operands = {id(x): x for x in _tensors((args, kwargs))}
    source, *more = (x for x in operands.values() if isinstance(x, DeferredTensor))
    others = [x for x in operands.values() if not isinstance(x, DeferredTensor)]
    if more or getattr(func, "__name__", "") == "apply":
        raise NotImplementedError("two parameters meet, or one meets a custom autograd function")
    params, trace, value = source.params, source.path, source.value

    def step(x: Tensor) -> Any:
        return func(*_replace(args, source, x), **_replace(kwargs, source, x))

    out = step(value)
    if not isinstance(out, Tensor):
        return out
    batched = any(x.requires_grad for x in others)
    widened = out.dim() == value.dim() and out.dim() > 0 and len(value) == 1 < len(out)
    grown = widened or (bool(others) and out.dim() == value.dim() + 1)
    if not batched and (func in _LOOKUPS or not grown):
        return _defer(out.detach(), params, _Trace(trace.name, trace, step))
    if any(x.dim() == value.dim() + 1 for x in others):
        value, trace = value.unsqueeze(0), _Trace(trace.name, trace, lambda x: x.unsqueeze(0))
    elif len(value) != 1:
        raise NotImplementedError("the parameter meets examples in an unknown way")
    return step(params.leaf(value, trace, len(out)))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))


def _replace(tree: Any, old: Tensor, new: Tensor) -> Any:
    if tree is old:
        return new
    if isinstance(tree, (tuple, list)):
        return type(tree)(_replace(part, old, new) for part in tree)
    if isinstance(tree, Mapping):
        return {k: _replace(v, old, new) for k, v in tree.items()}
    return tree


# --- vmap and loop ------------------------------------------------------------------------------------------


def by_vmap(measured: MeasureModule, names: list[str], batch: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """(B, *shape) gradients by vmap over the examples of a batch."""
    columns = tensors(batch)
    if not all(x.dim() > 0 and x.shape[0] == len(ids) for x in columns):
        raise ValueError("a tensor of the batch has no example axis")

    def value(parameters: dict[str, Tensor], *examples: Tensor) -> Tensor:
        remaining = iter(examples)
        example = map_tensors(batch, lambda _: next(remaining).unsqueeze(0))
        return measured.values(parameters, example, [-1])[0].sum()

    parameters = {n: p.detach() for n, p in measured.model.named_parameters() if n in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "performance drop: no batching rule" is expected here
        per_example = vmap(grad(value), in_dims=(None, *[0] * len(columns)))
        return {n: g.detach() for n, g in per_example(parameters, *columns).items()}


def by_loop(measured: MeasureModule, names: list[str], batch: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """(B, *shape) gradients, one backward pass for each example."""
    parameters = {n: p for n, p in measured.model.named_parameters() if n in names}
    rows: dict[str, list[Tensor]] = {n: [] for n in names}
    try:
        for p in parameters.values():
            p.requires_grad_(True)
        for b in range(len(ids)):
            value = measured.values({}, single(batch, b, len(ids)), [ids[b]])[0].sum()
            grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for (n, p), g in zip(parameters.items(), grads):
                rows[n].append(torch.zeros_like(p) if g is None else g.to_dense())
    finally:
        for p in parameters.values():
            p.requires_grad_(False)
    return {n: torch.stack(r) for n, r in rows.items()}


def single(batch: Any, b: int, size: int) -> Any:
    """Example b of a collated batch, as a batch of one."""
    return map_tensors(batch, lambda x: x[b : b + 1] if x.dim() and x.shape[0] == size else x)
