"""Index reader with a memory budget: features and stored values by shard, by row, or of all examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde import methods
from unde.data import Rows
from unde.devices import CPU, Compute, local, put
from unde.errors import UndeError, unknown
from unde.fingerprints import ids_fingerprint, origins, plain_ids, to_signed_tensor
from unde.gradients.factors import factor_sizes, length, split
from unde.index import projection_matrices
from unde.kernels import FeatureLayout, ParameterColumns
from unde.methods import Method
from unde.store import layout
from unde.store.files import read_json, write_bytes
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, Unreachable, exists, is_local
from unde.store.shards import FileWatch, ShardError, read_shard, report_damage, reread_shard

_SMALL, _LONGEST_ID = 2**20, 2**12  # bytes of the ids of any index, and of an id on average


class IndexReader:
    """The files of an index, the bytes of them that may be in memory, and the device that computes with them."""

    def __init__(
        self, folder: StorePath, manifest: Manifest, memory: int, compute: Compute | None = None
    ) -> None:
        self.folder, self.manifest, self.memory = folder, manifest, memory
        self.compute = compute or Compute(CPU, memory)
        self.worker: tuple[str, int] | None = (
            None  # the device of a worker process, if not the CPU, and its bytes
        )
        self.method: Method = methods.parse(manifest.method)
        self.codec = manifest.codec
        self.watch = FileWatch()
        self._fishers: dict[str, IndexReader] = {}
        self._shapes: dict[int, dict[str, torch.Size]] = {}  # of the tensors in shards of so many rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.manifest, self.memory, self.worker)

    @cached_property
    def paths(self) -> dict[tuple[int, int], StorePath]:
        """The file of every shard, by checkpoint and number."""
        m = self.manifest
        return {(c, s): m.shard(self.folder, c, s) for c in range(m.terms) for s in range(len(m.shards))}

    def record_files(self) -> None:
        """Record the state of valid shards, so that later changes are noticed."""
        self.watch.record(self.paths.values())

    def shard(self, checkpoint: int, s: int) -> dict[str, Tensor]:
        """The tensors of a shard, mapped: keep them for the time of a block only."""
        try:
            return reread_shard(self.paths[checkpoint, s], self.manifest.files[s][1], self.watch)
        except ShardError as e:
            raise self.changed() or e from None

    def changed(self) -> ShardError | None:
        """An error if the index has changed since it was opened, else None."""
        try:
            now = Manifest.read(self.folder)
        except UndeError:
            return None
        if now.id == self.manifest.id:
            return None
        what = "" if now.changes is None else f" ({'; '.join(now.changes.lines)})"
        return ShardError(f"{self.folder} has changed since it was opened{what}: open it again")

    def packed(self, checkpoint: int, s: int) -> dict[str, Tensor]:
        """The tensors of shard s, checked so that they can be unpacked."""
        shard = self.shard(checkpoint, s)
        self.check(self.paths[checkpoint, s], shard, s)
        return shard

    def check(self, path: StorePath, shard: Mapping[str, Tensor], s: int) -> None:
        rows = self.manifest.shards[s]
        with report_damage(path):
            self.codec.check(shard, rows.stop - rows.start, self.manifest.columns)

    def read_checked(self, checkpoint: int, s: int, verify: bool = True) -> dict[str, Tensor]:
        """The tensors of a shard as the manifest describes them; wrong shapes are refused before content is read."""
        path, owner = self.paths[checkpoint, s], self.manifest.files[s][1]
        if verify and is_local(path):
            self._check_shapes(path, s, read_shard(path, owner, False))
        tensors = read_shard(path, owner, verify)
        self._check_shapes(path, s, tensors)
        self.check(path, tensors, s)
        return tensors

    def _check_shapes(self, path: StorePath, s: int, tensors: Mapping[str, Tensor]) -> None:
        rows = self.manifest.shards[s].stop - self.manifest.shards[s].start
        if rows not in self._shapes:
            described = shard_tensors(self.manifest, rows, torch.float32)
            self._shapes[rows] = {name: t.shape for name, t in described.items()}
        wanted = dict(self._shapes[rows])
        for name, t in tensors.items():
            if wanted.pop(name, None) != t.shape:
                raise ShardError(
                    f"shard {path} is damaged: {name!r} of shape {tuple(t.shape)} is not in its plan"
                )
        if wanted:
            raise ShardError(f"shard {path} is damaged: {', '.join(map(repr, wanted))} is not in it")

    def features_of(self, shard: Mapping[str, Tensor], local: Tensor | slice) -> dict[str, Tensor]:
        """What features of some rows of a shard are unpacked from."""
        names = self.codec.layout(1, self.manifest.columns)
        if isinstance(local, slice):
            return {name: shard[name][local] for name in names}
        return {name: shard[name].index_select(0, local) for name in names}

    def block(self, checkpoint: int, s: int) -> Tensor:
        """(n, D) float32 features of shard s, where the index computes: they go up as they are stored."""
        packed = self.features_of(self.packed(checkpoint, s), slice(None))
        there = {name: put(t, self.compute.device) for name, t in packed.items()}
        return self.codec.unpack(there, self.manifest.columns)

    def blocks(self, s: int) -> list[Tensor]:
        """The features of shard s under each checkpoint."""
        return [self.block(c, s) for c in range(self.manifest.terms)]

    def rows(self, which: Tensor) -> Tensor:
        """(C, n, D) float32 features of the training examples `which`, from the shards that hold them."""
        out = torch.empty(self.manifest.terms, len(which), self.manifest.width)
        for s, rows in enumerate(self.manifest.shards):
            here = ((which >= rows.start) & (which < rows.stop)).nonzero()[:, 0]
            for c in range(self.manifest.terms) if len(here) else ():
                packed = self.features_of(self.packed(c, s), which[here] - rows.start)
                out[c].index_copy_(0, here, self.codec.unpack(packed, self.manifest.columns))
        return out

    def values(self, name: str, checkpoint: int = 0) -> Tensor:
        """A stored value of every example: "loss", "skipped", "digest" (N,), "squares" (N, parameters), and "beside"
        (N, ·), the extra measures of the method."""
        known = ("loss", "squares", "skipped", "digest", *["beside"] * bool(self.method.extra_measures))
        if name not in known:
            raise unknown("stored value", name, known)
        shards = (self.shard(checkpoint, s) for s in range(len(self.manifest.shards)))
        # a view would keep its whole file mapped
        return torch.cat([shard[name].clone() for shard in shards])

    @cached_property
    def skipped(self) -> Tensor:
        """(N,) bool: examples that were left out because of NaN gradients."""
        flags = [self.values("skipped", c).bool() for c in range(self.manifest.terms)]
        return torch.stack(flags).any(0)

    @cached_property
    def squares(self) -> Tensor:
        """(N, U) squared norms of features, summed over checkpoints with η."""
        etas = self.manifest.checkpoint_weights
        return torch.stack([eta * self.values("squares", c) for c, eta in enumerate(etas)]).sum(0)

    def find_digests(self, digests: Sequence[str]) -> list[int]:
        """Positions of the digests that are those of training examples; "" is none of them."""
        parts = [(i, part) for i, d in enumerate(digests) for part in origins([d]) if part]
        wanted = to_signed_tensor(part for _, part in parts)
        matches = torch.isin(wanted, self.values("digest")).nonzero()[:, 0].tolist()
        return sorted({parts[i][0] for i in matches})

    @property
    def fishers(self) -> tuple[str, ...]:
        """The values of `fisher` that kernels on this index can have."""
        kinds = [k for k, name in layout.FISHERS.items() if exists(self.folder / name / layout.MANIFEST)]
        return ("empirical", *kinds)

    def fisher(self, kind: str) -> IndexReader:
        """The gradients with "sampled" labels or with every label ("true"), of the same model and data."""
        if kind in self._fishers:
            return self._fishers[kind]
        folder = self.folder / layout.FISHERS[kind]
        if not exists(folder / layout.MANIFEST):
            what = "sampled labels" if kind == "sampled" else "every label"
            raise UndeError(
                f"{self.folder} holds no gradients with {what}: build it with EKFAC(fisher={kind!r}), or add them with "
                f"index.add_fisher({kind!r})"
            )
        manifest = Manifest.read(folder)
        if not belongs(manifest, self.manifest):
            raise UndeError(
                f"{folder} is of another index: delete that folder and run the same Index.build again"
            )
        self._fishers[kind] = IndexReader(folder, manifest, self.memory, self.compute)
        self._fishers[kind].worker = self.worker
        return self._fishers[kind]

    def source(self, kernel_of: str, checkpoint: int) -> FeatureSource:
        """Features that a kernel is fitted to; those of all steps of a trajectory averaged."""
        stored = self if kernel_of == "empirical" or self.method.whitened else self.fisher(kernel_of)
        return FeatureSource(stored, None if stored.method.steps > 1 else checkpoint)


def _reopen(
    folder: StorePath, manifest: Manifest, memory: int, worker: tuple[str, int] | None
) -> IndexReader:
    """In a worker process, which computes on a device of its own."""
    if worker is None:
        return IndexReader(folder, manifest, memory)
    return IndexReader(folder, manifest, memory, Compute(torch.device(local(worker[0])), worker[1]))


def belongs(fisher: Manifest, manifest: Manifest) -> bool:
    """Whether a Fisher index has the model, task and data of `manifest`."""
    names = ("task", "examples", "units", "models", "data", "seed", "matrices")
    same = all(getattr(fisher, name) == getattr(manifest, name) for name in names)
    return same and fisher.method["name"] == methods.Fisher.name


@dataclass(frozen=True)
class FeatureSource:
    """Features under one checkpoint, or averaged over all (None), as kernels read them.

    Where examples have several labels, the rows of the first label come first, then those of the second.
    """

    stored: IndexReader
    checkpoint: int | None

    @cached_property
    def sizes(self) -> FeatureLayout:
        m = self.stored.manifest
        sides = factor_sizes(m.units, str(self.stored.method.projection)) if m.factors else {}
        parts = [ParameterColumns(name, c, sides.get(name)) for name, c in zip(m.unit_names, m.columns)]
        stored, n = self.stored.codec, m.examples
        cuts = [slice(i * n + r.start, i * n + r.stop) for i in range(self._labels) for r in m.shards]
        return FeatureLayout(
            tuple(parts),
            tuple(cuts),
            rounding=stored.rounding,
            lossy=stored.lossy,
            labels=self._labels,
            whitened=self.stored.method.whitened,
        )

    @property
    def device(self) -> torch.device:
        return self.stored.compute.device

    @property
    def _labels(self) -> int:
        method = self.stored.method
        return method.labels if isinstance(method, methods.Fisher) else 1

    def _place(self, s: int) -> tuple[int, int]:
        """The term and the shard of a block."""
        label, shard = divmod(s, len(self.stored.manifest.shards))
        return (self.checkpoint or 0) * self._labels + label, shard

    def block(self, s: int) -> Tensor:
        if self.checkpoint is None:
            return torch.stack(self.stored.blocks(s)).mean(0)
        return self.stored.block(*self._place(s))

    def whitening(self) -> dict[str, tuple[Tensor, float]]:
        return projection_matrices.whitening(self.stored.folder, self.stored.manifest)

    def factors(self, s: int) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        m = self.stored.manifest
        if not m.factors:
            raise UndeError(
                f"{self.stored.folder} holds no covariances, which EKFAC is made of: build it with method='ekfac' "
                "(all other methods can be scored on such an index too)"
            )
        vector = put(self.stored.shard(*self._place(s))["factors"], self.device)
        return split(vector, factor_sizes(m.units, str(self.stored.method.projection)))


def check_shards(reader: IndexReader, verify: bool) -> None:
    """Raise unless every shard is there, whole and at its place; one is in memory at a time.

    Remote shards are fetched only to verify checksums; without `verify` each is checked when it is first read.
    """
    written = layout.list_names(reader.folder / layout.SHARDS)
    missing = [path.name for path in reader.paths.values() if path.name not in written]
    if missing:
        raise ShardError(
            f"{reader.folder} is not finished: {len(missing)} of {len(reader.paths)} shards are missing "
            f"({', '.join(missing[:5])}{', …' if missing[5:] else ''}). "
            "Run the same Index.build again to finish it"
        )
    problems = []
    for c, s in reader.paths if verify or is_local(reader.folder) else ():
        try:
            reader.read_checked(c, s, verify)
        except ShardError as e:
            problems.append(str(e))
    if problems:
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ShardError(
            f"{'; '.join(problems[:5])}{more}. Run the same Index.build again to repair the index"
        )


def read_ids(folder: StorePath, manifest: Manifest) -> list[Any] | None:
    """The user's ids; a file that is far too long for the number of examples is not read."""
    if not manifest.ids:
        return None
    path = folder / layout.versioned_name(layout.IDS, manifest.generation)
    try:
        ids = read_json(path, max(_SMALL, _LONGEST_ID * manifest.examples))
        if not isinstance(ids, list) or len(ids) != manifest.examples:
            ids = []
    except Unreachable:
        raise
    except (OSError, ValueError):
        ids = []
    if ids_fingerprint(ids) != manifest.ids:
        raise UndeError(f"{path} is missing or damaged: run the same Index.build again to repair it")
    return ids


def parse_ids(rows: Rows, ids: Sequence[Any] | None) -> list[Any] | None:
    """The ids as plain values, by default those in `ids` of the data; raises unless there is one for each example."""
    if ids is None:
        ids = getattr(rows.data, "ids", None)
        if (
            not isinstance(ids, list)
            or len(ids) != len(rows)
            or not all(isinstance(i, (str, int)) for i in ids)
        ):
            return None
    values = plain_ids(ids)
    if len(values) != len(rows):
        raise UndeError(f"{len(values)} ids for {len(rows)} examples: expected one for each")
    return values


def write_ids(folder: StorePath, ids: Sequence[Any] | None, generation: int = 0) -> None:
    if ids is not None:
        path = folder / layout.versioned_name(layout.IDS, generation)
        write_bytes(path, (json.dumps(list(ids)) + "\n").encode())


def shard_tensors(m: Manifest, rows: int, precision: torch.dtype) -> dict[str, Tensor]:
    """The tensors in the file of a shard with so many rows, on the meta device; features have `precision`."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = m.codec.layout(rows, m.columns)
    tensors = {name: empty(*shape, dtype=dtype) for name, (shape, dtype) in packed.items()} | {
        "squares": empty(rows, len(m.units)),
        "loss": empty(rows),
        "skipped": empty(rows, dtype=torch.uint8),
        "digest": empty(rows, dtype=torch.int64),
    }
    if beside := methods.parse(m.method).extra_measures:
        tensors["beside"] = empty(rows, len(beside))
    if m.factors:
        sizes = factor_sizes(m.units, m.method["projection"])
        tensors["factors"] = empty(length(sizes), dtype=precision)
    return tensors
