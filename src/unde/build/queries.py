"""Query features: computed once, reusable wherever queries are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.build.fingerprints import to_digest, to_signed
from unde.errors import UndeError
from unde.store.files import CannotWrite
from unde.store.remote import Place
from unde.store.shards import ShardError, read_shard, write_shard
from unde.store.steady import copied

PLACE = "queries"  # what the file is, whatever it is called


@dataclass(frozen=True)
class QueryFeatures:
    """Features of Q queries under the model, groups and projection of one index."""

    index: str  # the lineage of that index: they stay when its examples change
    features: Tensor  # (C, Q, D) for C checkpoints
    loss: Tensor  # (C, Q)
    digests: list[str]

    def __len__(self) -> int:
        return len(self.digests)

    def save(self, path: Place) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CannotWrite(
                f"cannot make the folder of {path} ({e.strerror}): choose another path", e
            ) from None
        digest = torch.tensor([to_signed(d) for d in self.digests], dtype=torch.int64)
        tensors = {"features": self.features, "loss": self.loss, "digest": digest}
        write_shard(path, self.index, tensors, PLACE)

    @classmethod
    def load(cls, path: Place, index: str, shape: tuple[int, int] | None = None) -> QueryFeatures:
        """`shape` is how many checkpoints and columns the index has."""
        try:
            found = read_shard(path, index, place=PLACE)
            _check_shapes(path, found, shape)
            shard = copied(found)
        except ShardError as e:
            raise UndeError(
                f"{path} does not hold query features of this index ({e}): choose another path, or delete it"
            ) from None
        digests = [to_digest(int(d)) for d in shard["digest"]]
        return cls(index, shard["features"], shard["loss"], digests)


def _check_shapes(path: Place, shard: Mapping[str, Tensor], shape: tuple[int, int] | None) -> None:
    found = {name: tuple(t.shape) for name, t in shard.items()}
    terms, width = shape or (found.get("features", (0, 0, 0))[0], found.get("features", (0, 0, 0))[-1])
    count = len(shard["digest"]) if len(found.get("digest", ())) == 1 else 0
    wanted = {"features": (terms, count, width), "loss": (terms, count), "digest": (count,)}
    if found != wanted:
        raise ShardError(f"shard {path} is damaged: it holds {found}, expected {wanted}")


class BadQuery(UndeError):
    """A query whose loss or gradient is NaN or infinite."""

    def __init__(self, row: int, count: int) -> None:
        super().__init__(
            f"the gradient of query {row} is NaN or infinite ({count} such in all): leave it out"
        )
        self.row = row
