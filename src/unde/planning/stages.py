"""What an index takes on disk, and what the stages after the features take in memory and operations.

These follow from sizes alone, in the way the code of each stage allocates; tests compare them with real runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from unde.console import HEADER
from unde.features.factors import gathered
from unde.features.units import Unit
from unde.groups import Groups
from unde.index.build import shard_size
from unde.index.training import KEPT
from unde.kernels import EKFACKernel, Gram, Part
from unde.kernels.ekfac import EXACT
from unde.kernels.gram import _ILL, layer_columns
from unde.methods import Method

Bytes = dict[str, int]


@dataclass(frozen=True)
class Run:
    """The sizes that all else follows from."""

    method: Method
    units: list[Unit]
    groups: Groups
    examples: int
    batch_size: int
    store_dtype: str
    checkpoints: int
    queries: int
    memory: int  # the budget
    given: int = 0  # bytes of projection matrices that are not drawn

    @property
    def width(self) -> int:
        return self.units[-1].stop

    @property
    def shard(self) -> int:
        """Examples in a shard."""
        return min(self.examples, shard_size(self.batch_size, self.width))

    @property
    def shards(self) -> int:
        return -(-self.examples // self.shard)

    @property
    def item(self) -> int:
        return 4 if self.store_dtype == "float32" else 2

    @property
    def block(self) -> int:
        """Bytes of a shard's features as they are read, in float32."""
        return 4 * self.shard * self.width

    @property
    def raw(self) -> int:
        """What is in memory besides while a shard is read: its features as they are stored."""
        return 0 if self.item == 4 else self.item * self.shard * self.width

    @property
    def covariances(self) -> int:
        """Floats in the two covariances of every parameter that has them."""
        described = [{"name": u.name, "shape": u.shape} for u in self.units]
        sizes = gathered(described, str(self.method.projection))
        return sum(r * r + c * c for r, c in sizes.values())


def disk(run: Run) -> Bytes:
    rows, per_shard = run.examples * run.checkpoints, run.shards * run.checkpoints
    exponents = rows * len(run.units) if run.store_dtype == "float16" else 0
    features = rows * run.width * run.item + exponents
    found = {
        "features": features,
        "norms, losses, digests": rows * (4 * (len(run.units) + len(run.method.also)) + 13)
        + HEADER * per_shard,
        "manifest": _manifest(run),
    }
    if run.method.factors:
        floats = run.units[0].projection.dtype.itemsize
        found["covariances"] = floats * run.covariances * per_shard
    if getattr(run.method, "fisher", None) == "sampled":
        found["gradients with sampled labels"] = sum(found.values())
    if run.given:
        found["directions"] = run.given
    if run.method.kernel is not None:
        found["kernel applied"] = features + HEADER * per_shard
    return found


def _manifest(run: Run) -> int:
    units = [{"name": u.name, "shape": u.shape, "size": u.stop - u.start} for u in run.units]
    listed = json.dumps({"units": units, "groups": dict(run.groups.members)}, indent=1)
    return len(listed) + 450 + 80 * run.checkpoints


def shard_buffers(run: Run) -> int:
    """Beside a pass: the batches of the shard before it, and the last shard, which is being written."""
    stored = run.item * run.shard * run.width
    writing = run.block + run.raw + 2 * stored  # safetensors makes the file twice in memory
    return run.block - 4 * run.batch_size * run.width + (writing if run.shards > 1 else 0)


# --- the kernel -------------------------------------------------------------------------------------------


def kernel(run: Run) -> tuple[Bytes, int]:
    """Peak bytes of making K g(n), and its operations."""
    k = run.method.kernel
    if isinstance(k, Gram):
        made, flops = _gram_by_layer(run, k) if k.blocks == "layer" else _gram(run, k)
    elif isinstance(k, EKFACKernel):
        made, flops = _ekfac(run)
    else:
        return {}, 0
    matrices, peak = made
    return {"matrices": matrices, "blocks of features": peak - matrices}, flops * run.checkpoints


def kernel_needs(run: Run) -> int:
    """What the kernel asks of the memory budget."""
    k = run.method.kernel
    if isinstance(k, Gram) and k.blocks == "layer":
        squares = [d * d for d in _layers(run)]
        return 8 * (sum(squares) + max(squares))
    if isinstance(k, Gram):
        return 16 * _side(run, k) ** 2
    return _spectra(run)[0] + 16 * run.width if isinstance(k, EKFACKernel) else 0


Peak = tuple[int, int]  # bytes of matrices, and of all at once


def _gram(run: Run, k: Gram) -> tuple[Peak, int]:
    side, n, d = _side(run, k), run.examples, run.width
    item, left = _precision(k, d), run.memory - 8 * side**2
    rows = _fitting(run, left // 4)
    gram, inverse = 8 * side**2, (8 + item) * side**2 if item == 4 else 8 * side**2
    if side == d:
        moments = [
            gram + _reading(run, rows, item),
            gram + item * (rows * d + d * d),  # a product of blocks
            inverse,
            item * d * d + _applying(run, item=item),
        ]
        passes = 4 if item == 4 else 6  # in float64 the products are made anew
        return (gram, max(moments)), passes * n * d * d + d**3
    total = _fitting(run, left)  # rows of the result that are made in one pass over the features
    moments = [
        gram + _reading(run, rows, item),
        gram + item * rows * d + run.block + run.raw,  # blocks two by two
        gram + item * (rows + run.shard) * d + item * rows * run.shard,
        gram + item * rows * d + (item + 8) * rows * run.shard,
        inverse,
        item * (side**2 + total * d * (1 if total == n else 2)) + run.block + run.raw,
    ]
    runs = -(-n // rows)
    half = n * n * d * (runs + 1) // runs  # of two equal triangles one is computed, by blocks
    return (gram, max(moments)), (half if item == 4 else 2 * half) + 2 * n * n * d + n**3


def _gram_by_layer(run: Run, k: Gram) -> tuple[Peak, int]:
    sides = _layers(run)
    squares, item = sum(d * d for d in sides), _precision(k, max(sides))
    rows = _fitting(run, run.memory - kernel_needs(run))
    gram = 8 * squares
    moments = [
        gram + _reading(run, rows, item),
        gram + item * (rows * run.width + max(sides) ** 2),
        gram + (4 * squares if item == 4 else 0),  # the inverses in the precision that they are used in
        item * squares + _applying(run, working=2 * item * run.shard * max(sides)),
    ]
    passes = 4 if item == 4 else 6
    return (gram, max(moments)), passes * run.examples * squares + sum(d**3 for d in sides)


def _ekfac(run: Run) -> tuple[Peak, int]:
    spectra, flops = _spectra(run)
    matrices = spectra + 8 * run.width + 8 * run.covariances
    largest = max(u.stop - u.start for u in run.units)
    rotating = 3 * 4 * run.shard * largest
    return (matrices, matrices + _applying(run, working=rotating)), run.examples * flops


def _spectra(run: Run) -> tuple[int, int]:
    """Bytes of eigenvectors and moments, and operations for each example: rotated for the eigenvalues, then
    rotated and turned back to apply them."""
    described = [{"name": u.name, "shape": u.shape} for u in run.units]
    sizes = gathered(described, str(run.method.projection))
    held = flops = 0
    for u in run.units:
        size = u.stop - u.start
        if u.name in sizes:
            r, c = sizes[u.name]
            held += 4 * (r * r + c * c)
            flops += 3 * 2 * size * (r + c)
        elif size <= EXACT:
            held += 16 * size**2
            flops += 3 * 2 * size**2
    return held, flops


def _side(run: Run, k: Gram) -> int:
    primal = k.form == "primal" or (k.form == "auto" and run.width <= run.examples)
    return run.width if primal else run.examples


def _layers(run: Run) -> list[int]:
    """Features of each layer."""
    layers = layer_columns([Part(u.name, u.columns) for u in run.units])
    return [sum(c.stop - c.start for c in columns) for columns in layers.values()]


def _precision(k: Gram, d: int) -> int:
    """Bytes of a float in the precision that may be needed. With relative damping ‖ΦᵀΦ‖/λ is at most d/damping."""
    return 8 if not k.relative or d > _ILL * k.damping else 4


def _fitting(run: Run, memory: int) -> int:
    """Rows that are read together: whole shards."""
    fit = max(0, memory) // (16 * run.width) // run.shard * run.shard
    return min(run.examples, max(run.shard, fit))


def _reading(run: Run, rows: int, item: int) -> int:
    """Rows are read and joined while those before them are still there."""
    before = item * rows * run.width if rows < run.examples else 0
    joined = 4 * rows * run.width
    now = run.block + run.raw if rows <= run.shard else 2 * joined
    converted = 0 if item == 4 else joined + 8 * rows * run.width
    return before + max(now, converted)


def _applying(run: Run, working: int = 0, item: int = 4) -> int:
    """A block is read while the one before it, and what was made of that, are still there; then it is worked on."""
    if item == 8:  # both converted, there and back
        return (4 if run.shards == 1 else 7) * run.block
    return max(run.raw, working) + (2 if run.shards == 1 else 3) * run.block


# --- scores and weights -----------------------------------------------------------------------------------


def scoring(run: Run) -> Bytes:
    """All scores of the queries at once, as `total` gives them."""
    together = min(run.queries, max(1, run.memory // (16 * run.shard)))
    return {
        "query features, weighted too": 2 * 4 * run.checkpoints * run.queries * run.width,
        "blocks of features": _blocks(run),
        "scores": 4 * run.queries * run.examples + max(run.raw, 4 * together * run.shard),
    }


def learning(run: Run) -> Bytes:
    """Weights by the default solver."""
    n, m, q = run.examples, len(run.groups), run.queries
    each = 4 * n * m  # the contributions of one query
    kept = q * (each + 8 * m * m) <= run.memory
    together = q if kept else min(q, max(1, run.memory // max(16 * m * m, 8 * m)))
    rows = min(run.shard, max(1, run.memory // (8 * together * m)))
    products = 8 * m * m * (q if 16 * m * m * q <= run.memory else together)
    part = 4 * together * rows * m  # of one block; the next is read while it is there
    reading = max(run.raw + (part if run.shards > 1 else 0), 2 * part)
    # Kept, they are read once, and products of groups are then made of one query after the other.
    held = q * each + max(reading, 2 * each + products) if kept else reading + products + 8 * rows * m
    return {
        "query features": 4 * run.checkpoints * q * run.width,
        "blocks of features": _blocks(run),
        "contributions": held,
    }


def _blocks(run: Run) -> int:
    """All blocks if they are kept, else one while the one before it is still there."""
    if 4 * run.examples * run.width * run.checkpoints <= run.memory // KEPT:
        return 4 * run.checkpoints * run.examples * run.width
    return run.checkpoints * min(2 * run.block, 4 * run.examples * run.width)
