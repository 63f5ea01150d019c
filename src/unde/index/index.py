"""Index: the features of a training set on disk, and what can be asked of them."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from unde import methods
from unde.data import Collate, Rows
from unde.errors import UndeError, unknown
from unde.features.factors import gathered, split
from unde.groups import Groups
from unde.index import checks, influence
from unde.index import manifest as mf
from unde.index.checkpoints import Checkpoint, fingerprints
from unde.index.folder import FISHER
from unde.index.making import Making
from unde.index.queries import QueryFeatures, compute
from unde.index.store import read_shard, unpack
from unde.index.tokens import TokenScores
from unde.index.training import Training
from unde.kernels import Kernel
from unde.methods import Method
from unde.scores import GroupScores, TrainSide
from unde.tasks.base import Task

if TYPE_CHECKING:
    from unde.index.trust import Trust
    from unde.planning import Plan
    from unde.scores import WeightsLike
    from unde.weights import Weights


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
        rows: Rows | None = None,
    ) -> None:
        self.train_data = rows  # where it is at hand
        self.folder, self.manifest, self.model, self.task = folder, manifest, model, task
        self.checkpoints, self.collate, self.memory = checkpoints, collate, memory
        self.groups = manifest.as_groups()
        self.method = methods.parse(manifest.method)
        self.batch_size = manifest.batch_size
        self.ids = checks.read_ids(folder, manifest)
        self._training: dict[Kernel | None, Training] = {}
        self._retrieved: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return self.manifest.examples

    def __repr__(self) -> str:
        m, groups = self.manifest, len(self.groups)
        return f"Index({str(self.folder)!r}, {self.method}, {m.examples} × {m.width}, {groups} groups)"

    # --- making one -------------------------------------------------------------------------------------

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
        second_moments: Any = None,
        progress: bool = True,
    ) -> Index:
        """Compute the features of `train_data`, or finish an index that was begun in `path`.

        `checkpoints` are state dicts or .safetensors files; `checkpoint_weights` their η_c (learning rates
        for TracInCP; equal shares by default). `exclude` names parameters to leave out, by regular
        expressions. `on_bad` is what to do about NaN gradients: "error", or "skip" and record.
        `second_moments`, an Adam-like optimizer, its state_dict() or {parameter: v}, divides gradients by √v.
        """
        rows = Rows(train_data, collate or _own_collate(task, train_data))
        budget, folder = parse_bytes(memory), Path(path)
        with _on_device(model, device):
            manifest = Making(
                model=model,
                task=task,
                rows=rows,
                method=methods.for_building(method),
                batch_size=batch_size,
                store_dtype=store_dtype,
                seed=seed,
                on_bad=on_bad,
                checkpoints=checkpoints,
                ids=ids,
                num_workers=num_workers,
                memory=budget,
                progress=progress,
            ).run(folder, groups, exclude, checkpoint_weights, second_moments)
        return cls(folder, manifest, model, task, checkpoints, rows.collate, budget, rows)

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

        Without `model` and `task` it can score stored query features only. `train_data` is compared with what
        was indexed (all of it if that takes seconds). `verify=False` skips the checksums.
        """
        folder, manifest = Path(path), mf.Manifest.read(Path(path))
        rows = None if train_data is None else Rows(train_data)
        models = [] if model is None else fingerprints(model, checkpoints)
        differ = checks.differences(manifest, model, models, task, groups, rows)
        if differ:
            raise UndeError(f"{folder} was made from something else. What differs: {'; '.join(differ)}")
        if task is not None and collate is None:
            collate = _own_collate(task, train_data)
        checks.check_shards(folder, manifest, verify)
        index = cls(folder, manifest, model, task, checkpoints, collate, parse_bytes(memory), rows)
        if rows is not None:
            changed = checks.changed_example(rows, torch.arange(len(rows)), index.extras("digest"))
            if changed is not None:
                raise UndeError(
                    f"{folder} was made from something else. What differs: the training data "
                    f"(example {changed} has another content)"
                )
        return index

    @staticmethod
    def plan(model: nn.Module, task: Task, example: Any = None, **options: Any) -> Plan:
        """What building and asking an index would need, for a model that may be on the meta device.

        Options are those of `unde.planning.plan`: n_examples, seq_len, and most of `Index.build`.
        """
        from unde.planning import plan

        return plan(model, task, example, **options)

    # --- reading ----------------------------------------------------------------------------------------

    def _shard(self, checkpoint: int, s: int) -> dict[str, Tensor]:
        return read_shard(checks.shard_path(self.folder, checkpoint, s), self.manifest.id, verify=False)

    def block(self, checkpoint: int, s: int) -> Tensor:
        """(n, D) float32 features of shard s."""
        return unpack(self._shard(checkpoint, s), self.manifest.columns)

    def blocks(self, s: int) -> list[Tensor]:
        """The features of shard s under each checkpoint."""
        return [self.block(c, s) for c in range(self.manifest.terms)]

    def rows(self, which: Tensor) -> Tensor:
        """(C, n, D) float32 features of the training examples `which`, from the shards that hold them."""
        out = torch.empty(self.manifest.terms, len(which), self.manifest.width)
        for s, rows in enumerate(self.manifest.shards):
            here = ((which >= rows.start) & (which < rows.stop)).nonzero()[:, 0]
            if len(here):
                local = which[here] - rows.start
                for c, block in enumerate(self.blocks(s)):
                    out[c].index_copy_(0, here, block.index_select(0, local))
        return out

    def extras(self, name: str, checkpoint: int = 0) -> Tensor:
        """A stored value of every example: "loss" (N,), "squares" (N, parameters), "skipped" (N,), and
        "also" (N, ·), the measures that the method keeps beside features."""
        known = ("loss", "squares", "skipped", "digest", *["also"] * bool(self.method.also))
        if name not in known:
            raise unknown("extra", name, known)
        return torch.cat([self._shard(checkpoint, s)[name] for s in range(len(self.manifest.shards))])

    def factors(self, checkpoint: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
        """The covariances that EKFAC is made of, in float64, of the parameters that have them."""
        m = self.manifest
        if not m.factors:
            raise UndeError(
                f"{self.folder} holds no covariances, which EKFAC is made of: build it with method='ekfac' (all other "
                "methods can be scored on such an index too)"
            )
        parts = (self._shard(checkpoint, s)["factors"].double() for s in range(len(m.shards)))
        total = reduce(torch.add, parts)
        found = split(total, gathered(m.units, str(self.method.projection)))
        return {name: pair for name, pair in found.items() if all(side.any() for side in pair)}

    @cached_property
    def fisher(self) -> Index:
        """The gradients with sampled labels."""
        folder = self.folder / FISHER
        if not (folder / mf.FILE).exists():
            raise UndeError(
                f"{self.folder} holds no gradients with sampled labels: build it with EKFAC(fisher='sampled')"
            )
        return Index.open(folder, memory=self.memory)

    @cached_property
    def skipped(self) -> Tensor:
        """(N,) bool: examples left out because of NaN gradients."""
        flags = [self.extras("skipped", c).bool() for c in range(self.manifest.terms)]
        return torch.stack(flags).any(0)

    @cached_property
    def _squares(self) -> Tensor:
        etas = self.manifest.checkpoint_weights
        return torch.stack([eta * self.extras("squares", c) for c, eta in enumerate(etas)]).sum(0)

    # --- asking -----------------------------------------------------------------------------------------

    def features(self, queries: Any, path: str | Path | None = None) -> QueryFeatures:
        """Features of queries, to be used instead of them. With `path` they are kept there and reused."""
        if isinstance(queries, QueryFeatures):
            if queries.index != self.manifest.id:
                raise UndeError(
                    "these query features were computed for another index: compute them anew with this one"
                )
            return queries
        rows = Rows(queries, None if _brings_collate(queries) else self.collate)
        if path is not None and Path(path).exists():
            there = QueryFeatures.load(Path(path), self.manifest.id)
            if there.digests != rows.digests():
                raise UndeError(
                    f"{path} holds the features of other queries: choose another path, or delete it"
                )
            return there
        made = compute(self, rows)
        if path is not None:
            made.save(Path(path))
        return made

    def score(self, queries: Any, method: str | Method | None = None) -> GroupScores:
        """Group-resolved scores of queries, under the index's method or another on the same measurement."""
        chosen = methods.on_index(method, self.method)
        made = self.features(queries)
        if not isinstance(queries, QueryFeatures):
            chosen.check_query(Rows(queries)[0])
        return self.scores_of(chosen, made.features, made.digests)

    def tokens(self, scores: GroupScores, weights: WeightsLike = None) -> TokenScores:
        """Contributions of single tokens: `index.tokens(scores)(q, example)` adds up to the score of `example`."""
        return TokenScores(self, scores, weights)

    def self_influence(
        self,
        weights: WeightsLike = None,
        normalize_top: int | None = None,
        subset: Sequence[int] | None = None,
        method: str | Method | None = None,
    ) -> Tensor:
        """τ(i, i) of every training example, or of those in `subset`; high values mark wrong labels.

        With `normalize_top=m` divided by the sum of the m largest scores of i over the training set; where
        that sum is not positive the example says nothing about itself and gets 0.
        """
        where = torch.arange(len(self)) if subset is None else torch.as_tensor(subset)
        chosen = methods.on_index(method, self.method)
        return influence.self_influence(self, chosen, weights, normalize_top, where)

    def learn_weights(
        self,
        method: str | Method | None = None,
        perturb: Any = None,
        examples: int = 200,
        seed: int = 0,
    ) -> Weights:
        """Weights with which perturbed training examples find themselves: no labels, no queries, no k.

        `perturb` is a function (example, strength, random) -> example, with a strength from 0.05 to 1 and a NumPy
        generator to draw from; "weights" for noise on the model's weights; or None for what the task knows: noise,
        replaced tokens, augmented images. The strength is searched. `examples` copies are learned from, others judge
        and report, all of different training examples. Where weights would not help they are uniform;
        `weights.provenance` tells what was found. Costs as much as 600 queries, and `examples` more, at most.
        """
        from unde.index import self_retrieval

        return self_retrieval.learn(self, method, perturb, examples, seed)

    def trust(
        self,
        weights: Weights | None = None,
        method: str | Method | None = None,
        examples: int = 60,
        seed: int = 0,
        perturb: Any = None,
    ) -> Trust:
        """How many training examples find themselves through a change, by its strength: see `unde.index.trust`."""
        from unde.index import trust

        return trust.of_one(self, weights, method, examples, seed, perturb)

    def training(self, method: Method) -> Training:
        """K g(n) of the training examples; the two kernels used last are held on to."""
        kernel = method.kernel
        made = self._training.pop(kernel, None) or Training(self, kernel)
        self._training = dict([*self._training.items(), (kernel, made)][-2:])
        return made

    def scores_of(self, method: Method, features: Tensor, digests: list[str]) -> GroupScores:
        """Scores of queries whose features (C, Q, D) are at hand."""
        m, training = self.manifest, self.training(method)
        train = TrainSide(
            examples=len(self),
            units=m.unit_names,
            columns=m.columns,
            checkpoint_weights=m.checkpoint_weights,
            cuts=training.cuts,
            block=training.block,
            squares=lambda: self._squares,
            leverage=lambda: influence.leverage(self, method),
            also=lambda: self.extras("also"),
            skipped=lambda: self.skipped,
            ids=self.ids,
        )
        provenance = {"index": m.id, "method": method.describe(), "model": m.models}
        provenance |= {"data": m.data, "task": m.task}
        at_hand = None not in (self.model, self.task, self.train_data)
        judging = partial(self._retrieval, method) if at_hand else None
        return GroupScores(train, features, method, self.groups, digests, provenance, self.memory, judging)

    def _retrieval(self, method: Method, groups: Groups) -> Any:
        """Self-retrieval as it is by default, under one method and partition; the one used last is held on to."""
        from unde.index.self_retrieval import EXAMPLES, Retrieval

        key = (method, tuple(groups.members.items()))
        if self._retrieved is None or self._retrieved[0] != key:
            self._retrieved = None  # its memory is free for the next
            self._retrieved = (key, Retrieval.made(self, method, None, EXAMPLES, 0, groups))
        return self._retrieved[1]


def parse_bytes(memory: int | str) -> int:
    """
    >>> parse_bytes("2GB"), parse_bytes("512 MiB"), parse_bytes(1000)
    (2000000000, 536870912, 1000)
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", memory)
        if match is None:
            raise UndeError(f"cannot read memory {memory!r}: expected something like '2GB' or '512MiB'")
        base = 1024 if match[3] else 1000
        memory = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if memory < 1:
        raise UndeError(f"memory {memory}: expected a number of bytes, or something like '2GB'")
    return memory


def _own_collate(task: Task, data: Any) -> Collate | None:
    """The task's collate function, unless the data comes with one of its own (a DataLoader)."""
    return None if _brings_collate(data) else task.collate


def _brings_collate(data: Any) -> bool:
    return isinstance(data, DataLoader) and data.collate_fn is not default_collate


@contextmanager
def _on_device(model: nn.Module, device: str | torch.device | None) -> Generator[None]:
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
