"""Query features: computed once, reusable wherever queries are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whence.index.build import to_signed
from whence.index.store import read_shard, write_shard


@dataclass(frozen=True)
class QueryFeatures:
    """Features of Q queries under the model, groups and projection of one index."""

    index: str  # the id of that index
    features: Tensor  # (C, Q, D) for C checkpoints
    loss: Tensor  # (C, Q)
    digests: list[str]

    def __len__(self) -> int:
        return len(self.digests)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = torch.tensor([to_signed(d) for d in self.digests], dtype=torch.int64)
        write_shard(path, self.index, {"features": self.features, "loss": self.loss, "digest": digest})

    @classmethod
    def load(cls, path: Path, index: str) -> QueryFeatures:
        shard = read_shard(path, index)
        digests = [f"{int(d) % (1 << 64):016x}" for d in shard["digest"]]
        return cls(index, shard["features"], shard["loss"], digests)
