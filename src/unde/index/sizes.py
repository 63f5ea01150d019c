"""Sizes of an index before it is built, from shapes alone: of its files, and of what memory must hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unde import methods, projection
from unde.checkpoints import resolve_checkpoint_weights
from unde.data import Rows
from unde.gradients import placement
from unde.gradients.factors import factor_sizes, length
from unde.gradients.feature_pass import SHARE
from unde.gradients.parameters import find_tables
from unde.gradients.whitening import (
    count_matrices,
    rounds_of_whitening,
    whitening_memory,
)
from unde.groups import Groups
from unde.index.kernel_cache import MOMENTS
from unde.index.projection_matrices import resolve_labels
from unde.index.reader import FeatureSource, IndexReader, shard_tensors
from unde.kernels.base import BoundKernel, FeatureLayout
from unde.kernels.precision import could_refuse
from unde.methods import DEFAULT_DAMPING, TRAK, Damped, Fisher, Method
from unde.projection import WHOLE, Spec, feature_size
from unde.store import factored, layout
from unde.store.codec import Int8
from unde.store.manifest import SCHEMA, Manifest, ResolvedSettings
from unde.store.shards import MAPPED, file_bytes
from unde.tasks.base import Task

UNMEASURED = 8  # examples in a pass, where none was run: shards are cut by it
PASS_GRADIENTS = 4  # whole gradients that a pass holds for each example, in float32
EXACT = 2**28  # bytes up to which "auto" stores float32
SHARD_BYTES = 2**24  # of a shard in float32
SHARD_SHARE = 8  # a shard may take one in so many of the memory budget: it is joined, packed and written
WHOLE_SHARE = 4  # the same for whole gradients, which are packed pass by pass
COVARIANCE_SHARE = 40  # float32 gradients in a shard take so many times its covariances: a tenth in int8
SHARD_PASSES = 64  # at most this much work is lost to a kill
HELD = 4  # whole gradients that memory must hold: queries are asked by theirs


@dataclass(frozen=True)
class IndexSizes:
    """What is known of an index that is not built yet, but for its method.

    Args:
        rows: Data to count labels on; None where there is none, or no weights.
        store_dtype: As in `Index.build`.
        memory: The budget in bytes, which cuts shards.
    """

    model: nn.Module
    task: Task
    rows: Rows | None
    names: Sequence[str]  # of the parameters
    examples: int
    checkpoints: int = 1
    groups: Groups = field(default_factory=lambda: Groups({}))
    store_dtype: str = factored.AUTO
    memory: int = 2 * 10**9

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        parameters = dict(self.model.named_parameters())
        return {name: tuple(parameters[name].shape) for name in self.names}

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def width(self, projection: str) -> int:
        """Numbers in a feature."""
        spec = Spec.parse(projection)
        return sum(feature_size(spec, shape) for shape in self.shapes.values())

    def parts(self, method: Method) -> list[Method]:
        """What is measured: for the index, and with other labels where the kernel is made of those."""
        probe = method.probe
        if isinstance(probe, Fisher) and not probe.labels:
            if self.rows is None:  # where no model can tell
                probe = replace(probe, labels=1)
            else:
                probe = resolve_labels(probe, self.model, self.task, self.rows)
        return [method] if probe is None else [method, probe]

    def manifest(self, method: Method, part: Method, pass_size: int) -> Manifest:
        """The manifest that a build for `method` would write for one of its `parts`, without fingerprints."""
        projection = str(part.projection)
        store_dtype = factored.resolve(self.store_dtype, projection)
        if store_dtype == factored.AUTO:
            terms = self.checkpoints * method.steps
            store_dtype = choose_store_dtype(method, self.examples, self.width(projection), terms)
        draft = draft_manifest(
            part,
            self.task,
            self.examples,
            self.groups,
            store_dtype=store_dtype,
            units=self._units(Spec.parse(projection)),
            models=[""] * self.checkpoints,
            checkpoint_weights=resolve_checkpoint_weights(None, self.checkpoints, part.terms),
            resolved=ResolvedSettings(pass_size, pass_size, torch.get_num_threads()),
        )
        shard_size = choose_shard_size(draft, self.memory)
        return replace(draft, resolved=replace(draft.resolved, shard_size=shard_size))

    def _units(self, spec: Spec) -> list[dict[str, Any]]:
        parameters = dict(self.model.named_parameters())
        tables = find_tables(self.model) if spec.kind in WHOLE else set()
        return [
            {"name": name, "shape": list(shape), "size": feature_size(spec, shape)}
            | ({"lookup": True} if id(parameters[name]) in tables else {})
            for name, shape in self.shapes.items()
        ]

    def usual_pass(self, projection: str) -> int:
        """Examples in a pass where none was run."""
        if Spec.parse(projection).kind not in WHOLE:
            return UNMEASURED
        return max(1, min(UNMEASURED, self.memory // (SHARE * 4 * PASS_GRADIENTS * self.parameters)))

    def files(self, method: Method, pass_size: int | None = None) -> IndexFiles:
        """The files of an index for `method`."""
        pass_size = pass_size or self.usual_pass(str(method.projection))
        drafts = [self.manifest(method, part, pass_size) for part in self.parts(method)]
        return IndexFiles(method, drafts[0], drafts[-1], placement(self.model)[1])

    def sample_passes(self, m: Manifest) -> int:
        """Passes over a sample before the index is begun, for the rounds of whitening."""
        if not methods.parse(m.method).whitened:
            return 0
        return len(rounds_of_whitening(m.units, self.memory, m.resolved.pass_size))

    def memory_of(self, files: IndexFiles) -> int:
        """Bytes that building these features and fitting their kernel take, at least."""
        kernel = files.bound.needs().memory
        if Spec.parse(str(files.method.projection)).kind not in WHOLE:
            return kernel
        gradients = 4 * HELD * self.parameters
        if not files.method.whitened:
            return max(gradients, kernel)
        matrices = 4 * count_matrices(files.index.units)
        return max(gradients, whitening_memory(files.index.units) + (matrices if matrices <= MAPPED else 0))


@dataclass(frozen=True)
class IndexFiles:
    """The files of an index that is not built yet."""

    method: Method
    index: Manifest
    labelled: Manifest  # of the gradients that the kernel is made of; `index` itself in general
    precision: torch.dtype

    @cached_property
    def bound(self) -> BoundKernel:
        return self.method.kernel.bind(sizes_of(self.labelled))

    @cached_property
    def bytes(self) -> dict[str, int]:
        """By what is in them."""
        sizes = shard_bytes(self.index, self.precision)
        if self.labelled is not self.index:
            sizes["gradients with other labels"] = sum(shard_bytes(self.labelled, self.precision).values())
        if self.method.whitened:
            sizes["whitening"] = 4 * count_matrices(self.index.units)
        return sizes | kernel_files(self.index, self.bound)

    @property
    def features(self) -> int:
        """Bytes of the features alone, which are quickly told."""
        return self.index.terms * self.index.codec.nbytes(self.index.examples, self.index.columns)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


# --- files ------------------------------------------------------------------------------------------------------


def covariance_bytes(m: Manifest) -> int:
    """Bytes of the covariances in each shard."""
    return 4 * length(factor_sizes(m.units, str(m.method["projection"]))) if m.factors else 0


def shard_bytes(m: Manifest, precision: torch.dtype) -> dict[str, int]:
    """Bytes of all shards, by what is in them."""
    features = m.terms * m.codec.nbytes(m.examples, m.columns)
    whole = covariances = 0
    for rows, count in Counter(r.stop - r.start for r in m.shards).items():
        tensors = shard_tensors(m, rows, precision)
        whole += count * sum(
            file_bytes(tensors, layout.shard_path(Path(), c, 0).name) for c in range(m.terms)
        )
        covariances += count * m.terms * (tensors["factors"].nbytes if m.factors else 0)
    sizes = {"features": features, "norms, losses, digests": whole - features - covariances}
    return sizes | ({"covariances": covariances} if m.factors else {})


def sizes_of(m: Manifest) -> FeatureLayout:
    """The features of an index as kernels see them."""
    return FeatureSource(IndexReader(Path(), m, 0), 0).sizes


def kernel_files(m: Manifest, bound: BoundKernel) -> dict[str, int]:
    """Bytes on disk of a kernel of the index `m`: its moments, and K g(n) where K mixes all columns."""
    moments = bound.needs().moments
    fits = 1 if methods.parse(m.method).steps > 1 else m.terms  # one for the mean of all steps
    sizes = {"moments of the kernel": fits * file_bytes(moments, MOMENTS)} if moments else {}
    if bound.blocks is None:
        sizes["K g(n)"] = m.terms * sum(_row_file(m, r.stop - r.start) for r in m.shards)
    return sizes


def _row_file(m: Manifest, rows: int) -> int:
    """Bytes of a file of K g(n)."""
    layouts = m.codec.layout(rows, m.columns)
    packed = {name: torch.empty(shape, dtype=t, device="meta") for name, (shape, t) in layouts.items()}
    return file_bytes(packed, f"{0:06d}.safetensors")


# --- what a build decides by sizes -----------------------------------------------------------------------------


def draft_manifest(method: Method, task: Task, examples: int, groups: Groups, **options: Any) -> Manifest:
    """A manifest without units, fingerprints and resolved settings, but for those in `options`."""
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "projection_version": projection.VERSION,
        "method": method.describe(),
        "task": task.identity(),
        "examples": examples,
        "groups": {k: list(v) for k, v in groups.members.items()},
        "factors": method.factors,
    }
    fields |= {"seed": 0, "on_bad": "error", "units": [], "data": "", "ids": "", "matrices": ""}
    return Manifest(**(fields | options))


def choose_store_dtype(method: Method, examples: int, width: int, terms: int = 1) -> str:
    """The precision that "auto" is: small stores keep every digit, and so do those that the kernel of the method may
    refuse in int8. Others are a quarter of the size, at no loss of LDS that could be measured (docs/results.md).

    >>> choose_store_dtype(TRAK(), 1_000, 16_384), choose_store_dtype(TRAK(), 50_000, 16_384)
    ('float32', 'int8')
    >>> choose_store_dtype(TRAK(), 5_000, 65_536)
    'float32'
    """
    if 4 * examples * width * terms <= EXACT:
        return "float32"
    if not isinstance(method, Damped):
        return "int8"
    whole = isinstance(method, TRAK)  # others invert by layer, or parameter
    wide = max(1.0, width / max(1, examples)) if whole else 1.0
    safe = method.relative and method.number >= DEFAULT_DAMPING
    return "int8" if safe and not could_refuse(Int8.rounding, method.number, wide) else "float32"


def choose_shard_size(m: Manifest, memory: int) -> int:
    """Examples in a shard: a whole number of passes, so that a resumed build runs the very same passes.

    Shards of whole gradients are larger: each holds covariances too, which are as large as several gradients.
    """
    size, most = m.resolved.pass_size, min(SHARD_BYTES, memory // SHARD_SHARE)
    each = 4 * m.width
    if Spec.parse(str(m.method["projection"])).kind in WHOLE:
        each, most = min(each, 4 * m.codec.nbytes(1, m.columns)), memory // WHOLE_SHARE
        most = max(SHARD_BYTES, min(most, COVARIANCE_SHARE * covariance_bytes(m)))
        most = min(most, memory // WHOLE_SHARE)
    return size * min(max(1, most // max(1, size * each)), SHARD_PASSES)
