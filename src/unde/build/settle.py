"""From a model, a task and data to an index on disk: what is asked for is checked and settled, then built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unde import methods, projection
from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.features import Unit, make_units, moments, pca
from unde.groups import Groups, trainable
from unde.index import given
from unde.index import manifest as mf
from unde.index.build import Builder, shard_size
from unde.index.checkpoints import Checkpoint, fingerprints, loaded, settled_weights
from unde.index.folder import FISHER
from unde.index.store import DTYPES
from unde.methods import Method
from unde.projection import Spec
from unde.tasks.base import Task


@dataclass
class Making:
    """One index to be made; `run` makes what of it is missing."""

    model: nn.Module
    task: Task
    rows: Rows
    method: Method
    batch_size: int
    store_dtype: str
    seed: int
    on_bad: str
    checkpoints: Sequence[Checkpoint] | None
    ids: Sequence[Any] | None
    num_workers: int
    memory: int
    progress: bool

    def __post_init__(self) -> None:
        if self.store_dtype not in DTYPES:
            raise unknown("store_dtype", self.store_dtype, DTYPES)
        if self.on_bad not in ("error", "skip"):
            raise unknown("on_bad", self.on_bad, ("error", "skip"))
        if self.batch_size < 1:
            raise UndeError(f"batch_size {self.batch_size}: expected at least 1")
        if self.ids is not None:
            self.ids = mf.plain_ids(self.ids)
            if len(self.ids) != len(self.rows):
                raise UndeError(f"{len(self.ids)} ids for {len(self.rows)} examples: expected one for each")

    def run(
        self,
        folder: Path,
        groups: Groups | str | Mapping[str, str],
        exclude: Sequence[str],
        checkpoint_weights: Sequence[float] | None,
        second_moments: Any,
    ) -> mf.Manifest:
        names = trainable(self.model, exclude)
        partition = Groups.parse(groups, self.model, exclude)
        partition.of(names)
        self.models = fingerprints(self.model, self.checkpoints)
        if self.method.steps > 1 and self.checkpoints is not None:
            raise UndeError(f"{self.method} sums over steps of trajectories: it takes one checkpoint")
        etas = settled_weights(checkpoint_weights, len(self.models) * self.method.steps)
        self.data = mf.data_fingerprint(self.rows)
        matrices = self._matrices(folder, names, second_moments)
        units = make_units(self.model, names, str(self.method.projection), self.seed, matrices)
        manifest = mf.Manifest(
            schema=mf.SCHEMA,
            projection_version=projection.VERSION,
            method=self.method.describe(),
            task=mf.task_name(self.task),
            examples=len(self.rows),
            batch_size=self.batch_size,
            shard_size=shard_size(self.batch_size, units[-1].stop),
            store_dtype=self.store_dtype,
            seed=self.seed,
            on_bad=self.on_bad,
            units=[{"name": u.name, "shape": list(u.shape), "size": u.stop - u.start} for u in units],
            groups={k: list(v) for k, v in partition.members.items()},
            models=self.models,
            checkpoint_weights=etas,
            data=self.data,
            ids=mf.ids_fingerprint(self.ids),
            factors=self.method.factors,
            given=given.fingerprint(matrices),
        )
        self._build(folder, manifest, units)
        if getattr(self.method, "fisher", None) == "sampled":
            probe = methods.Fisher(self.method.projection).describe()
            self._build(folder / FISHER, replace(manifest, method=probe), units)
        return manifest

    def _build(self, folder: Path, manifest: mf.Manifest, units: list[Unit]) -> None:
        Builder(
            folder,
            manifest,
            self.model,
            self.task,
            self.rows,
            units,
            checkpoints=self.checkpoints,
            ids=self.ids,
            num_workers=self.num_workers,
            memory=self.memory,
            progress=self.progress,
        ).run()

    def _matrices(self, folder: Path, names: list[str], second_moments: Any) -> dict[str, Tensor]:
        """What the projection needs that is not drawn from the seed."""
        spec = Spec.parse(str(self.method.projection))
        if second_moments is not None and self.method.factors:
            raise UndeError(
                "EKFAC needs the two sides of a gradient apart, but second_moments weighs its entries one by one: "
                "use one of the two"
            )
        scales = {} if second_moments is None else moments.scales(second_moments, self.model, names)
        if spec.kind != "pca" and not scales:
            return {}
        origin = [
            self.models,
            self.data,
            names,
            str(spec),
            self.seed,
            self.batch_size,
            given.fingerprint(scales),
        ]

        def make() -> dict[str, Tensor]:
            if spec.kind != "pca":
                return scales
            with loaded(self.model, None if self.checkpoints is None else self.checkpoints[0]):
                directions = pca.fit(
                    self.model,
                    self.task,
                    self.rows,
                    names,
                    spec,
                    seed=self.seed,
                    measure=self.method.measure,
                    batch_size=self.batch_size,
                    memory=self.memory,
                )
            return directions | scales

        return given.made_once(folder, repr(origin), make)
