"""Plan and confirm a coverage on given examples, by comparison with autograd.

The examples are run one by one with ordinary autograd, and as one batch through the collector. A module whose features
disagree is tried with another layout, then its parameters go to the general ways (`fallback.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde.devices import exact_float32
from unde.errors import UndeError
from unde.gradients import fallback
from unde.gradients.collector import Collector
from unde.gradients.fallback import compute_measures
from unde.gradients.hooks import (
    FAILURES,
    Coverage,
    HookedModule,
    find_modules,
    first_guess,
    guess_layouts,
    next_layouts,
)
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import Unit, placement
from unde.tasks.base import Task

# Structural mistakes give errors of order one; these only leave room for rounding in another batch shape.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
REFERENCES = 2  # examples that are run alone, if they reach every parameter
RUN_ERRORS = (UndeError, KeyError, AttributeError, *FAILURES)


class CoverageCheck:
    """Runs examples as one batch and one by one (`singles`, possibly fewer)."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        units: Sequence[Unit],
        measure: str,
        ids: list[int],
        batch: Any,
        singles: list[Any],
        references: int = REFERENCES,
    ) -> None:
        self.model, self.task, self.units, self.measure = model, task, units, measure
        self.ids, self.batch, self.singles, self.references = ids, batch, singles, references
        self.device, _ = placement(model)
        self.tolerance = TOLERANCE[next(model.parameters()).dtype]
        if torch.is_autocast_enabled(self.device.type):
            self.tolerance = max(self.tolerance, TOLERANCE[torch.get_autocast_dtype(self.device.type)])
        self.coverage = Coverage(find_modules(model, units))
        self._agreed: dict[str, Any] | None = None  # the coverage under which all units agreed

    def run(self) -> Coverage:
        """Plan the coverage on these examples."""
        with (
            frozen_eval(self.model),
            exact_float32(),
        ):  # one block: single examples shall draw other random numbers
            return self._plan()

    def _plan(self) -> Coverage:
        self.truth, self.reached = self._autograd()
        loose = self._cover()
        late = set(self.coverage.deferred)
        if late and self._dropped() - late:
            # A deferred bias that requires grad makes torch take another attention kernel. In half precision it
            # rounds differently, so modules that disagreed are tried again.
            modules = [m for m in find_modules(self.model, self.units) if not late & m.unit_names]
            self.coverage = Coverage(modules, deferred=self.coverage.deferred)
            loose = self._cover()
        if loose:
            names = [u.name for u in loose]
            self.coverage.vmapped = names
            if self._disagreeing(loose) != []:
                self.coverage.vmapped, self.coverage.looped = [], names
        if self._agreed == self.coverage.describe():
            return self.coverage
        wrong = self._disagreeing(self.units, catch=False)
        if wrong:
            raise UndeError(
                f"no per-example gradient could be confirmed for {', '.join(repr(u.name) for u in wrong)}: "
                "features disagree with a backward pass of a single example. Name them in exclude=[regex]"
            )
        return self.coverage

    def confirms(self, coverage: Coverage) -> bool:
        """Whether a coverage is right for these examples."""
        self.coverage = coverage
        try:
            with frozen_eval(self.model), exact_float32():
                self.truth, self.reached = self._autograd()
                return self._disagreeing(self.units) == []
        except torch.OutOfMemoryError:
            raise
        except (UndeError, *FAILURES):
            return False

    def check_values(self) -> bool:
        """Raise if an example has another value in the batch than alone. False if one cannot be run: the build will
        name it."""
        try:
            with frozen_eval(self.model), exact_float32(), torch.no_grad():
                alone = [self._sum_values(single, [i]) for i, single in zip(self.ids, self.singles)]
                together = self._sum_values(self.batch, self.ids)
        except torch.OutOfMemoryError:
            raise
        except RUN_ERRORS:
            return False
        self.values = torch.cat(alone).cpu().double()
        self._check_independent(together)
        return True

    def _cover(self) -> list[Unit]:
        """Rules where they are right, copies for unbatched parameters; returns the remaining units."""
        self._choose_layouts()
        hooked = self._names(self.coverage.modules) | set(self.coverage.deferred)
        loose = [u for u in self.units if u.name in self.reached - hooked]
        self.coverage.unused = [u.name for u in self.units if u.name not in self.reached]
        self._unhook(set(self.coverage.unused))  # no gradient to check a rule on: the collector watches them
        # Usually all copies are right in their first shape, and one pass shows it.
        if loose and self._expand({u.name: fallback.copy_shapes(u.shape)[0] for u in loose}, self.units):
            return []
        return [u for u in loose if not self._expand_any(u) and not self._defer(u)]

    def _dropped(self) -> set[str]:
        """Parameters with a rule that disagreed."""
        known = self._names(find_modules(self.model, self.units))
        return (known & self.reached) - self._names(self.coverage.modules)

    def _autograd(self) -> tuple[Tensor, set[str]]:
        """The features of the first examples run one by one, and the parameters that got a gradient."""
        parameters = dict(self.model.named_parameters())
        wanted = [parameters[u.name] for u in self.units]
        rows: list[Tensor] = []  # on the host: of gradients there is one set at a time
        reached: set[str] = set()
        values: list[float] = []
        try:
            for p in wanted:
                p.requires_grad_(True)
            for i, single in zip(self.ids, self.singles):
                row = torch.zeros(self.units[-1].stop, dtype=self.units[-1].projection.dtype)
                value = 0.0
                for part in self.task.batching.passes(single, [i]):
                    out = self._values(part, [i])
                    value += float(out.detach().sum())
                    if not out.requires_grad:
                        continue
                    grads = list(torch.autograd.grad(out.sum(), wanted, allow_unused=True))
                    reached |= {u.name for u, g in zip(self.units, grads) if g is not None}
                    parts = [_project(u, grads[i], self.device) for i, u in enumerate(self.units)]
                    del grads
                    row += torch.cat(parts).cpu()
                rows.append(row)
                values.append(value)
                finite = sum(bool(row.isfinite().all()) for row in rows)
                if finite == self.references and len(reached) == len(self.units):
                    break
        finally:
            for p in wanted:
                p.requires_grad_(False)
        self.values = torch.tensor(values, dtype=torch.float64)
        if not reached:
            raise UndeError(
                "the loss depends on no attributed parameter: is the model detached or under no_grad?"
            )
        return torch.stack(rows), reached

    def _values(self, batch: Any, ids: list[int]) -> Tensor:
        values = compute_measures(self.task, self.model, batch, [self.measure], ids)[self.measure]
        if not isinstance(values, Tensor) or values.shape != (len(ids),):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            hint = (
                " Use reduction='none' and average over everything but the first axis." if shape == () else ""
            )
            raise UndeError(
                f"{type(self.task).__name__} gave {'a scalar' if shape == () else shape} for a batch of {len(ids)}: "
                f"expected one value for each example, shape ({len(ids)},).{hint}"
            )
        return values

    def _sum_values(self, batch: Any, ids: list[int]) -> Tensor:
        """The measure of a batch, (B,), summed over its passes."""
        passes = self.task.batching.passes(batch, ids)
        return torch.stack([self._values(part, ids).detach() for part in passes]).sum(0)

    def _check_independent(self, together: Tensor) -> None:
        a = self.values
        b = together[: len(a)].cpu().double()
        if not self._close(a, b):
            worst = int((a - b).abs().nan_to_num().argmax())
            raise UndeError(
                f"the {self.measure} of example {self.ids[worst]} is {float(a[worst]):.6g} alone but "
                f"{float(b[worst]):.6g} in a batch: features of an example must not depend on its "
                "batch mates or on random numbers. "
                "Look for a mean over the batch, batch statistics, unmasked padding, terms that compare examples (a "
                "contrastive loss), or sampling in the model"
            )

    def _close(self, a: Tensor, b: Tensor) -> bool:
        finite = a.isfinite() & b.isfinite()
        return torch.allclose(a[finite], b[finite], rtol=10 * self.tolerance, atol=10 * self.tolerance)

    def _choose_layouts(self) -> None:
        """Give every hooked module the first layout that agrees with autograd, or drop its units."""
        with guess_layouts(self.coverage.modules, len(self.ids)) as options:
            wrong = self._disagreeing(self.units)
        if wrong is None:  # the model failed, or a guess
            with torch.no_grad():
                self._check_independent(self._sum_values(self.batch, self.ids))
            run = partial(self._sum_values, self.batch, self.ids)
            options = first_guess(self.coverage.modules, len(self.ids), run)
            wrong = self._disagreeing(self._live_units())
        bad = changed = self._live()
        while bad:
            if wrong is None:  # the fault is in what changed since a pass that ran
                bad = [m for m in changed if self._fails(m)] or changed
                names, movable = self._names(bad), bad
            else:
                names = {u.name for u in wrong}
                bad = [m for m in self._live() if m.unit_names & names]
                movable = [m for m in bad if not self._layout_confirmed(m, names)]
            movable = [m for m in movable if options[m.name]]
            stuck = self._names([m for m in bad if m not in movable])
            changed = next_layouts(movable, options)
            self._unhook(stuck & names)
            changed = [m for m in changed if m.units]
            if bad:
                wrong = self._disagreeing(self._live_units())
        # Reached by autograd, but not through a call of their modules: used as bare tensors.
        self._unhook(self.reached - self._names(self._live()))

    def _layout_confirmed(self, m: HookedModule, wrong: set[str]) -> bool:
        """Whether another parameter of the module agrees, and not by being zero."""
        right = [u for u in m.units.values() if u.name not in wrong]
        return any(self.truth[:, u.columns].nan_to_num().any() for u in right)

    def _unhook(self, names: set[str]) -> None:
        """Drop parameters from all rules: a parameter is covered everywhere by its rules, or nowhere."""
        for m in self.coverage.modules:
            m.keep_units(lambda _, u: u.name not in names)
        self.coverage.modules = [m for m in self.coverage.modules if m.units]

    def _live(self) -> list[HookedModule]:
        return [m for m in self.coverage.modules if m.layout is not None]

    def _live_units(self) -> list[Unit]:
        return [u for m in self._live() for u in m.units.values()]

    def _names(self, modules: Sequence[HookedModule]) -> set[str]:
        return set().union(*(m.unit_names for m in modules))

    def _expand_any(self, unit: Unit) -> bool:
        return any(self._expand({unit.name: shape}, [unit]) for shape in fallback.copy_shapes(unit.shape))

    def _expand(self, shapes: dict[str, tuple[int, ...]], units: Sequence[Unit]) -> bool:
        """Whether `units` are right with copies of these shapes for each example; if so, they stay."""
        self.coverage.expanded.update(shapes)
        expanded = [u for u in units if u.name in shapes]
        watched = {(len(self.ids), *shape) for shape in shapes.values()}
        with fallback.FirstAxisWatch(watched) as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operations on copies of another shape
            right = self._disagreeing(units) == [] and self._disagreeing(expanded, alone=True) == []
        if right and not watch.cut:
            return True
        for name in shapes:
            del self.coverage.expanded[name]
        return False

    def _defer(self, unit: Unit) -> bool:
        """Whether a deferred copy is right; if so, it stays."""
        self.coverage.deferred.append(unit.name)
        if self._disagreeing([unit]) == [] and self._disagreeing([unit], alone=True) == []:
            return True
        self.coverage.deferred.remove(unit.name)
        return False

    def _fails(self, m: HookedModule) -> bool:
        """Whether a pass with this module alone hooked cannot run."""
        whole, self.coverage = self.coverage, Coverage([m])
        try:
            return self._disagreeing([]) is None
        finally:
            self.coverage = whole

    def _disagreeing(
        self, units: Sequence[Unit], alone: bool = False, catch: bool = True
    ) -> list[Unit] | None:
        """Those of `units` whose features disagree with autograd; None if the pass fails.

        On the examples as one batch, or on the first of them `alone`: torch has other code for a batch of one.
        """
        batch, ids = (self.singles[0], self.ids[:1]) if alone else (self.batch, self.ids)
        collector = Collector(self.model, self.task, self.units, self.coverage, self.measure)
        try:
            with collector as collect:
                features, values = collect(batch, ids)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            if catch:
                return None
            raise
        truth = self.truth[: len(ids)]  # there may be fewer
        got = features[: len(truth)].cpu()
        if catch and not self._close(values[: len(truth)].cpu().double(), self.values[: len(truth)]):
            return None  # the hooks changed what the model computes
        finite = truth.isfinite().all(1)
        if not finite.any() and not alone:
            raise UndeError(
                f"the gradients of all examples tried ({self.ids}) are NaN or infinite: check the model"
            )
        truth, got = truth[finite], got[finite]
        floor = 1e-3 * truth.norm(dim=1)

        def agrees(u: Unit) -> bool:
            error = (got[:, u.columns] - truth[:, u.columns]).norm(dim=1)
            bound = self.tolerance * torch.maximum(truth[:, u.columns].norm(dim=1), floor)
            return bool((error <= bound).all())

        wrong = [u for u in units if not agrees(u)]
        if not wrong and not alone and {u.name for u in units} == {u.name for u in self.units}:
            self._agreed = self.coverage.describe()
        return wrong


def _project(unit: Unit, gradient: Tensor | None, device: torch.device) -> Tensor:
    p = unit.projection
    if gradient is None:
        return torch.zeros(p.size, device=device, dtype=p.dtype)
    dense = gradient.detach().to_dense()  # embeddings with sparse=True give sparse ones
    return p(dense.to(p.dtype).unsqueeze(0))[0].to(device)
