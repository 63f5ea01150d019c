"""What a build says before it starts: what it takes on disk, and which way each parameter goes."""

from __future__ import annotations

from collections import Counter

import torch

from unde.console import counted, line, size
from unde.index.feature_runner import FeatureRunner
from unde.index.kernel_cache import costs, sizes_of
from unde.index.shard_writer import on_disk
from unde.methods import Fisher
from unde.store.manifest import Manifest


def index_bytes(manifest: Manifest, precision: torch.dtype = torch.float32) -> int:
    """Bytes on disk of the shards of a finished index."""
    return sum(on_disk(manifest, precision).values())


def show_build(runner: FeatureRunner, missing: int) -> None:
    """What is going to be built, what it takes, and which way each parameter goes."""
    m, terms = runner.manifest, runner.manifest.terms
    precision = runner.units[0].projection.dtype
    sizes = sizes_of(m, precision)
    kernel = sum(costs(m, runner.method.kernel.on(sizes), sizes).disk.values())
    line(
        f"{runner.folder}: {counted(m.examples, 'example')} × {counted(m.width, 'feature')} "
        f"({counted(len(m.units), 'parameter')} in {counted(len(m.groups), 'group')}"
        + (f", {terms} {_terms(runner)}" if terms > 1 else "")
        + f"), {size(index_bytes(m, precision))} on disk in {m.store_dtype}, "
        + counted(terms * len(m.shards), "shard")
        + (f"; its kernel will take {size(kernel)} more" if kernel else ""),
        style="bold",
    )
    if missing < m.examples * terms:
        line(f"  going on: {missing:,} of {m.examples * terms:,} are still to do")
    coverage = runner.coverage(0)
    rules = Counter(type(use.rule).__name__ for use in coverage.uses if use.layout)
    ways = [f"{n} × {name}" for name, n in rules.most_common()]
    line(
        f"  by layer rules: {', '.join(ways) or 'none'}; {counted(m.settled.pass_size, 'example')} in a pass"
    )
    for way, names in (
        ("by one copy for each example", list(coverage.expanded)),
        ("by torch.func.vmap", coverage.vmapped),
        ("by one backward pass for each example (slow)", coverage.looped),
        ("no gradient on the examples tried", coverage.unused),
    ):
        if names:
            line(f"  {way}: {', '.join(names)}")


def _terms(runner: FeatureRunner) -> str:
    """What several features of an example are of."""
    if isinstance(runner.method, Fisher) and runner.method.labels > 1:
        return "checkpoints and labels" if len(runner.manifest.models) > 1 else "labels"
    return "checkpoints" if len(runner.manifest.models) > 1 else "steps"
