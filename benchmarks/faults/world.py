"""Indexes, banks and weights so small that thousands can be damaged, with what they should give."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from unde import Index, Weights
from unde.evaluate import Bank
from unde.integrations.source import ModelSource
from unde.methods import EKFAC, TRAK
from unde.store import layout
from unde.tasks import Classification

FEATURES, CLASSES, EXAMPLES = 4, 3, 14
NOT_PART = (layout.LOG, layout.LOCK)  # of what an index is


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def data(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, generator=g), torch.randint(CLASSES, (n,), generator=g)


MODEL, TRAIN, QUERIES = net(), data(EXAMPLES), data(3, seed=3)
TASK = Classification()
IDENTITY = TASK.identity()
TASK.identity = lambda: IDENTITY  # reading its code takes a while  # ty: ignore[invalid-assignment]
STATES = [net(1).state_dict(), net(2).state_dict()]


@dataclass(frozen=True)
class Kind:
    """A way to build an index."""

    name: str
    options: dict[str, Any]

    def build(self, folder: Path, **more: Any) -> Index:
        with (
            mock.patch("unde.gradients.feature_pass.MOST", 3),
            mock.patch("unde.index.sizes.SHARD_PASSES", 2),
            redirect_stderr(io.StringIO()),
        ):
            ids = [f"row {i}" for i in range(EXAMPLES)]
            options = {"ids": ids, "memory": "50MB", "progress": False} | self.options | more
            return Index.build(MODEL, TASK, TRAIN, folder, **options)

    def whole(self, folder: Path) -> dict[str, Tensor]:
        """Built, and asked in every way that leaves files behind."""
        self.build(folder)
        ModelSource(target="project:make").save(folder)
        return self.asked(folder)

    def asked(self, folder: Path) -> dict[str, Tensor]:
        """What it gives to who opens it."""
        given = {"model": MODEL, "task": TASK, "train_data": TRAIN}
        if "checkpoints" in self.options:
            given["checkpoints"] = self.options["checkpoints"]
        index = Index.open(folder, **given)
        kept = index.score(index.features(QUERIES, folder / layout.QUERIES / "some.safetensors"))
        ids = torch.tensor([hash(i) for i in index.ids or ()])
        return {
            "kept": kept.total(),
            "fresh": index.score(QUERIES).total(),
            "ids": ids,
            "own": index.self_influence(),
        }


KINDS = (
    Kind("ekfac", {"method": EKFAC(projection="kron(2)", fisher="sampled")}),
    Kind("trak", {"method": TRAK(projection="kron(2)"), "store_dtype": "float16", "checkpoints": STATES}),
)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of an index that is part of what it is."""
    return {
        name: bytes_
        for name, bytes_ in everything(folder).items()
        if Path(name).name not in NOT_PART
        and not name.startswith(layout.KERNELS)  # made when they are needed
    }


def restore(folder: Path, files: dict[str, bytes]) -> None:
    """The folder as it was."""
    if {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - set(files):
        shutil.rmtree(folder)
    for name, bytes_ in files.items():
        path = folder / name
        if path.is_dir() or path.is_symlink():
            shutil.rmtree(path) if not path.is_symlink() else path.unlink()
        if not path.is_file() or path.read_bytes() != bytes_:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes_)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- a bank and weights ------------------------------------------------------------------------------------

X = torch.arange(12.0)


def train(indices: np.ndarray, seed: int) -> Tensor:
    return X[torch.from_numpy(indices)].mean() + seed % 3


def utility(model: Tensor) -> Tensor:
    return -((model - torch.tensor([2.0, 5.0])) ** 2)


def run_bank(path: Path, of: Callable[..., Tensor] = train, **more: Any) -> Bank:
    with redirect_stderr(io.StringIO()):
        return Bank.run(path, train=of, utility=utility, n_train=12, subsets=5, name="faults", **more)


def arrays(bank: Bank) -> dict[str, Tensor]:
    found = {"masks": bank.masks, "seeds": bank.seeds, **bank.by_seed}
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in found.items()}


def weights() -> Weights:
    return Weights(torch.tensor([0.25, 1.0, 1.75]), ["a", "b", "c"], ["0" * 16], {"k": 3})


def held(w: Weights) -> dict[str, Tensor]:
    return {"values": w.values, "names": torch.tensor([hash(n) for n in w.groups])}
