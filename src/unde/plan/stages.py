"""What an index takes on disk, and what the stages after the features take in memory and operations.

These follow from sizes alone, in the way the code of each stage allocates; tests compare them with real runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from unde.build.kernels import KEPT
from unde.build.settle import shard_size
from unde.features.factors import gathered
from unde.features.units import Unit
from unde.groups import Groups
from unde.kernels import Part, Sizes
from unde.kernels.base import Settled
from unde.methods import Method
from unde.plan.build import HEADER

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
    def terms(self) -> int:
        return self.checkpoints * self.method.steps

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
    rows, per_shard = run.examples * run.terms, run.shards * run.terms
    exponents = rows * len(run.units) if run.store_dtype == "float16" else 0
    features = rows * run.width * run.item + exponents
    found = {
        "features": features,
        "norms, losses, digests": rows * (4 * (len(run.units) + len(run.method.beside)) + 13)
        + HEADER * per_shard,
        "manifest": _manifest(run),
    }
    if run.method.factors:
        floats = run.units[0].projection.dtype.itemsize
        found["covariances"] = floats * run.covariances * per_shard
    if run.method.probe is not None:
        found["gradients with sampled labels"] = sum(found.values())
    if run.given:
        found["directions"] = run.given
    fitted = settled(run)
    for name, size in fitted.needs().disk.items():
        found[f"kernel, {name}"] = size * run.terms
    if fitted.blocks is None:
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


def settled(run: Run) -> Settled:
    """The kernel of the method on the sizes of the run."""
    sides = gathered([{"name": u.name, "shape": u.shape} for u in run.units], str(run.method.projection))
    sides = sides if run.method.factors else {}
    parts = tuple(Part(u.name, u.columns, sides.get(u.name)) for u in run.units)
    cuts = tuple(slice(a, min(a + run.shard, run.examples)) for a in range(0, run.examples, run.shard))
    return run.method.kernel.on(Sizes(parts, cuts))


def kernel(run: Run) -> tuple[Bytes, int]:
    """Peak bytes of fitting the kernel, and its operations."""
    needs = settled(run).needs()
    return {
        "matrices": needs.matrices,
        "blocks of features": needs.peak - needs.matrices,
    }, needs.flops * run.terms


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
