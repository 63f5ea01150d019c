"""Adding up: each stage says what it needs (`needs`, `on_disk` and the like beside its code), for the index that a
build would settle on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from unde import projection
from unde.checkpoints import resolve_checkpoint_weights
from unde.errors import UndeError
from unde.gradients.pca import SAMPLE
from unde.gradients.record import recorded
from unde.groups import Groups
from unde.index import build_settings as settle
from unde.index import kernel_cache as kernels
from unde.index import score_needs as scoring
from unde.index import shard_writer as shards
from unde.index.weight_needs import learning
from unde.kernels import Sizes
from unde.kernels.base import Settled as SettledKernel
from unde.methods import Method
from unde.plan.passes import Measured, Passes
from unde.plan.workers import Reduced, Stage
from unde.store.manifest import SCHEMA, Manifest, Settled
from unde.tasks.base import Task

Bytes = dict[str, int]
_SHA, _BLAKE = "0" * 64, "0" * 32  # digests, of whatever it will be


@dataclass(frozen=True)
class Run:
    """A run that is planned: what is asked for, and the passes it is made of."""

    task: Task
    method: Method
    groups: Groups
    passes: Passes
    examples: int
    store_dtype: str
    checkpoints: int
    queries: int
    memory: int  # the budget

    @property
    def precision(self) -> torch.dtype:
        return self.passes.own.units[0].projection.dtype

    @cached_property
    def index(self) -> Manifest:
        return self._manifest(self.passes.own)

    @cached_property
    def probe(self) -> Manifest | None:
        """The index of the other measurement that the kernel is made of."""
        return None if self.passes.probe is None else self._manifest(self.passes.probe)

    def _manifest(self, found: Measured) -> Manifest:
        """What a build would write, but for digests."""
        sizes = [u.stop - u.start for u in found.units]
        at = self.passes.directions
        return Manifest(
            schema=SCHEMA,
            projection_version=projection.VERSION,
            method=found.method.describe(),
            task=self.task.identity(),
            examples=self.examples,
            store_dtype=self.store_dtype,
            seed=0,
            on_bad="error",
            units=[{"name": u.name, "shape": list(u.shape), "size": n} for u, n in zip(found.units, sizes)],
            groups={k: list(v) for k, v in self.groups.members.items()},
            models=[_SHA] * self.checkpoints,
            checkpoint_weights=resolve_checkpoint_weights(None, self.checkpoints, found.method.terms),
            data=_BLAKE,
            ids="",
            factors=found.method.factors,
            matrices="" if at is None else _SHA,
            settled=Settled(
                pass_size=found.size,
                shard_size=settle.shard_size(found.size, sum(sizes), self.memory),
                threads=torch.get_num_threads(),
                coverage=[recorded(found.coverage)],
                rows=found.rows,
                directions=None if at is None else [at.size, at.rows],
            ),
        )

    # --- the kernel -------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        """What the kernel is made of; parameters whose covariances would all be zero have no sides."""
        found = self.passes.probe or self.passes.own
        whole = kernels.sizes_of(self.probe or self.index, self.precision)
        parts = (p if p.name in found.met else replace(p, sides=None) for p in whole.parts)
        return replace(whole, parts=tuple(parts))

    @cached_property
    def kernel(self) -> SettledKernel:
        return self.method.kernel.on(self.sizes)

    @cached_property
    def costs(self) -> kernels.Costs:
        return kernels.costs(self.index, self.kernel, self.sizes)

    def refused(self) -> str | None:
        """Why the kernel cannot be fitted within the budget, if it cannot."""
        try:
            self.method.kernel.on(kernels.sizes_of(self.probe or self.index, self.precision)).check(
                self.memory
            )
        except UndeError as e:
            return str(e)
        return None


def disk(run: Run) -> Bytes:
    """By kind of file; the log of a build, a line, is left out."""
    at, made = run.passes.directions, {}
    if at is not None:
        made = at.made | {settle.PASSES: torch.empty(2, dtype=torch.int64, device="meta")}
    found = settle.on_disk(run.index, run.precision, made)
    if run.probe is not None:
        probe = settle.on_disk(run.probe, run.precision, {})
        found["gradients with sampled labels"] = sum(probe.values())
    return found | run.costs.disk


def flops(run: Run) -> dict[str, int]:
    """Of the whole run, by pass."""
    passes, own, probe = run.passes, run.passes.own, run.passes.probe
    each = run.examples * run.index.terms
    found = {
        "training": round(passes.plain.flops * run.examples / own.size),
        "frozen": round(passes.frozen.flops * each / own.size),
        "features": round(own.features.flops * each / own.size),
    }
    if probe is not None:
        found["sampled labels"] = round(
            probe.features.flops * run.examples * run.checkpoints * probe.method.terms / probe.size
        )
    if passes.directions is not None:
        sample = min(SAMPLE, run.examples) / passes.directions.size
        found["directions"] = round(passes.directions.cost.flops * sample)
    if run.kernel.rounds:
        found["kernel"] = run.costs.flops
    return found


def work(run: Run) -> list[Stage]:
    """A build and its kernel, stage after stage: who has to wait for what."""
    passes, m, checkpoints = run.passes, run.index, run.checkpoints
    weights = checkpoints * passes.weights
    stages = [
        Stage("settling", model_flops=_settling(run), reads=weights, writes=_settled_files(run), alone=True),
        Stage("start: reads the model", each=True, reads=weights),
        _shards("features", m, passes.own, run.precision),
    ]
    if run.probe is not None and passes.probe is not None:
        stages.append(_shards("features with sampled labels", run.probe, passes.probe, run.precision))
    return [*stages, *_kernel(run)]


def _settling(run: Run) -> int:
    """The check of a few examples, which tells how many there are in a pass and is the probe too, and directions."""
    each = [p for p in (run.passes.own, run.passes.probe) if p is not None]
    return run.checkpoints * sum(p.checking.flops for p in each) + flops(run).get("directions", 0)


def _settled_files(run: Run) -> int:
    return sum(n for name, n in disk(run).items() if name in ("manifest", "probe", "directions"))


def _shards(name: str, m: Manifest, found: Measured, precision: torch.dtype) -> Stage:
    cuts = [r.stop - r.start for r in m.shards]
    return Stage(
        name,
        jobs=m.terms * len(cuts),
        passes=m.terms * sum(-(-rows // found.size) for rows in cuts),
        model_flops=round(found.features.flops * m.examples * m.terms / found.size),
        writes=sum(shards.on_disk(m, precision).values()),
    )


def _kernel(run: Run) -> list[Stage]:
    """Rounds, each merged before the next begins; then K, and K g(n) where that is kept."""
    costs, of = run.costs, run.probe or run.index
    if not run.kernel.rounds:
        return []
    needs, stored = run.kernel.needs(), shards.on_disk(of, run.precision)
    row = (
        stored["features"] // (of.examples * of.terms) * (of.terms // costs.fits)
    )  # of all steps, where averaged
    moments = costs.disk["moments of the kernel"]
    stages = []
    for r in needs.rounds:
        reads = costs.fits * r.rows * row + (stored["covariances"] if r.covariances else 0)
        partial = costs.fits * r.partial if r.jobs > 1 else 0
        jobs, finish = costs.fits * r.jobs, costs.fits * r.finish
        stages.append(
            Stage(f"kernel: {r.name}", jobs, flops=costs.fits * r.flops, reads=reads, writes=partial)
        )
        if partial or finish:
            stages.append(Stage(f"merging {r.name}", flops=finish, reads=partial, alone=True))
    terms = run.index.terms
    stages.append(Stage("K", flops=terms * needs.fit.flops, reads=moments, writes=moments, alone=True))
    if "K g(n)" in costs.disk:
        rows, jobs = costs.rows, terms * len(run.sizes.joined())
        own = stored["features"] if terms > costs.fits else 0  # of each step, K being that of their mean
        reads, written = rows.rows * row + own, costs.disk["K g(n)"]
        stages.append(Stage("K g(n)", jobs, flops=rows.flops, reads=reads, writes=written))
    return stages


def rounds(run: Run) -> list[Reduced]:
    """Of the kernel, where there is something to merge."""
    needs, fits = run.kernel.needs(), run.costs.fits
    return [Reduced(r.name, fits * r.jobs, fits * r.partial) for r in needs.rounds if r.jobs > 1]


def memory(run: Run) -> dict[str, Bytes]:
    """Of each stage at its peak, by what takes it."""
    passes, own = run.passes, run.passes.own
    copies = {"the model's own weights": passes.weights} if run.checkpoints > 1 else {}
    model = {"weights": passes.weights, "projection": own.projection} | copies
    stages = {
        "training with Adam": {
            "weights": passes.weights,
            "moments": 2 * passes.trained,
            "pass": passes.plain.peak,
        },
        "check": model | {"pass": own.checking.peak},
        "features": model | _building(run.index, own, run.precision),
    }
    if run.probe is not None and passes.probe is not None:
        stages["sampled labels"] = model | _building(run.probe, passes.probe, run.precision)
    if passes.directions is not None:
        stages["directions"] = model | {"pass": passes.directions.cost.peak}
    if run.kernel.rounds:
        stages["kernel"] = run.costs.memory
    asked = (run.kernel.blocks, run.costs.held, run.queries, run.memory, run.precision)
    stages["scoring"] = scoring.total(run.index, run.method, *asked)
    return stages | {"weight learning": learning(run.index, run.groups, *asked)}


def _building(m: Manifest, found: Measured, precision: torch.dtype) -> Bytes:
    """Beside the model: a pass, and those of the same shard before it; or the shard, while it is written."""
    running = {"pass": found.features.peak, "passes before it": shards.waiting(m, precision)}
    written = shards.writing(m, precision)
    return running if sum(running.values()) >= written else {"shard being written": written}
