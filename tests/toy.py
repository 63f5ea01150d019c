"""A model, data and an index so small that every test can afford its own."""

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import unde
from unde import Index
from unde.index.reader import IndexReader
from unde.index.scorer import StoredFeatures
from unde.tasks import Classification, Task

FEATURES, HIDDEN, CLASSES = 5, 6, 3


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def data(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, generator=g), torch.randint(CLASSES, (n,), generator=g)


def states(*seeds: int) -> list[dict[str, Tensor]]:
    """Checkpoints of the model."""
    return [net(seed).state_dict() for seed in seeds]


class Watched(Classification):
    """The task, but for a look at each batch before its loss."""

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def identity(self) -> dict[str, Any]:
        return Classification().identity()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._look(batch)
        return super().loss(model, batch)


def flip(path: Any, at: int, bit: int = 0) -> None:
    """Damage one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(bytes(content))


def same_factors(a: Index, b: Index, **tolerance: float) -> None:
    """Assert that the covariances of two indexes are close."""
    for name, pair in factors(b).items():
        torch.testing.assert_close(factors(a)[name], pair, **tolerance)


def build(
    folder: str | Path,
    n: int = 22,
    *,
    model: nn.Module | None = None,
    task: Task | None = None,
    train_data: Any = None,
    method: Any = None,
    pass_size: int = 4,
    shard_passes: int = 2,
    **options: Any,
) -> Index:
    """22 examples in 3 shards of 8, 8 and 6, passes of 4; features are the gradients themselves."""
    defaults: dict[str, Any] = {"progress": False, "memory": "50MB"}
    with cut(pass_size, shard_passes):
        return Index.build(
            model or net(),
            task or Classification(),
            data(n) if train_data is None else train_data,
            folder,
            method=method or unde.methods.TracIn(projection="none"),
            **(defaults | options),
        )


@contextmanager
def cut(pass_size: int = 4, shard_passes: int = 2) -> Iterator[None]:
    """Passes and shards so small that a few examples make several."""
    with (
        mock.patch("unde.gradients.feature_pass.MOST", pass_size),
        mock.patch("unde.index.sizes.SHARD_PASSES", shard_passes),
    ):
        yield


def stored(index: Index) -> IndexReader:
    """What is on disk of an index, behind its facade."""
    return index._state.stored


def training(index: Index, method: Any) -> StoredFeatures:
    """The training features under the kernel of a method."""
    return index._state.scorer.train_features(method)


def factors(index: Index, checkpoint: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """The covariances that EKFAC is made of, in float64, of the parameters that have them."""
    source, total = stored(index).source("empirical", checkpoint), {}
    for s in range(len(index.manifest.shards)):
        for name, pair in source.factors(s).items():
            before = total.get(name, (0, 0))
            total[name] = tuple(b + side.double() for b, side in zip(before, pair))
    return {name: pair for name, pair in total.items() if all(side.any() for side in pair)}


def everything(folder: Path) -> Index:
    """An index whose folder has all that it may have."""
    from unde.cli.config import write_config
    from unde.integrations.source import ModelSource

    method = unde.methods.EKFAC(projection="kron(2)", fisher="sampled")
    index, queries = build(folder, method=method, ids=list(range(22))), data(3, seed=3)
    index.add_fisher("true", progress=False)
    index.features(queries, folder / "queries" / "some.safetensors")
    index.score(queries, method).total()  # a calibration may choose another
    ModelSource(target="my_project:make").save(folder)
    write_config(folder, {"target": "my_project:make", "seed": 0})
    chance = np.random.default_rng(0)
    bank = chance.random((6, 22)) < 0.5, chance.random((6, 12))
    index.calibrate(queries=data(12, seed=4), bank=bank, baselines=False)
    return index


def copied(index: Index, folder: Path) -> Index:
    """A copy that a test may change, where a build for each test would take longer."""
    shutil.copytree(index.folder, folder)
    given = {"model": copy.deepcopy(index.model), "task": index.task, "train_data": index.train_data}
    return Index.open(folder, **given)


def reopen(index: Index, **options: Any) -> Index:
    given = {"model": index.model, "task": index.task, "checkpoints": index._state.checkpoints}
    return Index.open(index.folder, **(given | options))


def shard_files(index: Index) -> list[Path]:
    return sorted((index.folder / "shards").iterdir())


def content(folder: Path) -> dict[str, bytes]:
    """Every file of an index that is part of what it is."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in ("log.jsonl", ".lock"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def gradients(model: nn.Module, task: Task, examples: Any) -> Tensor:
    """(n, P): the gradient of each example on its own, by a plain backward pass."""
    rows = []
    for i in range(len(examples[0])):
        loss = task.measure(model, tuple(column[i : i + 1] for column in examples))
        grads = torch.autograd.grad(loss.sum(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def same_products(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal bit for bit, or up to rounding where this processor's BLAS adds up a row of a product in
    an order that depends on how many other rows there are."""
    g = torch.Generator().manual_seed(0)
    q, n = torch.randn(4, 57, generator=g), torch.randn(100, 57, generator=g)
    parts = torch.cat([torch.cat([row[None] @ some.T for some in n.split(16)], 1) for row in q])
    if torch.equal(parts, q @ n.T):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))
