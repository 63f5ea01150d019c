"""An index made of shards that are there and of new ones: its manifest, its ids, its probe, and when they count."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unde.data import evenly
from unde.fingerprints import fingerprint_of, ids_fingerprint
from unde.index import repack
from unde.index.build_settings import write_ids
from unde.index.changing import Change, homes
from unde.index.reader import Stored
from unde.index.repack import Again, Origin, Planned
from unde.index.shard_writer import ShardWriter
from unde.index.validation import PROBED, probe_of
from unde.parallel.model_transport import BuildInputs
from unde.store import layout
from unde.store.living import Living, Piece
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, read_shard, write_shard

Plans = Callable[[StorePath, Manifest], list[Planned]]  # the shards of an index after a change
Entry = dict[str, Any]
_FIELDS = {"fisher": layout.FISHERS["sampled"], "true": layout.FISHERS["true"]}  # of Living


def renew(
    change: Change, entry: Entry, ids: Sequence[Any] | None, plans: Plans, given: BuildInputs | None
) -> None:
    """Write what is new of the index, and of the gradients with other labels; then make it the index. `given` is
    what covariances are computed from once more, if need be."""
    fishers: dict[str, Manifest] = {}
    for home, of in reversed([*homes(change.folder, change.before)]):
        plan = plans(home, of)
        used = (n for shard in plan for take in shard.takes for n, _ in take.origin.manifest.files)
        plan = repack.numbered(plan, home, change.token, 1 + max(used))
        with _again(home, of, given) as again:
            repack.write(plan, home, of.terms, again)
        history = [*(of.living.history if of.living is not None else ()), entry]
        index = home == change.folder  # the last
        after = written(home, Origin(home, of), plan, history, ids, fishers if index else {})
        if index:
            change.commit(after)
        else:
            fishers[home.name] = after


def written(
    home: StorePath,
    origin: Origin,
    plan: Sequence[Planned],
    history: list[Entry],
    ids: Sequence[Any] | None,
    fishers: Mapping[str, Manifest],
    packed: Manifest | None = None,
) -> Manifest:
    """All that belongs to the new state of `origin` beside its shards, but for the manifest, which is returned; where
    features are stored in another way, as `packed` says. `fishers` are the manifests of gradients with other labels, by
    the name of their folder."""
    of = origin.manifest if packed is None else packed
    living = Living(
        origin=origin.manifest.lineage,
        built=of.examples if of.living is None else of.living.built,
        generation=of.generation + 1,
        pieces=repack.pieces(plan),
        history=history,
        **{field: fishers[name].as_dict() for field, name in _FIELDS.items() if name in fishers},
    )
    after = replace(
        of,
        examples=sum(shard.count for shard in plan),
        data=fingerprint_of(_digests(home, plan)),
        ids=ids_fingerprint(ids),
        settled=replace(of.settled, shard_size=max(of.settled.shard_size, *(shard.count for shard in plan))),
        living=living,
    )
    _write_probe(home, origin, after, plan)
    write_ids(home, ids, after.generation)
    return after


def part(of: Manifest, change: Change, given: BuildInputs, ids: Sequence[Any] | None) -> Manifest:
    """New examples as an index of their own, whose files are in the same folder: the first fill up its last shard."""
    count, size = len(given.rows), of.settled.shard_size
    room = size - (of.shards[-1].stop - of.shards[-1].start)
    rows = [min(room, count)] if room else []
    while sum(rows) < count:
        rows.append(min(size, count - sum(rows)))
    piece = Piece(change.token, change.first, rows, [1 + max(of.drawn), count])
    living = Living(of.lineage, of.examples, of.generation + 1, [piece], [])
    return replace(of, examples=count, data=given.data, ids=ids_fingerprint(ids), living=living)


@contextmanager
def _again(home: StorePath, of: Manifest, given: BuildInputs | None) -> Generator[Again | None]:
    """Who computes covariances once more."""
    if given is None or not of.factors:
        yield None
        return
    writer = ShardWriter(home, of, given)
    try:
        yield repack.computed_again(writer)
    finally:
        writer.close()


def _digests(home: StorePath, plan: Sequence[Planned]) -> Tensor:
    files = ((layout.shard(home, 0, shard.number), shard.owner) for shard in plan)
    return torch.cat([read_shard(path, owner, verify=False)["digest"].clone() for path, owner in files])


def _write_probe(home: StorePath, origin: Origin, after: Manifest, plan: Sequence[Planned]) -> None:
    """What is left of it; where nothing is, features as they are stored."""
    before = origin.manifest
    try:
        noted = read_shard(probe_of(origin.folder, before), before.id)
        where, features = _moved(noted["where"], before, plan), noted["features"]
    except ShardError:
        where = features = torch.empty(0)
    left = (where >= 0).nonzero()[:, 0]
    if len(left):
        where, features = where[left], features[left]
    else:
        where = torch.tensor(evenly(after.examples, PROBED))
        features = Stored(home, after, 0).rows(where)[0]
    write_shard(probe_of(home, after), after.id, {"where": where, "features": features})


def _moved(where: Tensor, before: Manifest, plan: Sequence[Planned]) -> Tensor:
    """Where examples are now, -1 where they are no more."""
    out, start = torch.full_like(where, -1), 0
    for take in (take for shard in plan for take in shard.takes):
        if take.origin.manifest is before:
            hits = (where.unsqueeze(1) == take.where).nonzero()
            out[hits[:, 0]] = start + hits[:, 1]
        start += take.count
    return out
