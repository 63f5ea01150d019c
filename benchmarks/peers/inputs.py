"""What a peer is given, and small things that several need to read our models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.cases import Case
from unde import Setup
from unde.data import Rows


class Cannot(Exception):
    """A peer has no way to run a case; says why."""


@dataclass(frozen=True)
class BuildInputs:
    case: Case
    setup: Setup
    rows: Rows
    rank: int
    examples: int
    folder: Path  # empty, and deleted afterwards

    def batches(self) -> Iterator[range]:
        for start in range(0, self.examples, self.case.batch):
            yield range(start, min(start + self.case.batch, self.examples))

    @property
    def chosen(self) -> list[Any]:
        return [self.rows[i] for i in range(self.examples)]

    def loader(self, collate: Any = None) -> DataLoader:
        return DataLoader(self.chosen, batch_size=self.case.batch, collate_fn=collate or self.rows.collate)


class Logits(nn.Module):
    """A classifier of transformers that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def with_linear_layers(model: nn.Module) -> nn.Module:
    """GPT-2 of transformers with its Conv1D layers as the linear layers that they are; in place."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(*layer.weight.shape)
                linear.weight.data, linear.bias.data = layer.weight.data.T.contiguous(), layer.bias.data
                setattr(parent, name, linear)
    return model


def refuse_diffusion(given: BuildInputs) -> None:
    if given.case.name in ("ddpm", "text", "lora"):
        raise Cannot("no loss of a denoiser over timesteps: an example is one row of a batch here")
