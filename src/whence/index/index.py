"""Index: the features of a training set on disk, and what can be asked of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence import methods, projection
from whence.data import Collate, Rows, to_device
from whence.errors import WhenceError, unknown
from whence.features import Collector, make_units, plan_coverage
from whence.groups import Groups, trainable
from whence.index import manifest as mf
from whence.index.build import Builder, Checkpoint, loaded, read_checkpoint, shard_name, shard_size
from whence.index.precondition import preconditioned
from whence.index.queries import QueryFeatures
from whence.index.store import DTYPES, ShardError, read_shard, unpack
from whence.methods import Method
from whence.scores import GroupScores, TrainSide
from whence.tasks.base import Task
from whence.weights import Weights


class Index:
    """Make one with `Index.build` or `Index.open`."""

    def __init__(
        self,
        folder: Path,
        manifest: mf.Manifest,
        model: nn.Module | None,
        task: Task | None,
        checkpoints: Sequence[Checkpoint] | None,
        collate: Collate | None,
        memory: int,
    ) -> None:
        self.folder, self.manifest, self.model, self.task = folder, manifest, model, task
        self.checkpoints, self.collate, self.memory = checkpoints, collate, memory
        self.groups = manifest.as_groups()
        self.method = methods.parse(manifest.method)
        self.batch_size = manifest.batch_size

    def __len__(self) -> int:
        return self.manifest.examples

    def __repr__(self) -> str:
        m = self.manifest
        return f"Index({str(self.folder)!r}, {self.method}, {m.examples} × {m.width}, {len(self.groups)} groups)"

    # --- making one ---------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: nn.Module,
        task: Task,
        train_data: Any,
        path: str | Path,
        *,
        method: str | Method = "trak",
        groups: Groups | str | Mapping[str, str] = "layer",
        batch_size: int = 32,
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        exclude: Sequence[str] = (),
        collate: Collate | None = None,
        num_workers: int = 0,
        device: str | torch.device | None = None,
        store_dtype: str = "float32",
        ids: Sequence[Any] | None = None,
        memory: int | str = "2GB",
        seed: int = 0,
        on_bad: str = "error",
        progress: bool = True,
    ) -> Index:
        """Compute the features of `train_data`, or finish an index that was begun in `path`.

        `checkpoints` are state dicts or .safetensors files; `checkpoint_weights` their η_c (learning rates for
        TracInCP; equal shares by default). `exclude` names parameters to leave out, by regular expressions.
        `on_bad` is what to do about NaN gradients: "error", or "skip" and record.
        """
        method = methods.parse(method)
        if store_dtype not in DTYPES:
            raise unknown("store_dtype", store_dtype, DTYPES)
        if on_bad not in ("error", "skip"):
            raise unknown("on_bad", on_bad, ("error", "skip"))
        if batch_size < 1:
            raise WhenceError(f"batch_size {batch_size}: expected at least 1")
        rows = Rows(train_data, collate or _own_collate(task, train_data))
        if ids is not None and len(ids) != len(rows):
            raise WhenceError(f"{len(ids)} ids for {len(rows)} examples: expected one for each")
        names = trainable(model, exclude)
        partition = Groups.parse(groups, model, exclude)
        partition.of(names)
        with _on_device(model, device):
            units = make_units(model, names, method.projection, seed)
            width = units[-1].stop
            states = [read_checkpoint(c) for c in checkpoints] if checkpoints is not None else [model.state_dict()]
            manifest = mf.Manifest(
                schema=mf.SCHEMA,
                projection_version=projection.VERSION,
                method=method.describe(),
                task=mf.task_name(task),
                examples=len(rows),
                batch_size=batch_size,
                shard_size=shard_size(batch_size, width, store_dtype),
                store_dtype=store_dtype,
                seed=seed,
                on_bad=on_bad,
                units=[{"name": u.name, "shape": list(u.shape), "size": u.stop - u.start} for u in units],
                groups={k: list(v) for k, v in partition.members.items()},
                models=[mf.model_fingerprint(s) for s in states],
                checkpoint_weights=_checkpoint_weights(checkpoint_weights, len(states)),
                data=mf.data_fingerprint(rows),
                ids=mf.ids_fingerprint(ids),
            )
            del states
            folder = Path(path)
            Builder(
                folder,
                manifest,
                model,
                task,
                rows,
                units,
                checkpoints=checkpoints,
                ids=ids,
                num_workers=num_workers,
                progress=progress,
            ).run()
        return cls(folder, manifest, model, task, checkpoints, rows.collate, parse_bytes(memory))

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        task: Task | None = None,
        train_data: Any = None,
        groups: Groups | None = None,
        checkpoints: Sequence[Checkpoint] | None = None,
        collate: Collate | None = None,
        memory: int | str = "2GB",
        verify: bool = True,
    ) -> Index:
        """An index on disk, after checking that it is whole and was made from what is given here.

        Without `model` and `task` it can score stored query features only. `verify=False` skips the checksums.
        """
        folder = Path(path)
        manifest = mf.Manifest.read(folder)
        differ = []
        if model is not None:
            states = [read_checkpoint(c) for c in checkpoints] if checkpoints is not None else [model.state_dict()]
            differ += _model_differences(manifest, model, [mf.model_fingerprint(s) for s in states])
        if task is not None and mf.task_name(task) != manifest.task:
            differ.append(f"the task ({manifest.task} there, {mf.task_name(task)} given)")
        if groups is not None and {k: list(v) for k, v in groups.members.items()} != manifest.groups:
            differ.append(f"the groups ({len(manifest.groups)} there, {len(groups)} given, or other members)")
        if train_data is not None:
            rows = Rows(train_data)
            if len(rows) != manifest.examples:
                differ.append(f"the length of the training data ({manifest.examples} there, {len(rows)} given)")
            elif mf.data_fingerprint(rows) != manifest.data:
                differ.append("the training data (same length, other content)")
        if differ:
            raise WhenceError(f"{folder} was made from something else. What differs: {'; '.join(differ)}")
        if task is not None and collate is None:
            collate = _own_collate(task, train_data)
        index = cls(folder, manifest, model, task, checkpoints, collate, parse_bytes(memory))
        index._check_shards(verify)
        return index

    def _check_shards(self, verify: bool) -> None:
        shards = self.manifest.shards
        names = [shard_name(c, s) for c in range(len(self.manifest.models)) for s in range(len(shards))]
        missing = [n for n in names if not (self.folder / "shards" / n).exists()]
        if missing:
            raise ShardError(
                f"{self.folder} is not finished: {len(missing)} of {len(names)} shards are missing ({missing[0]}, …). "
                "Run the same Index.build again to finish it"
            )
        problems = []
        for name in names:
            try:
                read_shard(self.folder / "shards" / name, self.manifest.id, verify)
            except ShardError as e:
                problems.append(str(e))
        if problems:
            raise ShardError(f"{'; '.join(problems)}. Run the same Index.build again to repair the index")

    # --- reading -------------------------------------------------------------------------------------------

    def _shard(self, c: int, s: int) -> dict[str, Tensor]:
        return read_shard(self.folder / "shards" / shard_name(c, s), self.manifest.id, verify=False)

    def blocks(self, checkpoint: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """(rows, (n, D) float32 features) shard by shard."""
        for s, r in enumerate(self.manifest.shards):
            yield slice(r.start, r.stop), unpack(self._shard(checkpoint, s), self.manifest.columns)

    def extras(self, name: str, checkpoint: int = 0) -> Tensor:
        """A stored value of every example: "loss" (N,), "squares" (N, parameters), "skipped" (N,)."""
        shards = range(len(self.manifest.shards))
        return torch.cat([self._shard(checkpoint, s)[name] for s in shards])

    @cached_property
    def skipped(self) -> Tensor:
        """(N,) bool: examples left out because of NaN gradients."""
        flags = [self.extras("skipped", c).bool() for c in range(len(self.manifest.models))]
        return torch.stack(flags).any(0)

    @cached_property
    def _squares(self) -> Tensor:
        return sum(  # ty: ignore[invalid-return-type]
            eta * self.extras("squares", c) for c, eta in enumerate(self.manifest.checkpoint_weights)
        )

    @cached_property
    def ids(self) -> list[Any] | None:
        path = self.folder / "ids.json"
        return json.loads(path.read_text()) if self.manifest.ids else None

    # --- queries -------------------------------------------------------------------------------------------

    def features(self, queries: Any, path: str | Path | None = None) -> QueryFeatures:
        """Features of queries, to be used instead of them. With `path` they are kept, and reused if they fit."""
        if isinstance(queries, QueryFeatures):
            return self._fitting(queries)
        if self.model is None or self.task is None:
            raise WhenceError("this index was opened without its model and task: pass both to compute query features")
        rows = Rows(queries, self.collate)
        if path is not None and Path(path).exists():
            there = QueryFeatures.load(Path(path), self.manifest.id)
            if there.digests == rows.digests():
                return there
            raise WhenceError(f"{path} holds the features of other queries: choose another path, or delete it")
        names = self.manifest.unit_names
        units = make_units(self.model, names, self.method.projection, self.manifest.seed)
        step = self.batch_size
        cuts = [range(a, min(a + step, len(rows))) for a in range(0, len(rows), step)]
        features, losses = [], []
        for c in range(len(self.manifest.models)):
            with loaded(self.model, None if self.checkpoints is None else self.checkpoints[c]):
                try:
                    coverage = plan_coverage(self.model, self.task, rows, units, self.method.measure)
                    with Collector(self.model, self.task, units, coverage, self.method.measure) as collect:
                        parts = [
                            collect(to_device(batch, collect.device), list(r)) for r, batch, _ in rows.batches(cuts)
                        ]
                except (RuntimeError, TypeError, KeyError, IndexError) as e:
                    raise WhenceError(
                        f"the model cannot run on these queries ({e}): expected examples of the shape it was indexed on"
                    ) from e
            features.append(torch.cat([f.float().cpu() for f, _ in parts]))
            losses.append(torch.cat([v.float().cpu() for _, v in parts]))
        whole = torch.stack(features)
        bad = (~whole.isfinite().all(2)).any(0).nonzero()[:, 0].tolist()
        if bad:
            raise WhenceError(f"the gradient of query {bad[0]} is NaN or infinite ({len(bad)} in all): leave it out")
        made = QueryFeatures(self.manifest.id, whole, torch.stack(losses), rows.digests())
        if path is not None:
            made.save(Path(path))
        return made

    def _fitting(self, queries: QueryFeatures) -> QueryFeatures:
        if queries.index != self.manifest.id:
            raise WhenceError("these query features were computed for another index: compute them anew with this one")
        return queries

    def score(self, queries: Any, method: str | Method | None = None) -> GroupScores:
        """Group-resolved scores of queries, under the index's method or another one on the same measurement."""
        chosen = methods.on_index(method, self.method)
        made = self.features(queries)
        return self._scores(chosen, made.features, made.digests)

    def _scores(self, method: Method, features: Tensor, digests: list[str]) -> GroupScores:
        m = self.manifest
        readers = [preconditioned(self, method, c) for c in range(len(m.models))]

        def blocks() -> Iterator[tuple[slice, list[Tensor]]]:
            for parts in zip(*(read() for read in readers)):
                yield parts[0][0], [block for _, block in parts]

        train = TrainSide(
            examples=len(self),
            units=m.unit_names,
            columns=m.columns,
            checkpoint_weights=m.checkpoint_weights,
            blocks=blocks,
            squares=lambda: self._squares,
            skipped=lambda: self.skipped,
            ids=self.ids,
        )
        provenance = {"index": m.id, "method": method.describe(), "model": m.models, "data": m.data, "task": m.task}
        return GroupScores(train, features, method, self.groups, digests, provenance, self.memory)

    def self_influence(
        self,
        weights: Weights | None = None,
        normalize_top: int | None = None,
        subset: Sequence[int] | None = None,
        method: str | Method | None = None,
    ) -> Tensor:
        """τ(i, i) of every training example, or of those in `subset`; high values mark outliers and wrong labels.

        With `normalize_top=m` divided by the sum of the m largest scores of i over the training set; where that
        sum is not positive the example says nothing about itself and gets 0.
        """
        chosen = methods.on_index(method, self.method)
        where = torch.arange(len(self)) if subset is None else torch.as_tensor(subset, dtype=torch.long)
        if where.numel() == 0 or int(where.min()) < 0 or int(where.max()) >= len(self):
            raise WhenceError(f"subset must name examples 0 to {len(self) - 1}, at least one")
        own, total = [], []
        for part in where.split(max(1, self.memory // (16 * self.manifest.width * len(self.manifest.models)))):
            rows = torch.stack([self._rows(part, c) for c in range(len(self.manifest.models))])
            scores = self._scores(chosen, rows, [""] * len(part))
            own.append(_own_scores(scores, part, weights))
            if normalize_top is not None:
                total.append(scores.top(normalize_top, weights).values.sum(1))
        result = torch.cat(own)
        if normalize_top is None:
            return result
        denominator = torch.cat(total)
        positive = denominator > torch.finfo(torch.float32).tiny
        return torch.where(positive, result / denominator.clamp(min=torch.finfo(torch.float32).tiny), 0.0)

    def _rows(self, which: Tensor, checkpoint: int) -> Tensor:
        out = torch.empty(len(which), self.manifest.width)
        for rows, block in self.blocks(checkpoint):
            here = (which >= rows.start) & (which < rows.stop)
            out[here] = block[which[here] - rows.start]
        return out


def _own_scores(scores: GroupScores, which: Tensor, weights: Weights | None) -> Tensor:
    """The score of query i against training example which[i]."""
    w = scores._weights(weights)
    scaled, out = scores._scaled(w), torch.empty(len(which))
    for rows, blocks in scores.train.blocks():
        here = ((which >= rows.start) & (which < rows.stop)).nonzero()[:, 0]
        local = which[here] - rows.start
        linear = sum((q[here] * b[local]).sum(1) for q, b in zip(scaled, blocks))
        if scores.method.linear:
            out[here] = linear
        else:
            for i, n, value in zip(here.tolist(), local.tolist(), linear):  # ty: ignore[invalid-argument-type]
                at = slice(rows.start + n, rows.start + n + 1)
                out[i] = scores.finish(value.view(1, 1), w, slice(i, i + 1), at)[0, 0]
    return out


def parse_bytes(memory: int | str) -> int:
    """
    >>> parse_bytes("2GB"), parse_bytes("512 MiB"), parse_bytes(1000)
    (2000000000, 536870912, 1000)
    """
    if isinstance(memory, int):
        return memory
    match = re.fullmatch(r"\s*([\d.]+)\s*([kMGT]?)(i?)B?\s*", memory)
    if match is None:
        raise WhenceError(f"cannot read memory {memory!r}: expected something like '2GB' or '512MiB'")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kMGT".index(match[2] or " "))


def _own_collate(task: Task, data: Any) -> Collate | None:
    """The task's collate function, unless the data comes with one (a DataLoader)."""
    return None if isinstance(data, torch.utils.data.DataLoader) else task.collate


def _checkpoint_weights(given: Sequence[float] | None, count: int) -> list[float]:
    if given is None:
        return [1.0 / count] * count
    if len(given) != count:
        raise WhenceError(f"{len(given)} checkpoint_weights for {count} checkpoints: expected one for each")
    return [float(x) for x in given]


def _model_differences(manifest: mf.Manifest, model: nn.Module, models: list[str]) -> list[str]:
    shapes = {n: list(p.shape) for n, p in model.named_parameters()}
    for u in manifest.units:
        if shapes.get(u["name"]) != u["shape"]:
            there = shapes.get(u["name"])
            return [f"the model (parameter {u['name']!r} has shape {u['shape']} there, {there} in the one given)"]
    if models != manifest.models:
        if len(models) != len(manifest.models):
            return [f"the checkpoints ({len(manifest.models)} there, {len(models)} given with checkpoints=)"]
        return ["the model's weights (same shapes, other values)"]
    return []


@contextmanager
def _on_device(model: nn.Module, device: str | torch.device | None) -> Iterator[None]:
    """The model on `device` inside the block, and back where it was after it."""
    if device is None:
        yield
        return
    home = next(model.parameters()).device
    try:
        model.to(device)
        yield
    finally:
        model.to(home)
