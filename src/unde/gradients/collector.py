"""The collector: per-example projected gradients of every unit from one frozen forward and backward pass.

Weights do not require grad, so autograd computes no weight gradient. A forward hook on each layer passes the input to
the layer's rule; a hook on the output tensor passes the output gradient, and the rule combines the two (see `layers/`).
Parameters without a rule go through `fallback.py`; `coverage.py` decides, and checks every choice against autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import map_tensors, to_device
from unde.errors import UndeError
from unde.gradients import fallback
from unde.gradients.factors import Factors
from unde.gradients.fallback import DeferredParams, DeferredTensor
from unde.gradients.hooks import SHARED, Coverage, HookedModule, attach, expand_shared
from unde.gradients.layers.base import Call, fold, outer
from unde.gradients.meter import Meter
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import Unit, placement
from unde.onednn import frozen_linears
from unde.tasks.base import Task, with_batching


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

    Features are those of `units`, which may be some of the units of `coverage`. `factors` adds up covariances.
    `extra_measures` are not differentiated; their values are in `.extra`, (B, ·), after each call.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        units: Sequence[Unit],
        coverage: Coverage,
        measure: str = "loss",
        factors: Factors | None = None,
        extra_measures: Sequence[str] = (),
    ) -> None:
        self.model, self.task, self.units, self.coverage, self.measure = model, task, units, coverage, measure
        self.factors = factors
        self._mask: Tensor | Sequence[Tensor] | None = None
        self.device, self.dtype = placement(model)
        self.width = units[-1].stop if units else 0
        self._by_name = {u.name: u for u in units}
        self._out: Tensor | None = None
        self._unset: set[str] = set()  # units whose columns hold nothing yet
        self._batch = 0
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._loose = set(self._by_name).difference(
            *(m.unit_names for m in coverage.modules)
        )  # in no hooked module
        self._wrapped = fallback.MeasureModule(model, task, measure, extra_measures)
        self.extra = torch.empty(0, len(extra_measures))

    def __enter__(self) -> Collector:
        with ExitStack() as stack:
            stack.enter_context(frozen_eval(self.model))
            stack.enter_context(frozen_linears(self.model))
            for hooked in self.coverage.modules:
                stack.callback(attach(hooked, partial(self._on_forward, hooked)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._out = None
        self._stack.__exit__(*exc)

    def __call__(self, batch: Any, ids: Sequence[int], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, D) features and (B,) values of the measure, for the B examples `ids`; the features in `out`, if given."""
        features = self._empty(len(ids)) if out is None else out
        values = torch.zeros(len(ids), device=self.device, dtype=self.dtype)
        self.extra = values.new_zeros(len(ids), len(self._wrapped.extra_measures))
        for which, portion in self.task.batching.portions(batch):
            with self._fill(features[which]) as rows:
                for part in self.task.batching.passes(portion, ids[which]):
                    self._pass(part, ids[which], rows, values[which], self.extra[which])
        for unit in self.units:
            if self.factors is not None and unit.lookup and unit.name in self.factors.sums:
                self.factors.add_rows(unit.name, features[:, unit.columns])
        return features, values

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, self.width, device=self.device, dtype=self.dtype)

    @contextmanager
    def _fill(self, features: Tensor) -> Generator[Tensor]:
        """Overwrite `features`: the first feature of a unit is copied, later ones are added, units without one are set
        to zero. Zeroing large memory first would take as long as filling it."""
        self._unset = set(self._by_name)
        yield features
        for name in self._unset:
            features[:, self._by_name[name].columns].zero_()
        self._unset = set()

    def _put(self, features: Tensor, unit: Unit, feature: Tensor) -> None:
        column = features[:, self._by_name[unit.name].columns]
        if unit.name in self._unset:
            self._unset.discard(unit.name)
            column.copy_(feature)
        else:
            column.add_(feature.to(column))  # += would copy it back as well

    def _put_outer(self, features: Tensor, unit: Unit, left: Tensor, right: Tensor) -> bool:
        """Put Σ_t left_t right_tᵀ in its place without a copy in between; False where its dtype or device differ."""
        column = features[:, self._by_name[unit.name].columns]
        if any((x.dtype, x.device) != (column.dtype, column.device) for x in (left, right)):
            return False
        matrices = column.unflatten(1, (left.shape[2], right.shape[2]))
        if unit.name in self._unset:
            self._unset.discard(unit.name)
            torch.bmm(left.mT, right, out=matrices)
        else:
            matrices.baddbmm_(left.mT, right)
        return True

    def fit(self, memory: int, example: Any) -> None:
        """Choose the rows of a pass by the memory that it takes for an example, a batch of one."""

        def peak(part: Any, count: int) -> int:
            with self.meter() as meter, self._fill(self._empty(count)) as features:
                extra = features.new_zeros(count, len(self._wrapped.extra_measures))
                self._pass(part, [0] * count, features, features.new_zeros(count), extra)
            return meter.peak

        factors, self.factors = self.factors, None  # not of this pass
        try:
            batching = self.task.batching.fit_memory(memory, to_device(example, self.device), peak)
            self.task = with_batching(self.task, batching)
        finally:
            self.factors = factors

    def meter(self) -> Meter:
        """Counts the bytes of passes, but for weights and projections, which stay."""
        meter = Meter(self.device)
        meter.ignore([*self.model.parameters(), *self.model.buffers()])
        meter.ignore(t for u in self.units for t in u.projection.tensors)
        return meter

    def _pass(self, part: Any, ids: Sequence[int], features: Tensor, values: Tensor, extra: Tensor) -> None:
        """Add the results of one forward and backward pass."""
        values += self._hooked(part, ids, features, extra)
        for by, names in (
            (fallback.by_vmap, self.coverage.vmapped),
            (fallback.by_loop, self.coverage.looped),
        ):
            if wanted := [name for name in names if name in self._by_name]:
                self._general(by, wanted, part, ids, features)

    def _hooked(self, batch: Any, ids: Sequence[int], features: Tensor, extra: Tensor) -> Tensor:
        self._out, self._batch = features, len(ids)
        self._mask = self.task.mask(batch) if self.factors is not None else None
        expanded = {name: shape for name, shape in self.coverage.expanded.items() if name in self._by_name}
        copies = fallback.expand_copies(self.model, expanded, len(ids))
        late = [name for name in self.coverage.deferred if name in self._by_name]
        deferred = DeferredParams(self.model, late, len(ids))
        parameters = dict(self.model.named_parameters()) if self.coverage.unused else {}  # walks all modules
        unused = {n: parameters[n].requires_grad_(True) for n in self.coverage.unused if n in self._loose}
        try:
            values, extra_values = self._wrapped.values({**copies, **deferred.swapped}, batch, ids)
            extra += extra_values.to(extra.device)
            if values.requires_grad:
                leaves = [self._anchor, *copies.values(), *unused.values(), *deferred.leaves]
                grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)[1:]
                self._check_unused(unused, grads[len(copies) :])
                late_gradients = deferred.gradients(grads[len(copies) + len(unused) :])
                for name, g in (*zip(copies, grads), *late_gradients):
                    if g is not None:
                        unit = self._by_name[name]
                        self._put(features, unit, unit.projection(g.flatten(1)))
        finally:
            self._out = None
            for p in unused.values():
                p.requires_grad_(False)
        return values.detach().to(features.device)

    def _check_unused(self, unused: Mapping[str, Tensor], grads: Sequence[Tensor | None]) -> None:
        for name, g in zip(unused, grads):
            if g is not None:
                raise _newly_used(f"parameter {name!r}")

    def _general(
        self, by: Callable, names: list[str], batch: Any, ids: Sequence[int], features: Tensor
    ) -> None:
        for name, g in by(self._wrapped, names, batch, ids).items():
            unit = self._by_name[name]
            self._put(features, unit, unit.projection(g))

    def _on_forward(
        self,
        hooked: HookedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        if self._out is None or not torch.is_grad_enabled():
            return None
        if hooked.layout is None:
            raise _newly_used(f"module {hooked.name!r}")
        if isinstance(output, DeferredTensor):
            raise NotImplementedError(f"a deferred parameter reaches module {hooked.name!r}")
        arrange = partial(hooked.arrange, batch=self._batch)
        # Accelerate's hooks move inputs later than this one sees them.
        args, kwargs = map_tensors((args, dict(kwargs)), lambda t: t.detach().to(output.device))
        x: Any = Call(args, kwargs, arrange)
        if not hooked.rule.whole:
            x = arrange(args[0] if args else next(iter(kwargs.values())))
        # In-place operations on a view would lose its hook; nobody else holds the tensor behind this one.
        fresh = torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
        if not fresh.requires_grad:
            fresh = GraphStart.apply(fresh, self._anchor)
        if hooked.layout == SHARED:
            fresh = expand_shared(fresh, self._batch, hooked.singleton)
        with torch.no_grad():
            saved = hooked.rule.forward(x, fresh, self._batch)
        fresh.register_hook(partial(self._on_backward, hooked, [saved]))
        return fresh

    def _on_backward(self, hooked: HookedModule, holder: list[Any], g: Tensor) -> None:
        assert self._out is not None
        saved = holder.pop()  # freed now; the graph keeps its hooks to the end of the pass
        with torch.no_grad():
            put, put_outer = partial(self._put, self._out), partial(self._put_outer, self._out)
            out = _ModuleFeatures(
                hooked, put, put_outer, self._by_name, self._batch, self.factors, self._mask
            )
            hooked.rule.backward(saved, hooked.batch_first(g, self._batch), self._batch, out)


@dataclass
class _ModuleFeatures:
    """Receives the features of one hooked module from its rule."""

    hooked: HookedModule
    put: Callable[[Unit, Tensor], None]
    put_outer: Callable[[Unit, Tensor, Tensor], bool]
    emitted: Collection[str]  # units whose features are wanted
    batch: int
    factors: Factors | None
    mask: Tensor | Sequence[Tensor] | None

    def add(self, parameter: str, feature: Tensor) -> None:
        unit = self.hooked.units[parameter]
        if unit.name in self.emitted:
            self.put(unit, feature)

    def outer(self, parameter: str, left: Tensor, right: Tensor) -> None:
        unit = self.hooked.units[parameter]
        if self.factors is not None and not unit.lookup:
            self.factors.add(unit.name, left, right, self.mask)
        if unit.name not in self.emitted:
            return
        projection = self.hooked.rule.projections[parameter]
        apart = projection.factored and len(left) == self.batch
        if not (apart and self.put_outer(unit, left, right)):
            self.put(unit, fold(outer(projection, left, right), self.batch))


def _newly_used(what: str) -> UndeError:
    return UndeError(
        f"{what} had no gradient on the examples tried at the start, but has one now: it was not checked. "
        "Put an example that uses it first in the data, or name it in exclude=[regex]"
    )
