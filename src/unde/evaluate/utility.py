"""What retrained models are measured by: how well they do on queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, choose_collate, to_device
from unde.default_device import program_default
from unde.devices import device_of
from unde.gradients.model_state import frozen_eval
from unde.tasks import Task

BATCH = 32  # queries that go through a model at once


@dataclass(frozen=True, eq=False)
class QueryUtility:
    """How well a model does on queries: −loss, one number for each.

    Args:
        task: The task of the model.
        rows: The queries; data like the training data.

    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    >>> from unde.tasks import Classification
    >>> QueryUtility(Classification(), (x, y))(nn.Linear(2, 2)).shape
    torch.Size([2])
    """

    task: Task
    rows: Any

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Rows):
            object.__setattr__(self, "rows", Rows(self.rows, choose_collate(self.task.collate, self.rows)))

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Tensor:
        device = device_of(model)
        cuts = [range(a, min(a + BATCH, len(self.rows))) for a in range(0, len(self.rows), BATCH)]
        with frozen_eval(model), program_default():
            parts = [self.task.loss(model, to_device(self.rows.batch(c), device)) for c in cuts]
        return -torch.cat(parts).cpu().double()


@dataclass(frozen=True, eq=False)
class TargetUtility:
    """The same for several named sets of queries.

    Args:
        task: The task of the model.
        targets: {name: queries}.

    >>> from unde.tasks import Classification
    >>> measure = TargetUtility(Classification(), {"mine": (torch.zeros(1, 2), torch.zeros(1).long())})
    >>> measure(nn.Linear(2, 3))["mine"].shape
    torch.Size([1])
    """

    task: Task
    targets: Mapping[str, Any]

    def __call__(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: QueryUtility(self.task, rows)(model) for name, rows in self.targets.items()}
