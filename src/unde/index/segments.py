"""An index as immutable segments: rewrite the rows that are kept; merge indexes.

Every change writes the rows that stay as new shards beside the old ones; shards that keep all their rows stay the files
that they are. Features are moved, not computed again. Kernels are fitted again from them when they are next needed.
The covariances of EKFAC are sums over the examples of a shard: those of joined shards are added, and those of removed
rows are computed once more from the model and subtracted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from unde import console, methods
from unde.data import evenly
from unde.errors import UndeError
from unde.fingerprints import fingerprint_of, ids_fingerprint
from unde.gradients.feature_pass import split_range, torch_threads
from unde.index import projection_matrices as matrices
from unde.index.reader import IndexReader, check_shards, read_ids, write_ids
from unde.index.shard_writer import FACTORS, ShardWriter, concatenate, covariances
from unde.index.state import PROBE_SIZE, list_differences, probe_path
from unde.parallel.model_transport import BuildInputs
from unde.store import layout
from unde.store.files import checksum, clear_partial, create_bytes, write_bytes
from unde.store.locks import locked
from unde.store.manifest import MERGE, Changes, Manifest, Segment
from unde.store.remote import StorePath, exists
from unde.store.shards import ShardError, is_valid_shard, read_shard, write_shard
from unde.tasks.base import differences

_OTHER = "in the other"


@dataclass(frozen=True)
class Source:
    """An index whose rows a rewritten one takes, but for those that are removed."""

    reader: IndexReader
    removal_mask: Tensor | None = None  # (N,) bool

    def selections(self) -> Iterator[ShardRows]:
        """The rows that are kept of each shard."""
        for s, shard in enumerate(self.reader.manifest.shards):
            positions = torch.arange(shard.start, shard.stop)
            if self.removal_mask is not None:
                positions = positions[~self.removal_mask[shard]]
            if len(positions):
                yield ShardRows(self.reader, s, positions, len(positions) == shard.stop - shard.start)


@dataclass(frozen=True)
class ShardRows:
    """Examples of one stored shard, by their positions in the index."""

    reader: IndexReader
    s: int
    positions: Tensor
    is_whole: bool  # all of the shard

    @property
    def owner(self) -> str:
        return self.reader.manifest.files[self.s][1]

    @property
    def numbers(self) -> Tensor:
        return torch.tensor([self.reader.manifest.numbers[i] for i in self.positions.tolist()])

    def read(self, c: int, writer: ShardWriter | None) -> dict[str, Tensor]:
        """Its rows under checkpoint c. The file is checked to its last byte: they get a new checksum."""
        shard = self.reader.read_checked(c, self.s)
        if self.is_whole:
            return shard
        start = self.reader.manifest.shards[self.s].start
        selected = {name: t[self.positions - start] for name, t in shard.items() if name != FACTORS}
        if FACTORS in shard:
            assert writer is not None
            counted = start + (~shard["skipped"].bool()).nonzero()[:, 0]
            is_kept = torch.isin(counted, self.positions)
            kept, others = counted[is_kept].tolist(), counted[~is_kept].tolist()
            if len(kept) <= len(others):  # run the fewer through the model
                selected[FACTORS] = _sum_covariances(writer, c, kept)
            else:
                selected[FACTORS] = shard[FACTORS] - _sum_covariances(writer, c, others)
        return selected


@dataclass(frozen=True)
class NewShard:
    """A shard of the rewritten index, and the number and owner of its file."""

    parts: list[ShardRows]
    number: int
    owner: str
    is_written: bool

    def __len__(self) -> int:
        return sum(len(part.positions) for part in self.parts)


def rewrite_all(
    folder: StorePath,
    sources: Mapping[StorePath, Sequence[Source]],
    entry: dict[str, Any],
    ids: Sequence[Any] | None,
    **options: Any,
) -> Manifest:
    """Rewrite the gradients with other labels and the index, each from the sources of its folder.

    Return the manifest of the index. It holds theirs, so that to write it changes all at once.
    """
    fishers = {
        home.name: rewrite(home, of, entry, ids, **options) for home, of in sources.items() if home != folder
    }
    if not exists(folder / layout.MANIFEST):  # a new index: its folders have manifests before it has
        for name, manifest in fishers.items():
            write_bytes(folder / name / layout.MANIFEST, manifest.text())
    return rewrite(folder, sources[folder], entry, ids, fishers=fishers, **options)


def rewrite(
    home: StorePath,
    sources: Sequence[Source],
    entry: dict[str, Any],
    ids: Sequence[Any] | None,
    *,
    fishers: Mapping[str, Manifest] | None = None,
    inputs: BuildInputs | None = None,
) -> Manifest:
    """Write the shards, ids and probe of the index that all rows of the sources make; return its manifest.

    The index changes when that is written. `inputs` are model and data for the covariances of removed rows.
    """
    reader = sources[0].reader
    first, in_place = reader.manifest, reader.folder == home
    plan = _plan_shards(home, sources, entry["token"])
    _write_shards(plan, home, first, inputs)
    count = first.examples if first.changes is None else first.changes.build_examples
    history = [*first.history, entry] if in_place else [entry]
    inside = {name: manifest.as_dict() for name, manifest in (fishers or {}).items()}
    after = replace(
        first,
        examples=sum(map(len, plan)),
        ids=ids_fingerprint(ids),
        resolved=replace(first.resolved, shard_size=max(first.resolved.shard_size, *map(len, plan))),
        changes=Changes(first.lineage, count, _segments(plan), history, inside),
    )
    after = replace(after, data=fingerprint_of(IndexReader(home, after, 0).values("digest")))
    _write_probe(home, reader, after, plan)
    write_ids(home, ids, after.generation)
    return after


def make_entry(
    what: str, examples: int, left: int, token: str, before: str, source: str = ""
) -> dict[str, Any]:
    """An entry of the history of an index."""
    counts = {"what": what, "examples": examples, "left": left}
    return counts | {"on": today(), "token": token, "before": before, "from": source}


def make_token(*content: Any) -> str:
    """The same content gives the same token."""
    return checksum(json.dumps(content))


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _plan_shards(home: StorePath, sources: Sequence[Source], owner: str) -> list[NewShard]:
    """Join neighbours where one is new or loses rows and both fit into one shard; number the new files."""
    size = sources[0].reader.manifest.resolved.shard_size

    def is_file(part: ShardRows) -> bool:
        return part.is_whole and part.reader.folder == home

    groups: list[list[ShardRows]] = []
    for part in (part for source in sources for part in source.selections()):
        joined = [*groups[-1], part] if groups else [part]
        fits = sum(len(p.positions) for p in joined) <= size
        if groups and fits and not all(is_file(p) and p.owner != owner for p in joined):
            groups[-1] = joined
        else:
            groups.append([part])
    used = [n for source in sources if source.reader.folder == home for n, _ in source.reader.manifest.files]
    number, plan = 1 + max(used, default=-1), []
    for parts in groups:
        if len(parts) == 1 and is_file(parts[0]):
            plan.append(NewShard(parts, *parts[0].reader.manifest.files[parts[0].s], True))
        else:
            plan.append(NewShard(parts, number, owner, False))
            number += 1
    return plan


def _segments(plan: Sequence[NewShard]) -> list[Segment]:
    """Shards of one owner in consecutive files, as the manifest lists them."""
    segments = []
    for (owner, _), group in groupby(enumerate(plan), lambda at: (at[1].owner, at[1].number - at[0])):
        shards = [shard for _, shard in group]
        runs = to_runs(torch.cat([part.numbers for shard in shards for part in shard.parts]))
        segments.append(Segment(owner, shards[0].number, [*map(len, shards)], runs))
    return segments


def to_runs(numbers: Tensor) -> list[int]:
    """
    >>> to_runs(torch.tensor([4, 5, 6, 9]))
    [4, 3, 9, 1]
    """
    starts = torch.cat([torch.zeros(1, dtype=torch.long), 1 + (numbers.diff() != 1).nonzero()[:, 0]])
    counts = torch.diff(starts, append=torch.tensor([len(numbers)]))
    return torch.stack([numbers[starts], counts], 1).flatten().tolist()


def _write_shards(
    plan: Sequence[NewShard], home: StorePath, target: Manifest, inputs: BuildInputs | None
) -> None:
    """Write the files that do not exist yet, one shard in memory at a time."""
    new = [(c, shard) for c in range(target.terms) for shard in plan if not shard.is_written]
    if not new:
        return
    (home / layout.SHARDS).mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(home, target, inputs) if target.factors and inputs is not None else None
    with (
        nullcontext() if writer is None else closing(writer),
        console.progress("moving", len(new), unit="shards") as advance,
    ):
        for c, shard in new:
            path = layout.shard_path(home, c, shard.number)
            if not is_valid_shard(path, shard.owner):
                tensors = concatenate([part.read(c, writer) for part in shard.parts])
                write_shard(path, shard.owner, tensors)
            advance(1)


def _sum_covariances(writer: ShardWriter, c: int, rows: list[int]) -> Tensor:
    """Covariances of some examples from the model, in passes of the recorded size."""
    resolved = writer.manifest.resolved
    with torch_threads(resolved.threads):
        run = writer.runner.open_pass(c)
        total = covariances(writer, run, [])
        for part in split_range(range(len(rows)), resolved.pass_size):
            total += covariances(writer, run, rows[part.start : part.stop])
    return total


def _write_probe(home: StorePath, source: IndexReader, after: Manifest, plan: Sequence[NewShard]) -> None:
    """Keep the examples of the probe that are left; without any, take stored features."""
    kept, start = [], 0  # new positions, and rows of the probe
    with suppress(ShardError):
        probe = read_shard(probe_path(source.folder, source.manifest), source.manifest.id)
        for part in (part for shard in plan for part in shard.parts):
            if part.reader is source:
                hits = (probe["where"].unsqueeze(1) == part.positions).nonzero().tolist()
                kept += [(start + position, row) for row, position in hits]
            start += len(part.positions)
    if kept:
        where = torch.tensor([new for new, _ in kept])
        features = probe["features"][[row for _, row in kept]]
    else:
        where = torch.tensor(evenly(after.examples, PROBE_SIZE))
        features = IndexReader(home, after, 0).rows(where)[0]
    write_shard(probe_path(home, after), after.id, {"where": where, "features": features})


# --- merge -------------------------------------------------------------------------------------


def merge(folders: Sequence[StorePath], target: StorePath) -> None:
    """Write all examples of several indexes as a new one; the same call resumes after a kill."""
    if len(folders) < 2:
        raise UndeError(f"{len(folders)} index to merge: expected two or more")
    sources = [_finished_source(folder) for folder in folders]
    for other in sources[1:]:
        _check_alike(sources[0].reader, other.reader)
    _create(sources, target, make_token(MERGE, [source.reader.manifest.id for source in sources]))


def _create(sources: Sequence[Source], target: StorePath, token: str) -> None:
    """Write a new index, unless the target holds this very one."""
    manifests = [source.reader.manifest for source in sources]
    ids, count = _join_ids(sources), sum(m.examples for m in manifests)
    if exists(target / layout.MANIFEST):
        history = Manifest.read(target).history
        if history and history[-1].get("token") == token:
            return
        raise UndeError(f"{target} holds an index already: choose an empty or new folder for the new one")
    layout.prepare(target)
    names = " and ".join(f"{s.reader.manifest.examples} of {s.reader.folder.name}" for s in sources)
    with locked(target, doing="writing"):
        clear_partial(target)
        clear_partial(target / layout.SHARDS)
        entry = make_entry(MERGE, count, count, token, "", names)
        homes = {target / inside[0].reader.folder.name: inside for inside in _fisher_sources(sources)}
        first = sources[0].reader.folder
        if matrices.read(first, manifests[0]):
            write_bytes(target / layout.MATRICES, (first / layout.MATRICES).read_bytes())
        after = rewrite_all(target, homes | {target: sources}, entry, ids)
        create_bytes(target / layout.MANIFEST, after.text())


def _finished_source(folder: StorePath) -> Source:
    reader = IndexReader(folder, Manifest.read(folder), 0)
    check_shards(reader, verify=False)  # each is checked when it is copied
    return Source(reader)


def _fisher_sources(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Gradients with other labels: those that the method needs, and those that all indexes have."""
    stored = [source.reader for source in sources]
    probe = stored[0].method.probe
    kinds = {kind for kind in layout.FISHERS if all(kind in s.fishers for s in stored)}
    for kind in sorted(kinds | ({probe.kind} if isinstance(probe, methods.Fisher) else set())):
        yield [_finished_source(s.fisher(kind).folder) for s in stored]


def _check_alike(first: IndexReader, other: IndexReader) -> None:
    a, b = first.manifest, other.manifest
    if other.folder == first.folder or a.id == b.id:
        raise UndeError(f"{first.folder} and {other.folder} are one index: expected different ones")
    differ = list_differences(a, replace(b, examples=a.examples, data=a.data, ids=a.ids), _OTHER)
    differ += differences(a.task, b.task)
    if a.resolved.coverage != b.resolved.coverage:
        differ.append("which way parameters go")
    if a.resolved.per_checkpoint != b.resolved.per_checkpoint:
        differ.append("whether checkpoints share their random projections")
    if bool(a.ids) != bool(b.ids):
        differ.append(
            f"the ids ({'some' if a.ids else 'none'} there, {'some' if b.ids else 'none'} {_OTHER})"
        )
    if differ:
        raise UndeError(
            f"{other.folder} cannot be merged with {first.folder}, they were not measured alike. What differs: "
            f"{'; '.join(differ)}. Append the examples of one to the other instead"
        )


def _join_ids(sources: Sequence[Source]) -> list[Any] | None:
    ids = [i for source in sources for i in read_ids(source.reader.folder, source.reader.manifest) or ()]
    twice = [i for i, n in Counter(ids).items() if n > 1]
    if twice:
        raise UndeError(
            f"{len(twice)} ids are in more than one of the indexes, such as {twice[0]!r}: remove them from one of them"
        )
    return ids or None
