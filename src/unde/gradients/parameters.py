"""Units: the attributed parameters in model order, each with its projection and its columns of the feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.projection import WHOLE, Projection, Spec

_WHITENED = 2**22
DAMPINGS = "dampings"  # among the given matrices of whitening: λ of each parameter


@dataclass(frozen=True)
class Unit:
    """One parameter: `start:stop` are its columns in a feature vector.

    `lookup` marks tables that an embedding looks up; `scale` (size,) whitens the projected gradient.
    """

    name: str
    shape: tuple[int, ...]
    projection: Projection
    start: int
    stop: int
    lookup: bool = False
    scale: Tensor | None = None

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


def make_units(
    model: nn.Module,
    names: Sequence[str],
    projection: Spec | str,
    seed: int,
    given: Mapping[str, Tensor] | None = None,
) -> list[Unit]:
    """`given` holds matrices that are not drawn: see `Projection` and `unde.gradients.whitening`."""
    parameters, given = dict(model.named_parameters()), given or {}
    kind = Spec.parse(projection).kind
    tables = find_tables(model) if kind in WHOLE else set()
    white = kind == "factored" and DAMPINGS in given
    device, dtype = placement(model)
    units, start = [], 0
    for i, name in enumerate(names):
        shape = tuple(parameters[name].shape)
        if not parameters[name].is_floating_point():
            raise UndeError(
                f"parameter {name!r} is {parameters[name].dtype}: only real floating point is covered"
            )
        if parameters[name].is_meta and device.type != "meta":
            raise UndeError(
                f"parameter {name!r} is not in memory but offloaded: load the model with a device_map that keeps what "
                "is attributed on a device, or name it in exclude=[regex]"
            )
        p = Projection(projection, name, shape, seed, given).to(parameters[name].device, dtype)
        scale = whiten(given[f"values/{name}"], float(given[DAMPINGS][i])).to(p.device) if white else None
        lookup = id(parameters[name]) in tables
        units.append(Unit(name, shape, p, start, start + p.size, lookup, scale))
        start += p.size
    return units


def find_tables(model: nn.Module) -> set[int]:
    """Ids of the parameters that embeddings look up."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def describe_units(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Units as a manifest lists them."""
    return [
        {"name": u.name, "shape": list(u.shape), "size": u.stop - u.start}
        | ({"lookup": True} if u.lookup else {})
        for u in units
    ]


def whiten(values: Tensor, damping: float) -> Tensor:
    """(Λ + λ)^−1/2, in float32; zeros for a parameter without gradients."""
    if not values.any():
        return torch.zeros(values.shape, dtype=torch.float32)
    parts = values.split(_WHITENED)  # in float64 some at a time
    return torch.cat([(part.double() + damping).rsqrt().float() for part in parts])


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where features are computed, and in what precision: float32 unless the model is float64."""
    first = next(model.parameters())
    return first.device, torch.float64 if first.dtype == torch.float64 else torch.float32
