"""The manifest of an index: a JSON file with its request, its resolved settings, and its segments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

from unde import projection
from unde.errors import OtherIndex, UndeError
from unde.groups import Groups
from unde.store import manifest_schema as bounds
from unde.store.codec import Codec
from unde.store.factored import codec_of
from unde.store.files import checksum, create_bytes, read_json
from unde.store.layout import FISHERS, MANIFEST, refuse_links, shard_path
from unde.store.remote import StorePath, Unreachable, exists

SCHEMA = 4
APPEND, REMOVE, MERGE = "append", "remove", "merge"
_SUMMED = {APPEND: "appended", REMOVE: "removed"}
_FILES = 10**9  # numbers that names of shards have room for


_LATER = (
    "device",
    "per_checkpoint",
)  # fields of `ResolvedSettings` that are left out at their default, so that ids are stable


@dataclass(frozen=True)
class ResolvedSettings:
    """Sizes and choices that the last bits of features depend on: decided by the first build, read by later ones."""

    pass_size: int  # examples that go through the model together
    shard_size: int  # examples in a shard, a whole number of passes
    threads: int | None  # of torch, for each job; None: as they come
    coverage: list[dict[str, Any]] | None = None  # for each checkpoint: which way each parameter goes
    rows: int | None = None  # rows in a pass where a task makes several of an example
    directions: list[int | None] | None = None  # the same two for the passes of whitening
    device: str | None = None  # the kind of device that computed; None: the CPU
    per_checkpoint: bool = False  # whether each checkpoint has other random projections


@dataclass(frozen=True)
class Segment:
    """Neighbouring shards that one build or one change wrote, in files numbered one after the other."""

    owner: str  # written into each file
    first: int  # number of the first file
    rows: list[int]  # examples in each shard
    numbers: list[int]  # which labels are drawn by, as runs: first, count, first, count, …

    def runs(self) -> Iterator[tuple[int, int]]:
        return zip(self.numbers[::2], self.numbers[1::2])

    def check(self) -> None:
        """Raise a ValueError if no index can have such a segment."""
        kinds = isinstance(self.owner, str) and all(bounds.is_count(n) for n in self.rows)
        starts = all(type(at) is int and 0 <= at <= bounds.MOST for at in self.numbers[::2])
        if not kinds or not starts or not all(bounds.is_count(n) for n in self.numbers[1::2]):
            raise ValueError("a segment is not of the right kind")
        if len(self.numbers) % 2 or sum(self.numbers[1::2]) != sum(self.rows):
            raise ValueError("a segment has numbers for more or fewer examples than it holds")
        if type(self.first) is not int or not 0 <= self.first <= _FILES - len(self.rows):
            raise ValueError(f"a file is numbered {self.first}")


@dataclass(frozen=True)
class Changes:
    """Segments and history of an index that was changed since it was built.

    `fishers` has the manifests of gradients with other labels, by folder: they are replaced together with this one.
    """

    origin: str  # id that the index was built under
    build_examples: int  # number of examples that it was built on; the whitening is theirs
    segments: list[Segment]
    history: list[dict[str, Any]]  # what, examples, left, on, token, before, from
    fishers: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Changes:
        parsed: dict[str, Any] = {**fields, "segments": [Segment(**s) for s in fields["segments"]]}
        return cls(**parsed)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "segments": [dict(vars(s)) for s in self.segments]}

    @property
    def summary(self) -> str:
        """
        >>> entries = [{"what": "append", "examples": 3}, {"what": "append", "examples": 2}]
        >>> Changes("", 9, [], entries).summary
        'appended 5'
        """
        texts = [f"merged from {entry['from']}" for entry in self.history if entry["what"] == MERGE]
        for what, verb in _SUMMED.items():
            if count := sum(entry["examples"] for entry in self.history if entry["what"] == what):
                texts.append(f"{verb} {count}")
        return ", ".join(texts)

    @property
    def lines(self) -> list[str]:
        """The history, one line for each change."""
        words = {what: f"{verb} {{examples}}" for what, verb in _SUMMED.items()}
        words[MERGE] = "merged from {from}"
        line = "{} on {on}, {left} examples since then"
        return [line.format(words[entry["what"]].format(**entry), **entry) for entry in self.history]

    def check(self, examples: int, most: int, terms: int) -> None:
        """Raise a ValueError if it cannot be that of an index of so many examples in shards of at most `most`."""
        if not self.segments or not self.history or not bounds.is_count(self.build_examples):
            raise ValueError("it was changed, and does not say how")
        for segment in self.segments:
            segment.check()
        counts = [n for segment in self.segments for n in segment.rows]
        if max(counts) > most or sum(counts) != examples:
            raise ValueError(f"shards of {sum(counts)} examples for {examples}")
        if len(counts) * terms > bounds.SHARDS:
            raise ValueError(f"{len(counts):,} shards under {terms} checkpoints are too many files")
        if len({s.first + i for s in self.segments for i in range(len(s.rows))}) < len(counts):
            raise ValueError("two shards have one file")
        if not isinstance(self.origin, str):
            raise ValueError("its origin is not of the right kind")
        _ = self.summary, self.lines, [entry.get("token") for entry in self.history]


@dataclass(frozen=True)
class Manifest:
    schema: int
    projection_version: int
    method: dict[str, Any]
    task: dict[str, Any]  # Task.identity()
    examples: int
    store_dtype: str
    seed: int
    on_bad: str
    units: list[dict[str, Any]]  # name, shape, size; in model order
    groups: dict[str, list[str]]
    models: list[str]  # a fingerprint for each checkpoint
    checkpoint_weights: list[float]
    data: str  # fingerprint of the sampled examples
    ids: str  # fingerprint of the user's ids, or ""
    factors: bool  # whether shards hold the covariances that EKFAC is made of
    matrices: str  # fingerprint of the matrices that are not drawn (whitening, second moments), or ""
    resolved: ResolvedSettings
    changes: Changes | None = None  # since it was built

    @cached_property
    def id(self) -> str:
        return _id(self.as_dict())

    @property
    def lineage(self) -> str:
        """Id of the build, which appending and removing keep: features of queries belong to it."""
        return self.id if self.changes is None else self.changes.origin

    @property
    def history(self) -> list[dict[str, Any]]:
        return [] if self.changes is None else self.changes.history

    @property
    def generation(self) -> int:
        """Number of changes since the build."""
        return len(self.history)

    @property
    def terms(self) -> int:
        """Number of checkpoints, or of steps of a trajectory."""
        return len(self.checkpoint_weights)

    @property
    def width(self) -> int:
        return sum(u["size"] for u in self.units)

    @cached_property
    def columns(self) -> list[slice]:
        """Columns of each parameter in a feature."""
        out, start = [], 0
        for u in self.units:
            out.append(slice(start, start + u["size"]))
            start += u["size"]
        return out

    @cached_property
    def codec(self) -> Codec:
        """Encoding of the features."""
        return codec_of(self.store_dtype, self.units, str(self.method["projection"]))

    @cached_property
    def segments(self) -> list[Segment]:
        if self.changes is not None:
            return self.changes.segments
        step = self.resolved.shard_size
        rows = [min(step, self.examples - start) for start in range(0, self.examples, step)]
        return [Segment(self.id, 0, rows, [0, self.examples])]

    @cached_property
    def shards(self) -> list[slice]:
        """The rows of each shard."""
        counts = [n for segment in self.segments for n in segment.rows]
        return [slice(stop - n, stop) for n, stop in zip(counts, accumulate(counts))]

    @cached_property
    def files(self) -> list[tuple[int, str]]:
        """The number of the file of each shard, and its owner."""
        return [(s.first + i, s.owner) for s in self.segments for i in range(len(s.rows))]

    def shard(self, folder: StorePath, checkpoint: int, s: int) -> StorePath:
        """Path of the file of shard s."""
        return shard_path(folder, checkpoint, self.files[s][0])

    @cached_property
    def numbers(self) -> Sequence[int]:
        """The number of each example, which tasks draw labels by: its position when it was measured."""
        if self.changes is None:
            return range(self.examples)
        return [n for s in self.segments for first, count in s.runs() for n in range(first, first + count)]

    @property
    def unit_names(self) -> list[str]:
        return [u["name"] for u in self.units]

    def as_groups(self) -> Groups:
        return Groups({k: tuple(v) for k, v in self.groups.items()})

    def as_dict(self) -> dict[str, Any]:
        resolved = {k: v for k, v in vars(self.resolved).items() if k not in _LATER or v}
        out = request_fields(self) | {"resolved": resolved}
        return out if self.changes is None else out | {"changes": self.changes.as_dict()}

    def text(self) -> bytes:
        """Content of the file."""
        return (json.dumps({"id": self.id} | self.as_dict(), indent=1) + "\n").encode()

    def begin(self, folder: StorePath) -> Manifest:
        """Write the manifest, unless another process wrote one meanwhile; return the one on disk."""
        create_bytes(folder / MANIFEST, self.text())
        return Manifest.read(folder)

    @classmethod
    def read(cls, folder: StorePath) -> Manifest:
        path = folder / MANIFEST
        refuse_links(folder)
        if folder.name in FISHERS.values() and (inside := _read_fisher(folder)) is not None:
            return inside
        content = _read_json(path)
        if not isinstance(content, dict) or not {"schema", "id"} <= set(content):
            raise UndeError(f"{path} is not the manifest of an unde index: choose another folder")
        if content["schema"] != SCHEMA:
            raise OtherIndex(
                f"{folder} was written with index schema {content['schema']}, this release reads {SCHEMA}: "
                "build it anew with overwrite=True (--overwrite), or install the release of unde that wrote it"
            )
        if content.get("projection_version") != projection.VERSION:
            raise OtherIndex(
                f"{folder} was projected with version {content.get('projection_version')} of the random "
                f"matrices, this release draws {projection.VERSION}: scores would be noise. Build the index "
                "anew with overwrite=True (--overwrite)"
            )
        if content.pop("id") != _id(content):
            raise damaged(path, "its content does not match its id")
        try:
            return _parse(content)
        except (TypeError, KeyError, ValueError, AttributeError) as e:
            raise damaged(path, e) from None


def _read_fisher(folder: StorePath) -> Manifest | None:
    """The manifest of gradients with other labels that the manifest of a changed index holds."""
    try:
        above = Manifest.read(folder.parent) if exists(folder.parent / MANIFEST) else None
    except Unreachable:
        raise
    except UndeError:
        return None
    fields = None if above is None or above.changes is None else above.changes.fishers.get(folder.name)
    return None if fields is None else _parse(fields)


def _parse(content: Mapping[str, Any]) -> Manifest:
    fields: dict[str, Any] = {**content, "resolved": ResolvedSettings(**content["resolved"])}
    if fields.get("changes") is not None:
        fields["changes"] = Changes.parse(fields["changes"])
    manifest = Manifest(**fields)
    bounds.check(manifest.as_dict())
    if manifest.changes is not None:
        manifest.changes.check(manifest.examples, manifest.resolved.shard_size, manifest.terms)
        for inside in manifest.changes.fishers.values():
            _parse(inside)
    return manifest


def _id(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content))


def _read_json(path: StorePath) -> Any:
    try:
        return read_json(path)
    except Unreachable:
        raise
    except FileNotFoundError:
        raise UndeError(
            f"{path.parent} holds no unde index: there is no {MANIFEST} in it. Build one with unde build or Index.build"
        ) from None
    except ValueError as e:
        raise damaged(path, e) from None
    except OSError as e:
        raise UndeError(f"cannot read {path} ({e.strerror})") from None


def damaged(path: StorePath, why: object) -> UndeError:
    return UndeError(
        f"{path} is damaged ({why}): delete this file and run the same Index.build again, which keeps all "
        "sound shards"
    )


def request_fields(manifest: Manifest) -> dict[str, Any]:
    """Fields of the request: a resumed build compares them."""
    return {
        f.name: getattr(manifest, f.name) for f in fields(manifest) if f.name not in ("resolved", "changes")
    }
