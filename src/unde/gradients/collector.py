"""The collector: per-example projected gradients of every unit from one frozen forward and backward pass.

Weights do not require grad, so autograd computes no weight gradient. A forward hook on each layer hands the
layer's input to its rule, which projects it at once, or keeps it where autograd does, too; a hook on the layer's
output tensor hands over the output gradient when the backward pass gets there, and the rule combines the two (see
`layers/`). What no rule covers goes through `fallback.py`; `coverage.py` decides, and checks every choice against
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import map_tensors, to_device
from unde.errors import UndeError
from unde.gradients import fallback
from unde.gradients.activations import quick_activations
from unde.gradients.deferred_params import Later, Pending
from unde.gradients.factors import Factors
from unde.gradients.hooks import attach
from unde.gradients.layers import Rule
from unde.gradients.layers.base import Call, fold, outer
from unde.gradients.linear_maps import quick_linears
from unde.gradients.memory_format import channels_last
from unde.gradients.meter import Meter
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import Unit, placement
from unde.pages import keep_pages, kept_pages
from unde.tasks.base import Task
from unde.tasks.batching import with_batching

# Where the examples of a batch are found in a module's input and output.
FRONT = "front"  # along the first axis, possibly with more folded in behind it: (B, ...) or (B·n, ...)
SECOND = "second"  # along the second axis: (T, B, ...)
SHARED = "shared"  # nowhere: one tensor serves all examples, as position embeddings do


@dataclass
class HookedModule:
    """A hooked module: its rule, which unit each of its parameters is, and its layout (None: never reached)."""

    name: str
    module: nn.Module
    rule: Rule
    units: dict[str, Unit]
    layout: str | None = FRONT
    lone: bool = False  # SHARED tensors have an axis of length one where examples would be


@dataclass
class Coverage:
    """How each unit is covered. `shapes` are the leading shapes of expanded copies."""

    uses: list[HookedModule] = field(default_factory=list)
    expanded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    later: list[str] = field(default_factory=list)
    vmapped: list[str] = field(default_factory=list)
    looped: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # no gradient on the examples tried


class GraphStart(torch.autograd.Function):
    """Makes a tensor that needs no gradient the start of a graph, without copying it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Collector:
    """Inside a `with` block, maps batches to features: `features, values = collector(batch, ids)`.

    `factors` gathers covariances on the way (see `factors.py`); with emit=False it gathers nothing else, and the
    features are left empty. `beside` names measures that are not differentiated; their values are in `.beside`, (B, ·),
    after each call. Without `many` examples to come, weights are left in the order they are in.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        units: Sequence[Unit],
        coverage: Coverage,
        measure: str = "loss",
        factors: Factors | None = None,
        emit: bool = True,
        beside: Sequence[str] = (),
        many: bool = True,
    ) -> None:
        self.model, self.task, self.units, self.coverage, self.measure = model, task, units, coverage, measure
        self.factors, self.emit, self.many = factors, emit, many
        self._mask: Tensor | Sequence[Tensor] | None = None
        self.device, self.dtype = placement(model)
        self.width = units[-1].stop if units and emit else 0
        self._by_name = {u.name: u for u in units}
        self._out: Tensor | None = None
        self._unset: set[str] = set()  # units whose columns hold nothing yet
        self._batch = 0
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._wrapped = fallback.Measured(model, task, measure, beside)
        self.beside = torch.empty(0, len(beside))

    def __enter__(self) -> Collector:
        keep_pages()
        with ExitStack() as stack:
            stack.enter_context(frozen_eval(self.model))
            stack.enter_context(quick_linears(self.model))
            stack.enter_context(quick_activations(self.model))
            if self.many:
                stack.enter_context(kept_pages())
                stack.enter_context(channels_last(self.model))
            for use in self.coverage.uses:
                stack.callback(attach(use, partial(self._on_forward, use)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._out = None
        self._stack.__exit__(*exc)

    def __call__(self, batch: Any, ids: Sequence[int], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, D) features and (B,) values of the measure, for the B examples `ids`; the features in `out`, if given."""
        features = self._empty(len(ids)) if out is None else out
        values = torch.zeros(len(ids), device=self.device, dtype=self.dtype)
        self.beside = torch.zeros(len(ids), len(self._wrapped.beside), device=self.device, dtype=self.dtype)
        for which, portion in self.task.batching.portions(batch):
            with self._filling(features[which]) as part_of_features:
                for part in self.task.batching.passes(portion, ids[which]):
                    self._pass(part, ids[which], part_of_features, values[which], self.beside[which])
        return features, values

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, self.width, device=self.device, dtype=self.dtype)

    @contextmanager
    def _filling(self, features: Tensor) -> Generator[Tensor]:
        """What was in `features` is forgotten: in each column the first that comes is put, all others are added to it,
        and where none came there is zero. Zeroing large memory takes as long as filling it."""
        self._unset = set(self._by_name) if self.emit else set()
        yield features
        for name in self._unset:
            features[:, self._by_name[name].columns].zero_()
        self._unset = set()

    def _put(self, features: Tensor, unit: Unit, feature: Tensor) -> None:
        column = features[:, unit.columns]
        if unit.name in self._unset:
            self._unset.discard(unit.name)
            column.copy_(feature)
        else:
            column.add_(feature.to(column))  # += would copy it back as well

    def fit(self, memory: int, example: Any) -> None:
        """Size the passes by what they take for an example, a batch of one, beside weights and all that is there."""

        def peak(part: Any, count: int) -> int:
            with Meter() as meter, self._filling(self._empty(count)) as features:
                values = features.new_zeros(count)
                beside = features.new_zeros(count, len(self._wrapped.beside))
                self._pass(part, [0] * count, features, values, beside)
            return meter.peak

        factors, self.factors = self.factors, None  # they are of other passes
        try:
            batching = self.task.batching.fit_memory(memory, to_device(example, self.device), peak)
            self.task = with_batching(self.task, batching)
        finally:
            self.factors = factors

    def _pass(self, part: Any, ids: Sequence[int], features: Tensor, values: Tensor, beside: Tensor) -> None:
        """Adds what one forward and backward pass gives."""
        values += self._hooked(part, ids, features, beside)
        if self.emit and self.coverage.vmapped:
            self._general(fallback.by_vmap, self.coverage.vmapped, part, ids, features)
        if self.emit and self.coverage.looped:
            self._general(fallback.by_loop, self.coverage.looped, part, ids, features)

    def _hooked(self, batch: Any, ids: Sequence[int], features: Tensor, beside: Tensor) -> Tensor:
        self._out, self._batch = features, len(ids)
        self._mask = self.task.mask(batch) if self.factors is not None else None
        shapes = self.coverage.expanded if self.emit else {}
        copies = fallback.expanded_copies(self.model, shapes, len(ids))
        later = Later(self.model, self.coverage.later if self.emit else [], len(ids))
        swapped = {**copies, **later.swapped}
        parameters = dict(self.model.named_parameters()) if self.coverage.unused else {}  # walks all modules
        watched = {n: parameters[n].requires_grad_(True) for n in self.coverage.unused if n in self._loose}
        try:
            if self._wrapped.beside:
                values, kept = self._wrapped.values_and_beside(swapped, batch, ids)
                beside += kept
            else:
                values = self._wrapped.values(swapped, batch, ids)
            if values.requires_grad:
                wanted = [self._anchor, *copies.values(), *watched.values(), *later.leaves]
                grads = torch.autograd.grad(values.sum(), wanted, allow_unused=True)[1:]
                found = [*zip(copies, grads), *later.gradients(grads[len(copies) + len(watched) :])]
                for name, g in found:
                    if g is not None:
                        unit = self._by_name[name]
                        self._put(features, unit, unit.projection(g.flatten(1)))
                for name, g in zip(watched, grads[len(copies) :]):
                    if g is not None:
                        raise _woken(f"parameter {name!r}")
        finally:
            self._out = None
            for p in watched.values():
                p.requires_grad_(False)
        return values.detach()

    @property
    def _loose(self) -> set[str]:
        """Units that no hooked module holds."""
        return set(self._by_name) - {u.name for use in self.coverage.uses for u in use.units.values()}

    def _general(
        self, by: Callable, names: list[str], batch: Any, ids: Sequence[int], features: Tensor
    ) -> None:
        for name, g in by(self._wrapped, names, batch, ids).items():
            unit = self._by_name[name]
            self._put(features, unit, unit.projection(g))

    def _on_forward(
        self,
        use: HookedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        if self._out is None or not torch.is_grad_enabled():
            return None
        if use.layout is None:
            raise _woken(f"module {use.name!r}")
        if isinstance(output, Pending):
            raise NotImplementedError(f"a parameter reaches module {use.name!r} before it meets an example")
        if use.rule.whole:
            x: Any = Call(_detached(args), _detached(dict(kwargs)), partial(arranged, use, self._batch))
        else:
            x = (args[0] if args else next(iter(kwargs.values()))).detach()
        # In-place operations on a view would lose its hook; nobody else holds the tensor behind this one.
        fresh = torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
        if not fresh.requires_grad:
            fresh = GraphStart.apply(fresh, self._anchor)
        if use.layout == SHARED:
            fresh = share(fresh, self._batch, use.lone)
        if not use.rule.whole:
            x = arranged(use, self._batch, x)
        with torch.no_grad():
            kept = use.rule.forward(x, fresh, self._batch)
        fresh.register_hook(partial(self._on_backward, use, [kept]))
        return fresh

    def _on_backward(self, use: HookedModule, held: list[Any], g: Tensor) -> None:
        assert self._out is not None
        kept = held.pop()  # the graph has its hooks to the end of the pass, what they are for is free before
        with torch.no_grad():
            put = partial(self._put, self._out) if self.emit else None
            out = _Out(use, put, self._batch, self.factors, self._mask)
            use.rule.backward(kept, front(g, use, self._batch), self._batch, out)


@dataclass
class _Out:
    """Puts the features of one use of a module where they belong."""

    use: HookedModule
    put: Callable[[Unit, Tensor], None] | None
    batch: int
    factors: Factors | None
    mask: Tensor | Sequence[Tensor] | None

    def add(self, parameter: str, feature: Tensor) -> None:
        if self.put is not None:
            self.put(self.use.units[parameter], feature)

    def outer(self, parameter: str, left: Tensor, right: Tensor) -> None:
        if self.factors is not None:
            self.factors.add(self.use.units[parameter].name, left, right, self.mask)
        if self.put is not None:
            self.add(parameter, fold(outer(self.use.rule.projections[parameter], left, right), self.batch))


def share(x: Tensor, batch: int, lone: bool) -> Tensor:
    """(1, ...) with a lone axis for examples, or (...) without one → (B, ...), without copying."""
    x = x if lone and x.shape[0] == 1 else x.unsqueeze(0)
    return x.expand(batch, *x.shape[1:])


def arranged(use: HookedModule, batch: int, x: Tensor) -> Tensor:
    """What a module got or gave, its examples in front."""
    return front(share(x, batch, use.lone) if use.layout == SHARED else x, use, batch)


def _detached(tree: Any) -> Any:
    return map_tensors(tree, Tensor.detach)


def front(x: Tensor, use: HookedModule, batch: int) -> Tensor:
    """The tensor with its examples in front."""
    if use.layout == SECOND:
        x = x.transpose(0, 1)
    if x.shape[0] % batch:
        raise UndeError(
            f"module {use.name!r} got a tensor of shape {tuple(x.shape)} in a batch of {batch}: its first axis holds "
            "no whole number of rows for each example, though it did for the examples tried at the start. "
            f"Exclude its parameters with exclude=[{use.name!r}] or use batch_size=1"
        )
    return x


def _woken(what: str) -> UndeError:
    return UndeError(
        f"{what} took no part in the loss of the examples tried at the start, but does now, so nothing was checked "
        "for it. Put an example that reaches it first in the data, or name it in exclude=[regex]"
    )
