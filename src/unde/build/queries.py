"""Query features: computed once, reusable wherever queries are accepted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unde import console
from unde.data import Rows, to_device
from unde.errors import UndeError
from unde.features import Collector, Unit, make_units, plan_coverage
from unde.index import given
from unde.index import manifest as mf
from unde.index.checkpoints import fingerprints, loaded
from unde.index.checks import to_signed
from unde.index.store import ShardError, read_shard, write_shard
from unde.tasks.base import Task
from unde.tasks.cutting import recut

if TYPE_CHECKING:
    from unde.index.index import Index

_PLACE = "queries"  # what the file is, whatever it is called


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
        tensors = {"features": self.features, "loss": self.loss, "digest": digest}
        write_shard(path, self.index, tensors, _PLACE)

    @classmethod
    def load(cls, path: Path, index: str) -> QueryFeatures:
        try:
            shard = read_shard(path, index, place=_PLACE)
        except ShardError as e:
            raise UndeError(
                f"{path} does not hold query features of this index ({e}): choose another path, or delete it"
            ) from None
        digests = [f"{int(d) % (1 << 64):016x}" for d in shard["digest"]]
        return cls(index, shard["features"], shard["loss"], digests)


class BadQuery(UndeError):
    """A query whose loss or gradient is NaN or infinite."""

    def __init__(self, row: int, count: int) -> None:
        super().__init__(
            f"the gradient of query {row} is NaN or infinite ({count} such in all): leave it out"
        )
        self.row = row


def compute(
    index: Index, rows: Rows, under: Callable[[], AbstractContextManager[None]] = nullcontext
) -> QueryFeatures:
    """Features of queries under every checkpoint of the index; `under` may change the model meanwhile."""
    if index.model is None or index.task is None:
        raise UndeError(
            "this index was opened without its model and task: pass both to Index.open for query features"
        )
    if fingerprints(index.model, index.checkpoints) != index.manifest.models:
        raise UndeError(
            f"the model's weights are not those that {index.folder} was built with: they changed since. "
            "Restore them, or build another index"
        )
    units = make_units(
        index.model,
        index.manifest.unit_names,
        str(index.method.projection),
        index.manifest.seed,
        given.read(index.folder, index.manifest),
    )
    features, losses = [], []
    for c in range(index.manifest.terms):
        with loaded(index.model, None if index.checkpoints is None else index.checkpoints[c]), under():
            steps = index.method.steps
            task = index.task if steps == 1 else recut(index.task, index.task.cutting.step(c, steps))
            one, loss, digests = _pass(index, task, rows, units)
        features.append(one)
        losses.append(loss)
    where = mf.sampled(len(rows))
    changed = [i for i, again in zip(where, rows.digests(where)) if again != digests[i]]
    if changed:
        raise mf.reads_differently(f"{changed[0]} of the queries")
    return QueryFeatures(index.manifest.id, torch.stack(features), torch.stack(losses), digests)


def _pass(index: Index, task: Task, rows: Rows, units: list[Unit]) -> tuple[Tensor, Tensor, list[str]]:
    """(Q, D) features, (Q,) values and digests under the weights that are loaded."""
    assert index.model is not None
    assert index.task is not None
    step, measure = index.batch_size, index.method.measure
    cuts = [range(a, min(a + step, len(rows))) for a in range(0, len(rows), step)]
    features, values, digests = [], [], []
    try:
        # Not planned on the step at hand: the target of the last is the model's own output, its gradient rounding.
        coverage = plan_coverage(index.model, index.task, rows, units, measure)
        bar = console.progress("features of queries", len(rows))
        with Collector(index.model, task, units, coverage, measure) as collect, bar as advance:
            collect.fit(index.memory, rows.batch([0]))
            for r, batch, read in rows.batches(cuts):
                f, v = collect(to_device(batch, collect.device), list(r))
                advance(len(r))
                features.append(f.float().cpu())
                values.append(v.float().cpu())
                digests += read
    except UndeError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        raise UndeError(
            f"the model cannot run on these queries ({type(e).__name__}: {e}): expected examples like those "
            "it was indexed on"
        ) from e
    whole = torch.cat(features)
    bad = (~whole.isfinite().all(1)).nonzero()[:, 0].tolist()
    if bad:
        raise BadQuery(bad[0], len(bad))
    return whole, torch.cat(values), digests
