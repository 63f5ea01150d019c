"""Units: the attributed parameters in model order, each with its projection and its columns of the feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.projection import Projection, Spec


@dataclass(frozen=True)
class Unit:
    """One parameter: `start:stop` are its columns in a feature vector."""

    name: str
    shape: tuple[int, ...]
    projection: Projection
    start: int
    stop: int

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
    """`given` holds matrices that are not drawn: see `Projection`."""
    parameters = dict(model.named_parameters())
    device, dtype = placement(model)
    units, start = [], 0
    for name in names:
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
        units.append(Unit(name, shape, p, start, start + p.size))
        start += p.size
    return units


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where features are computed, and in what precision: float32 unless the model is float64."""
    first = next(model.parameters())
    return first.device, torch.float64 if first.dtype == torch.float64 else torch.float32
