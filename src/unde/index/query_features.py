"""Query features: computed once, reusable wherever queries are accepted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.console import size
from unde.errors import UndeError
from unde.fingerprints import origins, to_digest, to_signed_tensor
from unde.store.files import CannotWrite
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, copy_tensors, read_shard, write_shard

_COPIES = 2  # of features of queries: as they are, and times the kernel
PLACE = "queries"  # what the file is, whatever it is called


@dataclass(frozen=True)
class QueryFeatures:
    """Features of Q queries under the model, groups and projection of one index.

    Gradients add up, so sets of queries are asked about as one: `a.mean()` is what several have in common, `a - b` what
    one is and the other is not, query by query, or `a.mean() - b.mean()` for two sets.
    """

    index: str  # the lineage of that index: they stay when its examples change
    features: Tensor  # (C, Q, D) for C checkpoints
    loss: Tensor  # (C, Q)
    digests: list[str]  # of a set, those of all its queries, joined by +

    def __len__(self) -> int:
        return len(self.digests)

    def mean(self) -> QueryFeatures:
        """All of them as one query."""
        if not len(self):
            raise UndeError("there are no queries to take the mean of: expected at least one")
        features, loss = (t.mean(1, keepdim=True) for t in (self.features, self.loss))
        return QueryFeatures(self.index, features, loss, [_set_of(*self.digests)])

    def __sub__(self, other: QueryFeatures) -> QueryFeatures:
        if self.index != other.index:
            raise UndeError("these query features were computed for two indexes: compute both with one")
        if len(self) != len(other) and 1 not in (len(self), len(other)):
            raise UndeError(
                f"{len(self)} queries less {len(other)}: expected as many, or one. Sets are compared by their means, "
                "a.mean() - b.mean()"
            )
        count = max(len(self), len(other)) if len(self) and len(other) else 0
        pairs = zip(*(f.digests * (count if len(f) == 1 else 1) for f in (self, other)))
        digests = [_set_of(*pair) for pair in pairs]
        return QueryFeatures(self.index, self.features - other.features, self.loss - other.loss, digests)

    def save(self, path: StorePath) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CannotWrite(
                f"cannot make the folder of {path} ({e.strerror}): choose another path", e
            ) from None
        digest = to_signed_tensor(origins(self.digests))
        tensors = {"features": self.features, "loss": self.loss, "digest": digest}
        if len(digest) > len(self):
            tensors["members"] = torch.tensor([len(origins([d])) for d in self.digests])
        write_shard(path, self.index, tensors, PLACE)

    @classmethod
    def load(cls, path: StorePath, index: str, shape: tuple[int, int] | None = None) -> QueryFeatures:
        """`shape` is how many checkpoints and columns the index has."""
        try:
            found = read_shard(path, index, place=PLACE)
            _check_shapes(path, found, shape)
            shard = copy_tensors(found)
        except ShardError as e:
            raise UndeError(
                f"{path} does not hold query features of this index ({e}): choose another path, or delete it"
            ) from None
        sets = shard.get("members", torch.ones_like(shard["digest"])).tolist()
        digests = ["+".join(to_digest(int(d)) for d in one) for one in shard["digest"].split(sets)]
        return cls(index, shard["features"], shard["loss"], digests)


def machine_memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def check_fits(queries: int, m: Manifest) -> None:
    """Raise before features of so many queries are computed, where this machine cannot hold them."""
    each, most = 4 * m.terms * m.width, machine_memory()
    if most is not None and queries * each > most:
        raise UndeError(
            f"features of {queries:,} queries take {size(queries * each)}, {size(each)} each under projection "
            f"{m.method['projection']!r}, and this machine has {size(most)} of memory: ask up to "
            f"{max(1, most // (_COPIES * each)):,} at a time, or an index with a smaller projection, such as 'kron(16)'"
        )


def _set_of(*digests: str) -> str:
    return "+".join(sorted(set(origins(digests))))


def _check_shapes(path: StorePath, shard: Mapping[str, Tensor], shape: tuple[int, int] | None) -> None:
    found = {name: tuple(t.shape) for name, t in shard.items()}
    terms, width = shape or (found.get("features", (0, 0, 0))[0], found.get("features", (0, 0, 0))[-1])
    digests = count = len(shard["digest"]) if len(found.get("digest", ())) == 1 else 0
    wanted: dict[str, tuple[int, ...]] = {}
    if (members := shard.get("members")) is not None and members.dim() == 1:
        count, whole = len(members), bool((members > 0).all()) and int(members.sum()) == digests
        wanted["members"] = (count if whole else -1,)
    wanted |= {"features": (terms, count, width), "loss": (terms, count), "digest": (digests,)}
    if found != wanted:
        raise ShardError(f"shard {path} is damaged: it holds {found}, expected {wanted}")


class BadQuery(UndeError):
    """A query whose loss or gradient is NaN or infinite."""

    def __init__(self, row: int, count: int) -> None:
        super().__init__(
            f"the gradient of query {row} is NaN or infinite ({count} such in all): leave it out"
        )
        self.row = row
