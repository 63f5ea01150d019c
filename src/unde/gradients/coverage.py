"""Which way each parameter goes, decided on a few real examples and checked against autograd.

Two or three examples are run one by one with ordinary autograd, and three as one batch through the collector. A module
whose features disagree is tried with another layout, then its parameters are handed to the general ways.
So a wrong guess about somebody's model costs time, never correctness.

Where a task can cut examples short, the choice is made on short ones, and confirmed on the largest as it is, with
another one in its batch: the first two where none is larger, for their pass can be the first of a build. What is not
confirmed is decided anew on whole ones.

Last, examples that are alike are tried in one batch (`mates.py`): a loss under which they meet is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, tensors, to_device
from unde.errors import UndeError
from unde.gradients import fallback
from unde.gradients.batch_axis import FAILURES, first_guess, guessing, next_layouts
from unde.gradients.collector import Collector, Coverage, HookedModule
from unde.gradients.mates import Mates, find_mates
from unde.gradients.meter import Meter, PassCost
from unde.gradients.model_state import as_it_was, frozen_eval
from unde.gradients.parameters import Unit, placement
from unde.gradients.record import find_uses, recorded
from unde.tasks.base import Task
from unde.tasks.batching import Batching, with_batching
from unde.tasks.tokens import Unreadable

# Structural mistakes give errors of order one; these only leave room for rounding in another batch shape.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
EXAMPLES = 3
REFERENCES = (
    2  # of them that are run alone, if they reach every parameter; short ones are followed by a whole one
)


@dataclass(frozen=True)
class CoverageTrial:
    """What a check found: features of the examples `where`, their values, and what their pass took if the largest is
    there. Of the first examples of the data `digests` are known: a build need not run them again."""

    where: list[int]
    features: Tensor  # (n, D)
    values: Tensor  # (n,)
    cost: PassCost | None
    digests: list[str] = field(default_factory=list)


def plan_coverage(
    model: nn.Module, task: Task, rows: Rows, units: Sequence[Unit], measure: str = "loss"
) -> Coverage:
    """The cheapest correct way for each unit. Raises for what cannot be covered, by name, and for models that do not
    fit their task."""
    return decide(model, task, rows, units, measure)[0]


def decide(
    model: nn.Module, task: Task, rows: Rows, units: Sequence[Unit], measure: str = "loss"
) -> tuple[Coverage, CoverageTrial | None]:
    """The same, and what was found on the way, if whole examples were tried."""
    device, _ = placement(model)
    # Of one example two copies: in a batch of one, what is shared looks like what is each example's own.
    ids = evenly(len(rows), EXAMPLES) * (2 if len(rows) == 1 else 1)
    batch, brief, mates = (
        to_device(rows.batch(ids), device),
        with_batching(task, task.batching.reduced()),
        find_mates(rows),
    )
    at = mates.largest

    def whole(i: int) -> Any:
        return to_device(rows.batch([i]), device)

    def count(batch: Any) -> int:
        return sum(x.numel() for x in tensors(batch))

    def telling(where: list[int], batch: Any) -> bool:
        """Whether a pass of these tells what any takes: each is as large as the largest, and they are one pass."""
        return type(task.batching).fit_memory is Batching.fit_memory and count(batch) >= len(where) * count(
            whole(at)
        )

    short = None if brief is not task else task.batching.shorten(batch)
    if short is not None:
        alone = [fallback.single(short, b, len(ids)) for b in range(len(ids))]
        coverage = _by_short(Planner(model, task, units, measure, ids, short, alone, references=1))
        if coverage is not None:
            where = [0, 1] if at == 0 and len(rows) > 1 else [at, 0]
            both = to_device(rows.batch(where), device)
            full = Planner(model, task, units, measure, where, both, [whole(at)], telling(where, both))
            if full.confirms(coverage):
                assert full.tried is not None
                again = _among_mates(full, coverage, rows, ids, mates, task.batching.shorten)
                if again is not None:
                    return again, None
                return coverage, replace(full.tried, digests=rows.digests(where) if where == [0, 1] else [])
    with frozen_eval(model), torch.no_grad(), suppress(Unreadable):  # it is named when it is measured
        task.check(model, batch)
    alone = [whole(i) for i in ids]
    full = Planner(model, brief, units, measure, ids, batch, alone, telling(ids, batch))
    coverage = full.run()
    again = _among_mates(full, coverage, rows, ids, mates, lambda batch: None)
    if again is not None:
        return again, None
    return coverage, full.tried if brief is task else None


def _among_mates(
    like: Planner,
    coverage: Coverage,
    rows: Rows,
    ids: list[int],
    mates: Mates,
    shorten: Callable[[Any], Any | None],
) -> Coverage | None:
    """Check the coverage on examples that are alike: None if it holds, else one that is decided on them and on `ids`.

    Raises:
        UndeError: the examples of a batch change what is measured of one another.
    """

    def planner(where: list[int], singles: int, cut: Callable[[Any], Any | None]) -> Planner:
        batch = to_device(rows.batch(where), like.device)
        short = cut(batch)
        if short is None:
            alone = [to_device(rows.batch([i]), like.device) for i in where[:singles]]
        else:
            batch, alone = short, [fallback.single(short, b, len(where)) for b in range(singles)]
        references = min(singles, REFERENCES)
        return Planner(
            like.model, like.task, like.units, like.measure, where, batch, alone, False, references
        )

    with as_it_was(like.model):
        planner(mates.equal, 1, shorten).check_values()
        planner(mates.near, 1, shorten).check_values()
        triple = planner(mates.triple, 1, shorten)
        if triple.confirms(coverage) or not triple.check_values():
            return None
    both = [*mates.triple, *ids]
    return planner(both, len(both), lambda batch: None).run()


def _by_short(cut: Planner) -> Coverage | None:
    """The coverage by examples that are cut short, if they reach every parameter and there is a rule for each. Else
    whole ones are asked: they may reach more, and errors speak of them."""
    try:
        with as_it_was(cut.model):
            with frozen_eval(cut.model), torch.no_grad():
                cut.task.check(cut.model, cut.batch)
            found = cut.run()
    except (UndeError, KeyError, AttributeError, *FAILURES):
        return None
    return found if not (found.later or found.vmapped or found.looped or found.unused) else None


class Planner:
    """Tries examples as one batch and one by one; `singles` may be fewer, those of the first. Passes of the batch are
    `metered` on demand."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        units: Sequence[Unit],
        measure: str,
        ids: list[int],
        batch: Any,
        singles: list[Any],
        metered: bool = False,
        references: int = REFERENCES,
    ) -> None:
        self.model, self.task, self.units, self.measure, self.metered = model, task, units, measure, metered
        self.ids, self.batch, self.singles, self.references = ids, batch, singles, references
        self.device, _ = placement(model)
        self.tolerance = TOLERANCE[next(model.parameters()).dtype]
        self.coverage = Coverage(uses=find_uses(model, units))
        self.tried: CoverageTrial | None = None
        self._agreed: dict[str, Any] | None = None  # the coverage that all units agreed under

    def run(self) -> Coverage:
        with frozen_eval(self.model):  # once: what draws random numbers shall draw others for single examples
            return self._chosen()

    def _chosen(self) -> Coverage:
        self.truth, self.reached = self._autograd()
        loose = self._settled()
        late = set(self.coverage.later)
        if late and self._dropped() - late:
            # With a bias that is differentiated by, torch takes another kernel for attention. In half precision the
            # two round differently, so what disagreed without it is asked again.
            uses = [use for use in find_uses(self.model, self.units) if not late & _names(use)]
            self.coverage = Coverage(uses=uses, later=self.coverage.later)
            loose = self._settled()
        if loose:
            names = [u.name for u in loose]
            self.coverage.vmapped = names
            if self._wrong(loose):
                self.coverage.vmapped, self.coverage.looped = [], names
        if self._agreed == recorded(self.coverage):
            return self.coverage
        wrong = self._disagreeing(self.units, catch=False)
        if wrong:
            raise UndeError(
                f"no per-example gradient could be confirmed for {', '.join(repr(u.name) for u in wrong)}: "
                "features disagree with a backward pass of a single example. Name them in exclude=[regex]"
            )
        return self.coverage

    def confirms(self, coverage: Coverage) -> bool:
        """Whether it is right for these examples too."""
        self.coverage = coverage
        try:
            with frozen_eval(self.model):
                self.truth, self.reached = self._autograd()
                return self._disagreeing(self.units) == []
        except (UndeError, *FAILURES):
            return False

    def check_values(self) -> bool:
        """Raises if an example has another value in the batch than alone. False if one cannot be run: a build names
        it."""
        try:
            with frozen_eval(self.model), torch.no_grad():
                alone = [
                    sum(
                        float(self._values(part, [i]).sum())
                        for part in self.task.batching.passes(single, [i])
                    )
                    for i, single in zip(self.ids, self.singles)
                ]
                together = self._together()
        except (UndeError, KeyError, AttributeError, *FAILURES):
            return False
        self.values = torch.tensor(alone, dtype=torch.float64)
        self._check_independent(together)
        return True

    def _settled(self) -> list[Unit]:
        """Rules for what they are right for, copies of what examples meet one by one; returns what is left over."""
        self._choose_layouts()
        hooked = {name for use in self.coverage.uses for name in _names(use)} | set(self.coverage.later)
        loose = [u for u in self.units if u.name not in hooked]
        self.coverage.unused = [u.name for u in self.units if u.name not in self.reached]
        self._unhook(set(self.coverage.unused))  # nothing to check a rule on: the collector watches them
        loose = [u for u in loose if u.name in self.reached]
        # Mostly all of them are right as they come, and one pass tells.
        if loose and self._copied({u.name: fallback.expansions(u.shape)[0] for u in loose}, self.units):
            return []
        return [u for u in loose if not self._expands(u) and not self._waits(u)]

    def _dropped(self) -> set[str]:
        """Parameters that have a rule which was not right for them."""
        known = {name for use in find_uses(self.model, self.units) for name in _names(use)}
        return (known & self.reached) - {name for use in self.coverage.uses for name in _names(use)}

    def _autograd(self) -> tuple[Tensor, set[str]]:
        """The features of the first examples run one by one, and the parameters that got a gradient."""
        parameters = dict(self.model.named_parameters())
        wanted = [parameters[u.name] for u in self.units]
        rows: list[Tensor] = []
        reached: set[str] = set()
        values: list[float] = []
        try:
            for p in wanted:
                p.requires_grad_(True)
            for i, single in zip(self.ids, self.singles):
                total: list[Tensor | None] = [None] * len(wanted)
                value = 0.0
                for part in self.task.batching.passes(single, [i]):
                    out = self._values(part, [i])
                    value += float(out.detach().sum())
                    if not out.requires_grad:
                        continue
                    grads = torch.autograd.grad(out.sum(), wanted, allow_unused=True)
                    total = [a if b is None else b if a is None else a + b for a, b in zip(total, grads)]
                reached |= {u.name for u, g in zip(self.units, total) if g is not None}
                each = (_project(u, g).to(self.device) for u, g in zip(self.units, total))
                rows.append(torch.cat(list(each)))
                values.append(value)
                known = sum(bool(row.isfinite().all()) for row in rows)
                if known == self.references and len(reached) == len(self.units):
                    break  # another would tell no more
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
        values = self.task.measure(self.model, batch, name=self.measure, ids=ids)
        if not isinstance(values, Tensor) or values.shape != (len(ids),):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            hint = (
                " HookedModule reduction='none' and average over everything but the first axis."
                if shape == ()
                else ""
            )
            raise UndeError(
                f"{type(self.task).__name__} gave {'a scalar' if shape == () else shape} for a batch of {len(ids)}: "
                f"expected one value for each example, shape ({len(ids)},).{hint}"
            )
        return values

    def _together(self) -> Tensor:
        """What is measured of the examples as one batch."""
        passes = self.task.batching.passes(self.batch, self.ids)
        return torch.stack([self._values(part, self.ids).detach() for part in passes]).sum(0)

    def _check_independent(self, together: Tensor) -> None:
        a = self.values
        b = together[: len(a)].double().cpu()
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
        with guessing(self.coverage.uses, len(self.ids)) as options:
            wrong = self._disagreeing(self.units)
        if wrong is None:  # was it the model, or a guess?
            with torch.no_grad():
                self._check_independent(self._together())
            options = first_guess(self.coverage.uses, len(self.ids), self._together)
            wrong = self._disagreeing(self._of(self._live()))
        bad = changed = self._live()
        while bad:
            if wrong is None:  # the pass failed: the fault is in what changed since one that ran
                bad = [use for use in changed if self._fails(use)] or changed
                names = {u.name for use in bad for u in use.units.values()}
                movable = bad
            else:
                names = {u.name for u in wrong}
                bad = [use for use in self._live() if any(u.name in names for u in use.units.values())]
                movable = [use for use in bad if not self._confirmed(use, names)]
            movable = [use for use in movable if options[use.name]]
            stuck = {u.name for use in bad if use not in movable for u in use.units.values()}
            changed = next_layouts(movable, options)
            self._unhook(stuck & names)
            changed = [use for use in changed if use.units]
            if bad:
                wrong = self._disagreeing(self._of(self._live()))
        # Reached by autograd, though not through any call of its modules: used as a bare tensor.
        called = {u.name for use in self._live() for u in use.units.values()}
        self._unhook(self.reached - called)

    def _confirmed(self, use: HookedModule, wrong: set[str]) -> bool:
        """Whether another parameter of the module agrees, and not by being zero: then its layout is right."""
        right = [u for u in use.units.values() if u.name not in wrong]
        return any(self.truth[:, u.columns].nan_to_num().any() for u in right)

    def _unhook(self, names: set[str]) -> None:
        """A parameter is covered everywhere by its rules, or nowhere."""
        for use in self.coverage.uses:
            use.units = {k: u for k, u in use.units.items() if u.name not in names}
            use.rule.projections = {k: u.projection for k, u in use.units.items()}
        self.coverage.uses = [use for use in self.coverage.uses if use.units]

    def _live(self) -> list[HookedModule]:
        return [use for use in self.coverage.uses if use.layout is not None]

    def _of(self, uses: Sequence[HookedModule]) -> list[Unit]:
        return [u for use in uses for u in use.units.values()]

    def _expands(self, unit: Unit) -> bool:
        return any(self._copied({unit.name: shape}, [unit]) for shape in fallback.expansions(unit.shape))

    def _copied(self, shapes: dict[str, tuple[int, ...]], units: Sequence[Unit]) -> bool:
        """Whether `units` are right with copies of these shapes for each example; if so, they stay."""
        self.coverage.expanded.update(shapes)
        own = [u for u in units if u.name in shapes]
        watched = {(len(self.ids), *shape) for shape in shapes.values()}
        with fallback.FirstAxisWatch(watched) as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the model does to copies of another shape
            right = self._disagreeing(units) == [] and self._disagreeing(own, alone=True) == []
        if right and not watch.cut:
            return True
        for name in shapes:
            del self.coverage.expanded[name]
        return False

    def _waits(self, unit: Unit) -> bool:
        """Whether a parameter meets examples late enough to have a copy for each of them there."""
        self.coverage.later.append(unit.name)
        if not self._wrong([unit]) and self._disagreeing([unit], alone=True) == []:
            return True
        self.coverage.later.remove(unit.name)
        return False

    def _fails(self, use: HookedModule) -> bool:
        """Whether a pass with this module hooked, and no other, cannot run."""
        whole, self.coverage = self.coverage, Coverage(uses=[use])
        try:
            return self._disagreeing([]) is None
        finally:
            self.coverage = whole

    def _wrong(self, units: Sequence[Unit]) -> list[Unit]:
        """Those of `units` whose features disagree with autograd; all of them if the pass fails."""
        wrong = self._disagreeing(units)
        return list(units) if wrong is None else wrong

    def _disagreeing(
        self, units: Sequence[Unit], alone: bool = False, catch: bool = True
    ) -> list[Unit] | None:
        """Those of `units` whose features disagree with autograd; None if the pass fails.

        On the examples as one batch, or on the first of them `alone`: torch has other code for a batch of one.
        """
        batch, ids = (self.singles[0], self.ids[:1]) if alone else (self.batch, self.ids)
        meter = Meter() if self.metered and not alone else nullcontext()
        try:
            with Collector(self.model, self.task, self.units, self.coverage, self.measure) as collect, meter:
                features, values = collect(batch, ids)
        except FAILURES:
            if catch:
                return None
            raise
        truth = self.truth[: len(ids)]  # there may be fewer
        got = features[: len(truth)]
        if catch and not self._close(values[: len(truth)].double().cpu(), self.values[: len(truth)]):
            return None  # the hooks changed what the model computes
        finite = truth.isfinite().all(1)
        if not finite.any() and not alone:
            raise UndeError(
                f"the gradients of all examples tried ({self.ids}) are NaN or infinite: look at the model"
            )
        truth, got = truth[finite], got[finite]
        floor = 1e-3 * truth.norm(dim=1)

        def agrees(u: Unit) -> bool:
            error = (got[:, u.columns] - truth[:, u.columns]).norm(dim=1)
            return bool(
                (error <= self.tolerance * torch.maximum(truth[:, u.columns].norm(dim=1), floor)).all()
            )

        wrong = [u for u in units if not agrees(u)]
        if not wrong and not alone and {u.name for u in units} == {u.name for u in self.units}:
            cost = meter.cost(len(ids)) if isinstance(meter, Meter) else None
            self._agreed, self.tried = recorded(self.coverage), CoverageTrial(ids, features, values, cost)
        return wrong


def _project(unit: Unit, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(unit.stop - unit.start, **_like(unit))
    dense = gradient.detach().to_dense()  # embeddings with sparse=True give sparse ones
    return unit.projection(dense.to(_like(unit)["dtype"]).unsqueeze(0))[0]


def _like(unit: Unit) -> dict[str, Any]:
    p = unit.projection
    return {"device": p.device, "dtype": p.dtype}


def _names(use: HookedModule) -> set[str]:
    return {u.name for u in use.units.values()}
