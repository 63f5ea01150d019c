"""A coverage as plain values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from unde.errors import UndeError
from unde.gradients.collector import Coverage, HookedModule
from unde.gradients.layers import rule_for
from unde.gradients.parameters import Unit

_GENERAL = ("later", "vmapped", "looped", "unused")


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
    found = {use.name: use for use in find_uses(model, units)}
    missing = [name for name in record["uses"] if name not in found]
    if missing:
        raise UndeError(
            f"module {missing[0]!r} of the model is of another kind than when its index was begun: features would be "
            "computed in another way. HookedModule the same versions of the model's code, or build another index"
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


def find_uses(model: nn.Module, units: Sequence[Unit]) -> list[HookedModule]:
    """Every module with a rule that holds an attributed parameter. Tied parameters are found in all of them."""
    parameters = dict(model.named_parameters())
    unit_of = {id(parameters[u.name]): u for u in units}
    uses = []
    for name, module in model.named_modules():
        own = {k: unit_of[id(p)] for k, p in module._parameters.items() if p is not None and id(p) in unit_of}
        rule = rule_for(module) if own else None
        if rule is not None:
            own = {k: u for k, u in own.items() if k in rule.names(module)}
            uses.append(
                HookedModule(name, module, rule(module, {k: u.projection for k, u in own.items()}), own)
            )
    return [use for use in uses if use.units]
