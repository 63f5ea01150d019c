"""The lines that a build prints before it starts: size on disk, and the route of each parameter."""

from __future__ import annotations

from collections import Counter

import torch

from unde.console import counted, line, size
from unde.gradients import Coverage
from unde.index.feature_runner import FeatureRunner
from unde.index.kernel_cache import kernel_files, sizes_of
from unde.index.shard_writer import shard_bytes
from unde.methods import Fisher
from unde.store.manifest import Manifest


def index_bytes(manifest: Manifest, precision: torch.dtype = torch.float32) -> int:
    """Bytes on disk of the shards of a finished index."""
    return sum(shard_bytes(manifest, precision).values())


def print_summary(runner: FeatureRunner, missing: int) -> None:
    """Print what will be built and what it takes; `missing` examples are still to do."""
    m, terms = runner.manifest, runner.manifest.terms
    kernel = sum(kernel_files(m, runner.method.kernel.bind(sizes_of(m))).values())
    line(
        f"{runner.folder}: {counted(m.examples, 'example')} × {counted(m.width, 'feature')} "
        f"({counted(len(m.units), 'parameter')} in {counted(len(m.groups), 'group')}"
        + (f", {terms} {_name_terms(runner)}" if terms > 1 else "")
        + f"), {size(index_bytes(m, runner.units[0].projection.dtype))} on disk in {m.store_dtype}, "
        + counted(terms * len(m.shards), "shard")
        + (f"; its kernel will take {size(kernel)} more" if kernel else ""),
        style="bold",
    )
    if missing < m.examples * terms:
        line(f"  going on: {missing:,} of {m.examples * terms:,} are still to do")
    _print_routes(runner.coverage(0), m.settled.pass_size)


def _print_routes(coverage: Coverage, pass_size: int) -> None:
    rules = Counter(type(hooked.rule).__name__ for hooked in coverage.modules if hooked.layout)
    counts = ", ".join(f"{n} × {name}" for name, n in rules.most_common())
    line(f"  by layer rules: {counts or 'none'}; {counted(pass_size, 'example')} in a pass")
    for route, names in (
        ("by one copy for each example", list(coverage.expanded)),
        ("by torch.func.vmap", coverage.vmapped),
        ("by one backward pass for each example (slow)", coverage.looped),
        ("no gradient on the examples tried", coverage.unused),
    ):
        if names:
            line(f"  {route}: {', '.join(names)}")


def _name_terms(runner: FeatureRunner) -> str:
    """What several features of an example are of."""
    if isinstance(runner.method, Fisher) and runner.method.labels > 1:
        return "checkpoints and labels" if len(runner.manifest.models) > 1 else "labels"
    return "checkpoints" if len(runner.manifest.models) > 1 else "steps"
