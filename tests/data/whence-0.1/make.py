"""Writes the files of this folder: run with the code of whence 0.1 (commit b5e0119), from the folder itself."""

import contextlib
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import whence
from safetensors.torch import save_file
from whence.evaluate import Bank
from whence.tasks import Classification

EXAMPLES, FEATURES, HIDDEN, CLASSES = 24, 5, 6, 3

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES)
)
x, y = torch.randn(EXAMPLES, FEATURES), torch.randint(CLASSES, (EXAMPLES,))
queries, labels = torch.randn(4, FEATURES), torch.randint(CLASSES, (4,))
save_file(model.state_dict(), "model.safetensors")
save_file({"x": x, "y": y, "queries": queries, "labels": labels}, "data.safetensors")

with mock.patch("whence.index.build.SHARD_BATCHES", 2):
    index = whence.Index.build(
        model,
        Classification(),
        (x, y),
        "index",
        method=whence.methods.TRAK(projection="kron(4)"),
        batch_size=4,
        ids=[f"example {i}" for i in range(EXAMPLES)],
        progress=False,
    )
scores = index.score((queries, labels))
weights = whence.learn_weights(scores, k=3)
weights.save("weights.json")
index.features((queries, labels), "queries.safetensors")
save_file({"total": scores.total(), "weighted": scores.total(weights)}, "scores.safetensors")

Bank.run(
    "bank.npz",
    train=lambda indices, seed: torch.from_numpy(np.bincount(indices, minlength=EXAMPLES)).float(),
    utility=lambda counts: {"learn": -counts[:3], "evaluate": -counts[3:5]},
    n_train=EXAMPLES,
    subsets=4,
    seeds_per_subset=2,
    name="which examples were there",
)


def fail_on_the_last(indices, seed):
    if seed == last:
        raise RuntimeError("interrupted")
    return torch.from_numpy(np.bincount(indices, minlength=EXAMPLES)).float()


last = int(Bank.open("bank.npz").seeds[-1, -1])
with contextlib.suppress(whence.WhenceError):
    Bank.run(
        "begun.npz",
        train=fail_on_the_last,
        utility=lambda counts: {"learn": -counts[:3]},
        n_train=EXAMPLES,
        subsets=4,
        seeds_per_subset=2,
        name="which examples were there",
    )
for lock in Path().rglob(".lock"):
    lock.unlink()
