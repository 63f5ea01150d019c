"""Shards made of rows of other shards: what is stored is moved, or packed anew, and nothing is computed again.

A plan is a list of shards in their order, each of which takes rows of one or several that are there. One that takes
all rows of a single shard in the same folder stays the file that it is. All that a shard holds is kept by row, but for
the covariances of EKFAC: these are sums, which add up where shards are joined. Where rows leave a shard, the
covariances of these rows are computed once more and taken from the sum, or those of the rest, if that is less work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unde import console
from unde.gradients.feature_pass import cuts, threads
from unde.index.shard_writer import Shapes, ShardWriter, covariances
from unde.store import layout
from unde.store.living import Piece, runs
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import sound, write_shard

FACTORS = "factors"
Again = Callable[[int, Sequence[int]], Tensor]  # covariances of some examples under a checkpoint


@dataclass(frozen=True)
class Origin:
    """An index, or a part of one, whose shards are read."""

    folder: StorePath
    manifest: Manifest

    @cached_property
    def shapes(self) -> Shapes:
        return Shapes(self.manifest)

    @cached_property
    def drawn(self) -> Tensor:
        return torch.tensor(self.manifest.drawn)

    def read(self, c: int, s: int) -> dict[str, Tensor]:
        """Checked to the last byte: it will be written under a new checksum."""
        return self.shapes.read(self.manifest.shard(self.folder, c, s))


@dataclass(frozen=True)
class Take:
    """The rows of a shard that are kept; None: all of them."""

    origin: Origin
    s: int
    rows: Tensor | None = None

    @property
    def where(self) -> Tensor:
        """Their positions in the index that they are of."""
        at = self.origin.manifest.shards[self.s]
        return torch.arange(at.start, at.stop) if self.rows is None else self.rows + at.start

    @property
    def count(self) -> int:
        at = self.origin.manifest.shards[self.s]
        return at.stop - at.start if self.rows is None else len(self.rows)


@dataclass(frozen=True)
class Planned:
    """A shard of the new index, and the number and owner of its file."""

    takes: tuple[Take, ...]
    number: int = -1
    owner: str = ""
    stays: bool = False  # the file is there

    @property
    def count(self) -> int:
        return sum(take.count for take in self.takes)

    @property
    def drawn(self) -> Tensor:
        return torch.cat([take.origin.drawn[take.where] for take in self.takes])


def all_of(origin: Origin) -> list[Planned]:
    return [Planned((Take(origin, s),)) for s in range(len(origin.manifest.shards))]


def without(origin: Origin, gone: Tensor) -> list[Planned]:
    """The shards without the examples that are `gone` (N,) bool; neighbours of which little is left are joined."""
    out: list[Planned] = []
    touched = False  # whether the last one is written anew anyway
    size = origin.manifest.settled.shard_size
    for s, at in enumerate(origin.manifest.shards):
        left = (~gone[at]).nonzero()[:, 0]
        whole = len(left) == at.stop - at.start
        if not len(left):
            continue
        take = Take(origin, s, None if whole else left)
        if out and touched and out[-1].count + take.count <= size:
            out[-1] = Planned((*out[-1].takes, take))
            continue
        out.append(Planned((take,)))
        touched = not whole
    return out


def joined(before: list[Planned], more: list[Planned], size: int) -> list[Planned]:
    """One after the other; the last shard of those before takes the first of the others in, if it has room."""
    if before and more and before[-1].count + more[0].count <= size:
        both = Planned((*before[-1].takes, *more[0].takes))
        return [*before[:-1], both, *more[1:]]
    return [*before, *more]


def numbered(plan: list[Planned], folder: StorePath, owner: str, first: int) -> list[Planned]:
    """With files: those that stay as they are, and new ones of `owner` numbered from `first` on."""
    out = []
    for shard in plan:
        [take, *others] = shard.takes
        if not others and take.rows is None and take.origin.folder == folder:
            out.append(Planned(shard.takes, *take.origin.manifest.files[take.s], stays=True))
        else:
            out.append(Planned(shard.takes, first, owner))
            first += 1
    return out


def pieces(plan: Sequence[Planned]) -> list[Piece]:
    """As a manifest has them."""
    found: list[tuple[Piece, list[Tensor]]] = []
    for shard in plan:
        last = found[-1][0] if found else None
        if last is None or last.owner != shard.owner or last.first + len(last.rows) != shard.number:
            last = Piece(shard.owner, shard.number, [], [])
            found.append((last, []))
        last.rows.append(shard.count)
        found[-1][1].append(shard.drawn)
    return [Piece(p.owner, p.first, p.rows, runs(torch.cat(drawn))) for p, drawn in found]


def write(
    plan: Sequence[Planned],
    folder: StorePath,
    terms: int,
    again: Again | None = None,
    packed: Manifest | None = None,
) -> None:
    """The files that are not there yet, one shard in memory at a time; with features as those of `packed` are."""
    new = [(c, shard) for c in range(terms) for shard in plan if not shard.stays]
    if not new:
        return
    (folder / layout.SHARDS).mkdir(parents=True, exist_ok=True)
    with console.progress("moving", len(new), unit="shards") as advance:
        for c, shard in new:
            path = layout.shard(folder, c, shard.number)
            if not sound(path, shard.owner):
                made = _made(shard, c, again)
                if packed is not None:
                    made = _packed_anew(made, shard.takes[0].origin.manifest, packed)
                write_shard(path, shard.owner, made)
            advance(1)


def _made(shard: Planned, c: int, again: Again | None) -> dict[str, Tensor]:
    parts = [_taken(take, c, again) for take in shard.takes]
    whole = {n: torch.cat([part[n] for part in parts]) for n in parts[0] if n != FACTORS}
    if FACTORS in parts[0]:
        whole[FACTORS] = torch.stack([part[FACTORS] for part in parts]).sum(0)
    return whole


def _packed_anew(shard: dict[str, Tensor], before: Manifest, after: Manifest) -> dict[str, Tensor]:
    """The same rows under another codec."""
    stored = before.codec.layout(1, before.columns)
    features = before.codec.unpack({name: shard[name] for name in stored}, before.columns)
    beside = {name: t for name, t in shard.items() if name not in stored}
    return beside | after.codec.pack(features, after.columns)


def _taken(take: Take, c: int, again: Again | None) -> dict[str, Tensor]:
    found = take.origin.read(c, take.s)
    if take.rows is None:
        return found
    out = {name: t.index_select(0, take.rows) for name, t in found.items() if name != FACTORS}
    if FACTORS in found:
        assert again is not None
        out[FACTORS] = _sum_of(take, c, found, again)
    return out


def _sum_of(take: Take, c: int, found: Mapping[str, Tensor], again: Again) -> Tensor:
    """The covariances of the rows that are kept. Examples that were skipped are in no sum."""
    assert take.rows is not None
    kept = torch.zeros(len(found["digest"]), dtype=torch.bool)
    kept[take.rows] = True
    counts = ~found["skipped"].bool()
    start = take.origin.manifest.shards[take.s].start
    inside, outside = (start + (counts & which).nonzero()[:, 0] for which in (kept, ~kept))
    if not len(outside):
        return found[FACTORS].clone()
    if len(inside) <= len(outside):
        return again(c, inside.tolist())
    return found[FACTORS] - again(c, outside.tolist())


def computed_again(writer: ShardWriter) -> Again:
    """Covariances from the model itself, in passes as they were settled."""
    settled = writer.manifest.settled

    def of(c: int, rows: Sequence[int]) -> Tensor:
        with threads(settled.threads):
            run = writer.runner.open_pass(c)
            parts = (covariances(writer, run, part) for part in _passes(rows, settled.pass_size))
            return sum(parts, start=covariances(writer, run, []))

    return of


def _passes(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (rows[part.start : part.stop] for part in cuts(range(len(rows)), size))
