"""The retraining banks behind the classification studies: models trained on random halves of 4,000 MNIST digits.

    python experiments/classification_bank.py resnet        # and: vit

Each bank is one small file in experiments/banks, kept in the repository. A run that was interrupted goes on
where it stopped.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared.places import BANKS
from unde.demo.digits import digits, train
from unde.evaluate import Bank
from unde.tasks import Classification

SUBSETS = {"resnet": 100, "vit": 64}  # 100 in the paper


def train_on(indices: np.ndarray, seed: int, *, architecture: str) -> nn.Module:
    x, y = digits().train
    which = torch.from_numpy(indices)
    return train(architecture, x[which], y[which], seed=seed)


@torch.no_grad()
def utility(model: nn.Module) -> dict[str, Tensor]:
    """−loss of the queries of both roles: "learn" serves to choose defaults, "eval" to report."""
    data, task = digits(), Classification()
    return {"learn": -task.loss(model, data.learn), "eval": -task.loss(model, data.evaluate)}


def bank(architecture: str) -> Bank:
    return Bank.run(
        BANKS / f"mnist-{architecture}.npz",
        train=partial(train_on, architecture=architecture),
        utility=utility,
        n_train=4000,
        subsets=SUBSETS[architecture],
        name=f"{architecture} on half of 4,000 MNIST digits",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architecture", choices=["resnet", "vit"])
    made = bank(parser.parse_args().architecture)
    print(f"{made.path.name}: {len(made.masks)} subsets, {made.seconds.mean():.1f} s for each model")
