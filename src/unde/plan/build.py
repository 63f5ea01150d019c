"""What a build says before it starts: what it takes on disk, and which way each parameter goes."""

from __future__ import annotations

from collections import Counter

from unde.build.context import Context
from unde.console import line, size
from unde.features.factors import gathered
from unde.store.codec import codec
from unde.store.manifest import Manifest

HEADER = 500  # bytes of a shard's header, about


def index_bytes(manifest: Manifest) -> int:
    """Bytes on disk of a finished index."""
    per_example = 4 * len(manifest.units) + 13  # squared norms; loss, digest, skipped
    stored = codec(manifest.store_dtype).nbytes(manifest.examples, manifest.columns)
    shards = (HEADER + _factor_bytes(manifest)) * len(manifest.shards)
    return (stored + manifest.examples * per_example + shards) * manifest.terms


def _factor_bytes(manifest: Manifest) -> int:
    """The covariances in each shard, where there are any."""
    if not manifest.factors:
        return 0
    sizes = gathered(manifest.units, manifest.method["projection"])
    return 4 * sum(r * r + c * c for r, c in sizes.values())


def show_build(context: Context, missing: int) -> None:
    """What is going to be built, what it takes, and which way each parameter goes."""
    m, terms = context.manifest, context.manifest.terms
    line(
        f"{context.folder}: {m.examples:,} examples × {m.width:,} features "
        f"({len(m.units)} parameters in {len(m.groups)} groups"
        + (f", {terms} checkpoints" if terms > 1 else "")
        + f"), {size(index_bytes(m))} on disk in {m.store_dtype}, {terms * len(m.shards)} shards",
        style="bold",
    )
    if missing < m.examples * terms:
        line(f"  going on: {missing:,} of {m.examples * terms:,} are still to do")
    coverage = context.coverage(0)
    rules = Counter(type(use.rule).__name__ for use in coverage.uses if use.layout)
    ways = [f"{n} × {name}" for name, n in rules.most_common()]
    line(f"  by layer rules: {', '.join(ways) or 'none'}; {m.settled.pass_size} examples in a pass")
    for way, names in (
        ("by one copy for each example", list(coverage.expanded)),
        ("by torch.func.vmap", coverage.vmapped),
        ("by one backward pass for each example (slow)", coverage.looped),
        ("no gradient on the examples tried", coverage.unused),
    ):
        if names:
            line(f"  {way}: {', '.join(names)}")
