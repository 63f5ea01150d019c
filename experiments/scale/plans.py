"""What a setting takes, printed before anything runs: operations, hours of a GPU, disk and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from experiments.scale.study import ALPHA, Stage, Study
from experiments.scale.training import steps_of
from unde.console import size
from unde.plan import Plan
from unde.plan.show import flops


def trained(plan: Plan, setting: Any, unit: str, lds: str) -> list[Stage]:
    """Training on all examples, and on halves for the study `lds`; `plan` has the operations of one pass over all."""
    once, recipe = plan.flops["training"], setting.recipe
    half = int(ALPHA * setting.train)
    return [
        Stage(
            "training",
            recipe.epochs * once,
            f"{recipe.epochs} epochs of {setting.train:,} {unit}, {steps_of(setting.train, recipe):,} steps",
        ),
        Stage(
            "retraining on halves",
            setting.subsets * recipe.epochs * once * half / setting.train,
            f"{setting.subsets} models of {steps_of(half, recipe):,} steps",
            lds,
        ),
    ]


SELF_RETRIEVAL = 740  # queries that `Index.learn_weights` costs


def featured(found: list[Plan], setting: Any, unit: str, methods: int) -> list[Stage]:
    """Features of training data, of queries and of perturbed training examples, and kernels."""
    asked = setting.learn + setting.evaluate
    built = [p for p in found if p.flops["features"]]  # others share the features of one of these
    each = sum(p.flops["features"] / p.examples for p in built)
    stages = [
        Stage(
            "features",
            sum(p.flops["features"] for p in built),
            f"{setting.train:,} {unit} × {len(built)} ind{'ex' if len(built) == 1 else 'exes'}",
        ),
        Stage("query features", each * asked, f"{asked:,} queries"),
        Stage(
            "self-retrieval",
            each / len(built) * SELF_RETRIEVAL * methods,
            f"{methods} methods × about {SELF_RETRIEVAL} perturbed examples",
        ),
    ]
    kernels = sum(p.flops.get("kernel", 0) for p in found)
    return [*stages, Stage("kernels", kernels, "")] if kernels else stages


def text(study: Study, rate: float, wanted: Collection[str]) -> str:
    """What the studies `wanted` take; `rate` is what a GPU sustains, in operations a second."""
    costs, found = study.costs()
    stages = [stage for stage in costs if stage.study in ("", *wanted)]
    total = sum(stage.flops for stage in stages)
    width = max(len(stage.what) for stage in stages)
    lines = [
        f"{study.name}: what it will take, with a device that sustains {rate / 1e12:g} TFLOP/s (--tflops)",
        "",
        *(f"  {what:{width}}  {flops(n):>12}  {_hours(n / rate):>12}  {of}" for what, n, of, _ in stages),
        f"  {'all':{width}}  {flops(total):>12}  {_hours(total / rate):>12}",
        "",
        f"  on disk {size(sum(p.bytes_on_disk for p in found))} of indexes",
        f"  in memory {size(max(p.peak(stage) for p in found for stage in p.memory))} at most",
        "",
    ]
    alike = Counter(map(str, found))
    shown = [f"{count} indexes like this:\n{p}" if count > 1 else p for p, count in alike.items()]
    return "\n".join([*lines, *(f"{p}\n" for p in shown)])


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.1f} GPU h" if hours >= 0.05 else f"{seconds:,.0f} GPU s"
