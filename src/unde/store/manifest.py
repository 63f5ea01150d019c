"""The manifest: one JSON file that says what an index holds, what it was made from, and what was settled for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from unde import projection
from unde.errors import UndeError
from unde.groups import Groups
from unde.store import manifest_schema as bounds
from unde.store.codec import Codec
from unde.store.factored import codec_of
from unde.store.files import create_bytes
from unde.store.layout import FISHERS, MANIFEST, refuse_links, shard
from unde.store.living import Living
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.safe_io import read_json

SCHEMA = 4


@dataclass(frozen=True)
class Settled:
    """What the last bits of features depend on, decided once; whoever goes on with a build takes it from here."""

    pass_size: int  # examples that go through the model together
    shard_size: int  # examples in a shard, a whole number of passes
    threads: int | None  # of torch, for each job; None: as they come
    coverage: list[dict[str, Any]] | None = None  # for each checkpoint: which way each parameter goes
    rows: int | None = None  # rows in a pass where a task makes several of an example
    directions: list[int | None] | None = None  # the same two for the pass that finds pca directions

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


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
    matrices: str  # fingerprint of the matrices that are not drawn (pca, second moments), or ""
    settled: Settled
    living: Living | None = None  # what became of it since it was built

    @cached_property
    def id(self) -> str:
        return _id(self.as_dict())

    @property
    def lineage(self) -> str:
        """The id that stays when examples are appended or removed: that of what all of it was measured with."""
        return self.id if self.living is None else self.living.origin

    @property
    def generation(self) -> int:
        """How often it was changed since it was built."""
        return 0 if self.living is None else self.living.generation

    @property
    def terms(self) -> int:
        """How many terms the sum over c has: checkpoints, or steps of a trajectory."""
        return len(self.checkpoint_weights)

    @property
    def width(self) -> int:
        return sum(u["size"] for u in self.units)

    @cached_property
    def columns(self) -> list[slice]:
        """Of each parameter, in a feature."""
        out, start = [], 0
        for u in self.units:
            out.append(slice(start, start + u["size"]))
            start += u["size"]
        return out

    @cached_property
    def codec(self) -> Codec:
        """How features are stored."""
        return codec_of(self.store_dtype, self.units, str(self.method["projection"]))

    @cached_property
    def shards(self) -> list[slice]:
        """The rows of each shard."""
        if self.living is not None:
            return self.living.cuts
        step = self.settled.shard_size
        return [slice(a, min(a + step, self.examples)) for a in range(0, self.examples, step)]

    @cached_property
    def files(self) -> list[tuple[int, str]]:
        """The number of the file of each shard, and whose it is."""
        if self.living is not None:
            return self.living.files
        return [(s, self.id) for s in range(len(self.shards))]

    def shard(self, folder: StorePath, checkpoint: int, s: int) -> StorePath:
        """The file of shard s."""
        return shard(folder, checkpoint, self.files[s][0])

    @cached_property
    def drawn(self) -> Sequence[int]:
        """The number under which each example was measured, which tasks may draw labels by: its position, unless
        examples before it were removed."""
        return range(self.examples) if self.living is None else self.living.drawn.tolist()

    @property
    def unit_names(self) -> list[str]:
        return [u["name"] for u in self.units]

    def as_groups(self) -> Groups:
        return Groups({k: tuple(v) for k, v in self.groups.items()})

    def as_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("settled", "living")}
        out["settled"] = self.settled.as_dict()
        return out if self.living is None else out | {"living": self.living.as_dict()}

    def text(self) -> bytes:
        """As it is written."""
        return (json.dumps({"id": self.id} | self.as_dict(), indent=1) + "\n").encode()

    def begin(self, folder: StorePath) -> Manifest:
        """Write it, unless another began an index there meanwhile; the one that is there."""
        create_bytes(folder / MANIFEST, self.text())
        return Manifest.read(folder)

    @classmethod
    def read(cls, folder: StorePath) -> Manifest:
        path = folder / MANIFEST
        refuse_links(folder)
        if folder.name in FISHERS.values() and (inside := _of_living(folder)) is not None:
            return inside
        found = _read_json(path)
        if not isinstance(found, dict) or not {"schema", "id"} <= set(found):
            raise UndeError(f"{path} is not the manifest of an unde index: choose another folder")
        if found["schema"] != SCHEMA:
            raise UndeError(
                f"{folder} was written with index schema {found['schema']}, this release reads {SCHEMA}: "
                "rebuild it, or install the release of unde that wrote it"
            )
        if found.get("projection_version") != projection.VERSION:
            raise UndeError(
                f"{folder} was projected with version {found.get('projection_version')} of the random "
                f"matrices, this release draws {projection.VERSION}: scores would be noise. Rebuild the index"
            )
        if found.pop("id") != _id(found):
            raise damaged(path, "its content does not match its id")
        try:
            return _parsed(found)
        except (TypeError, KeyError, ValueError, AttributeError) as e:
            raise damaged(path, e) from None


def _of_living(folder: StorePath) -> Manifest | None:
    """The manifest of the gradients with other labels of an index that was changed, which its own holds: both change
    in one moment."""
    try:
        above = Manifest.read(folder.parent) if exists(folder.parent / MANIFEST) else None
    except Unreachable:
        raise
    except UndeError:
        return None  # of a damaged one nothing is known
    held = {} if above is None or above.living is None else above.living.fishers
    found = {FISHERS[kind]: manifest for kind, manifest in held.items()}.get(folder.name)
    return None if found is None else _parsed(found)


def _parsed(found: Mapping[str, Any]) -> Manifest:
    fields: dict[str, Any] = {**found, "settled": Settled(**found["settled"])}
    if fields.get("living") is not None:
        fields["living"] = Living.parsed(fields["living"])
    made = Manifest(**fields)
    bounds.check(made.as_dict())
    if made.living is not None:
        made.living.check(made.examples, made.settled.shard_size, made.terms)
        for inside in made.living.fishers.values():
            _parsed(inside)
    return made


def _id(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _read_json(path: StorePath) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise UndeError(
            f"{path.parent} holds no unde index: there is no {MANIFEST} in it. Build one with Index.build"
        ) from None
    except Unreachable:
        raise
    except ValueError as e:
        raise damaged(path, e) from None
    except OSError as e:
        raise UndeError(f"cannot read {path} ({e.strerror})") from None


def damaged(path: StorePath, why: object) -> UndeError:
    return UndeError(
        f"{path} is damaged ({why}): delete this file and run the same Index.build again, which keeps all "
        "sound shards"
    )


def asked(manifest: Manifest) -> dict[str, Any]:
    """What was asked for, without what was settled for it: by this a build finds its folder again."""
    return {
        f.name: getattr(manifest, f.name) for f in fields(manifest) if f.name not in ("settled", "living")
    }


def with_method(manifest: Manifest, method: dict[str, Any]) -> Manifest:
    """The same index under another measurement."""
    return replace(manifest, method=method)
