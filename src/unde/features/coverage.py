"""Which way each parameter goes, decided on a few real examples and checked against autograd.

Three examples are run one by one with ordinary autograd, and as one batch through the collector. A module
whose features disagree is tried with another layout, then its parameters are handed to the general ways.
So a wrong guess about somebody's model costs time, never correctness.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, to_device
from unde.errors import UndeError
from unde.features import fallback
from unde.features.attach import attach
from unde.features.collector import FRONT, SECOND, SHARED, Collector, Coverage, Use, share
from unde.features.guard import untouched
from unde.features.layers import rule_for
from unde.features.units import Unit, placement
from unde.tasks.base import Task
from unde.tasks.cutting import recut
from unde.tasks.tokens import Unreadable

# Structural mistakes give errors of order one; these only leave room for rounding in another batch shape.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
EXAMPLES = 3
_GENERAL = ("later", "vmapped", "looped", "unused")
FAILURES = (  # of a wrong guess; fake tensors assert what real ones raise
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AssertionError,
)


def plan_coverage(
    model: nn.Module, task: Task, rows: Rows, units: Sequence[Unit], measure: str = "loss"
) -> Coverage:
    """The cheapest correct way for each unit. Raises for what cannot be covered, by name, and for models that do not
    fit their task."""
    planner = _Planner(model, task, rows, units, measure)
    with untouched(model), torch.no_grad(), suppress(Unreadable):  # it is named when it is measured
        task.check(model, planner.batch)
    return planner.run()


def recorded(coverage: Coverage) -> dict[str, Any]:
    """A coverage as plain values, which `restored` reads back."""
    uses = {
        use.name: {
            "layout": use.layout,
            "lone": use.lone,
            "units": {k: u.name for k, u in use.units.items()},
        }
        for use in coverage.uses
    }
    expanded = {name: list(shape) for name, shape in coverage.expanded.items()}
    general = {name: getattr(coverage, name) for name in _GENERAL}
    return {"uses": uses, "expanded": expanded, **general}


def restored(record: dict[str, Any], model: nn.Module, units: Sequence[Unit]) -> Coverage:
    """The coverage that was decided for a model, on the model that is here."""
    found = {use.name: use for use in _find_uses(model, units)}
    missing = [name for name in record["uses"] if name not in found]
    if missing:
        raise UndeError(
            f"module {missing[0]!r} of the model is of another kind than when its index was begun: features would be "
            "computed in another way. Use the same versions of the model's code, or build another index"
        )
    uses = []
    for name, noted in record["uses"].items():
        use = found[name]
        use.layout, use.lone = noted["layout"], noted["lone"]
        use.units = {k: u for k, u in use.units.items() if noted["units"].get(k) == u.name}
        use.rule.projections = {k: u.projection for k, u in use.units.items()}
        uses.append(use)
    expanded = {name: tuple(shape) for name, shape in record["expanded"].items()}
    general = {name: list(record.get(name, ())) for name in _GENERAL}
    return Coverage(uses=uses, expanded=expanded, **general)


class _Planner:
    def __init__(self, model: nn.Module, task: Task, rows: Rows, units: Sequence[Unit], measure: str) -> None:
        self.model, self.units, self.measure = model, units, measure
        self.task = recut(task, task.cutting.brief())
        self.device, _ = placement(model)
        # Of one example two copies: in a batch of one, what is shared looks like what is each example's own.
        self.ids = evenly(len(rows), EXAMPLES) * (2 if len(rows) == 1 else 1)
        self.batch = to_device(rows.batch(self.ids), self.device)
        self.singles = [to_device(rows.batch([i]), self.device) for i in self.ids]
        self.tolerance = TOLERANCE[next(model.parameters()).dtype]
        self.coverage = Coverage(uses=_find_uses(model, units))

    def run(self) -> Coverage:
        self.truth, self.reached = self._autograd()
        loose = self._settled()
        late = set(self.coverage.later)
        if late and self._dropped() - late:
            # With a bias that is differentiated by, torch takes another kernel for attention. In half precision the
            # two round differently, so what disagreed without it is asked again.
            uses = [use for use in _find_uses(self.model, self.units) if not late & _names(use)]
            self.coverage = Coverage(uses=uses, later=self.coverage.later)
            loose = self._settled()
        if loose:
            names = [u.name for u in loose]
            self.coverage.vmapped = names
            if self._wrong(loose):
                self.coverage.vmapped, self.coverage.looped = [], names
        wrong = self._disagreeing(self.units, catch=False)
        if wrong:
            raise UndeError(
                f"no per-example gradient could be confirmed for {', '.join(repr(u.name) for u in wrong)}: "
                "features disagree with a backward pass of a single example. Name them in exclude=[regex]"
            )
        return self.coverage

    def _settled(self) -> list[Unit]:
        """Rules for what they are right for, copies of what examples meet one by one; returns what is left over."""
        self._choose_layouts()
        hooked = {name for use in self.coverage.uses for name in _names(use)} | set(self.coverage.later)
        loose = [u for u in self.units if u.name not in hooked]
        self.coverage.unused = [u.name for u in self.units if u.name not in self.reached]
        self._unhook(set(self.coverage.unused))  # nothing to check a rule on: the collector watches them
        loose = [u for u in loose if u.name in self.reached]
        return [u for u in loose if not self._expands(u) and not self._waits(u)]

    def _dropped(self) -> set[str]:
        """Parameters that have a rule which was not right for them."""
        known = {name for use in _find_uses(self.model, self.units) for name in _names(use)}
        return (known & self.reached) - {name for use in self.coverage.uses for name in _names(use)}

    def _autograd(self) -> tuple[Tensor, set[str]]:
        """The (B, D) features of the examples run one by one, and the parameters that got a gradient."""
        parameters = dict(self.model.named_parameters())
        wanted = [parameters[u.name] for u in self.units]
        rows, reached, values = [], set(), []
        with untouched(self.model):
            for p in wanted:
                p.requires_grad_(True)
            for i, single in zip(self.ids, self.singles):
                total: list[Tensor | None] = [None] * len(wanted)
                value = 0.0
                for part in self.task.cutting.passes(single, [i]):
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
            for p in wanted:
                p.requires_grad_(False)
            with torch.no_grad():
                together = sum(
                    self._values(part, self.ids) for part in self.task.cutting.passes(self.batch, self.ids)
                )
        self._check_independent(values, together)
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
                " Use reduction='none' and average over everything but the first axis." if shape == () else ""
            )
            raise UndeError(
                f"{type(self.task).__name__} gave {'a scalar' if shape == () else shape} for a batch of {len(ids)}: "
                f"expected one value for each example, shape ({len(ids)},).{hint}"
            )
        return values

    def _check_independent(self, alone: list[float], together: Any) -> None:
        a = self.values = torch.tensor(alone, dtype=torch.float64)
        b = together.detach().double().cpu()
        if not self._close(a, b):
            worst = int((a - b).abs().nan_to_num().argmax())
            raise UndeError(
                f"the {self.measure} of example {self.ids[worst]} is {alone[worst]:.6g} alone but "
                f"{float(b[worst]):.6g} in a batch: features of an example must not depend on its "
                "batch mates or on random numbers. "
                "Look for a mean over the batch, batch statistics, unmasked padding, or sampling in the model"
            )

    def _close(self, a: Tensor, b: Tensor) -> bool:
        finite = a.isfinite() & b.isfinite()
        return torch.allclose(a[finite], b[finite], rtol=10 * self.tolerance, atol=10 * self.tolerance)

    def _choose_layouts(self) -> None:
        """Give every hooked module the first layout that agrees with autograd, or drop its units."""
        options = _first_guess(self)
        bad = changed = self._live()
        while bad:
            wrong = self._disagreeing([u for use in self._live() for u in use.units.values()])
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
            changed = _next_layouts(movable, options)
            self._unhook(stuck & names)
            changed = [use for use in changed if use.units]
        # Reached by autograd, though not through any call of its modules: used as a bare tensor.
        called = {u.name for use in self._live() for u in use.units.values()}
        self._unhook(self.reached - called)

    def _confirmed(self, use: Use, wrong: set[str]) -> bool:
        """Whether another parameter of the module agrees, and not by being zero: then its layout is right."""
        right = [u for u in use.units.values() if u.name not in wrong]
        return any(self.truth[:, u.columns].nan_to_num().any() for u in right)

    def _unhook(self, names: set[str]) -> None:
        """A parameter is covered everywhere by its rules, or nowhere."""
        for use in self.coverage.uses:
            use.units = {k: u for k, u in use.units.items() if u.name not in names}
            use.rule.projections = {k: u.projection for k, u in use.units.items()}
        self.coverage.uses = [use for use in self.coverage.uses if use.units]

    def _live(self) -> list[Use]:
        return [use for use in self.coverage.uses if use.layout is not None]

    def _expands(self, unit: Unit) -> bool:
        for shape in fallback.expansions(unit.shape):
            self.coverage.expanded[unit.name] = shape
            with fallback.FirstAxisWatch((len(self.ids), *shape)) as watch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what the model does to copies of another shape
                right = not self._wrong([unit]) and self._disagreeing([unit], alone=True) == []
            if right and not watch.cut:
                return True
            del self.coverage.expanded[unit.name]
        return False

    def _waits(self, unit: Unit) -> bool:
        """Whether a parameter meets examples late enough to have a copy for each of them there."""
        self.coverage.later.append(unit.name)
        if not self._wrong([unit]) and self._disagreeing([unit], alone=True) == []:
            return True
        self.coverage.later.remove(unit.name)
        return False

    def _fails(self, use: Use) -> bool:
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
        try:
            with Collector(self.model, self.task, self.units, self.coverage, self.measure) as collect:
                got, values = collect(batch, ids)
        except FAILURES:
            if catch:
                return None
            raise
        if catch and not self._close(values.double().cpu(), self.values[: len(ids)]):
            return None  # the hooks changed what the model computes
        truth = self.truth[: len(ids)]
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

        return [u for u in units if not agrees(u)]


def _project(unit: Unit, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(unit.stop - unit.start, **_like(unit))
    dense = gradient.detach().to_dense()  # embeddings with sparse=True give sparse ones
    return unit.projection(dense.to(_like(unit)["dtype"]).unsqueeze(0))[0]


def _like(unit: Unit) -> dict[str, Any]:
    p = unit.projection
    return {"device": p.device, "dtype": p.dtype}


def _find_uses(model: nn.Module, units: Sequence[Unit]) -> list[Use]:
    """Every module with a rule that holds an attributed parameter. Tied parameters are found in all of them."""
    parameters = dict(model.named_parameters())
    unit_of = {id(parameters[u.name]): u for u in units}
    uses = []
    for name, module in model.named_modules():
        own = {k: unit_of[id(p)] for k, p in module._parameters.items() if p is not None and id(p) in unit_of}
        rule = rule_for(module) if own else None
        if rule is not None:
            own = {k: u for k, u in own.items() if k in rule.names(module)}
            uses.append(Use(name, module, rule(module, {k: u.projection for k, u in own.items()}), own))
    return [use for use in uses if use.units]


def _names(use: Use) -> set[str]:
    return {u.name for u in use.units.values()}


def _first_guess(planner: _Planner, sharing: bool = True) -> dict[str, list[str]]:
    """Gives every hooked module the likeliest layout; returns those left to try, in the order of calls.

    With `sharing`, modules behind one that seems to be shared get what they will get if it is.
    """
    batch = len(planner.ids)
    options: dict[str, list[str]] = {}
    handles = []

    def note(use: Use, _m: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or not x.dim():
            return None  # as if it had not been called: its parameters go another way
        possible = _layouts(tuple(x.shape), batch)
        if use.name not in options:
            use.layout, options[use.name] = possible[0], possible[1:]
            use.lone = x.shape[0] == 1
        else:  # called again
            options[use.name] = [layout for layout in options[use.name] if layout in possible]
        return share(out, batch, use.lone) if sharing and use.layout == SHARED else None

    try:
        for use in planner.coverage.uses:
            use.layout = None
            handles.append(attach(use, partial(note, use)))
        with untouched(planner.model), torch.no_grad():
            for part in planner.task.cutting.passes(planner.batch, planner.ids):
                planner._values(part, planner.ids)
        return options
    except FAILURES:
        if not sharing:
            raise
    finally:
        for remove in handles:
            remove()
    return _first_guess(planner, sharing=False)  # without the hooks of this try


def _layouts(shape: tuple[int, ...], batch: int) -> list[str]:
    """Layouts to try, likeliest first."""
    second = [SECOND] if len(shape) > 1 and shape[1] == batch else []
    if shape[0] % batch == 0:
        return [FRONT, *second, SHARED]
    return [*second, SHARED, FRONT]  # in front it may be, behind a module that turns out to be shared


def _next_layouts(uses: list[Use], options: dict[str, list[str]]) -> list[Use]:
    """Moves modules on to their next layout; to SHARED only the first called: those behind it may be right then."""
    moved: list[Use] = []
    for use in sorted(uses, key=lambda use: list(options).index(use.name)):
        if options[use.name][0] != SHARED or not any(m.layout == SHARED for m in moved):
            use.layout = options[use.name].pop(0)
            moved.append(use)
    return moved
