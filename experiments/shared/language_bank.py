"""GPT-2-like models trained on random halves of a corpus, for the banks sotu-gpt2 and wikitext-gpt2.

All start from the same initial weights; the order of the data differs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared.banks import Recipe
from experiments.shared.corpora import EPOCHS, SIZES, VOCABULARY, corpus, gpt2, log_likelihood, train

SUBSETS = 64


def train_on(indices: np.ndarray, seed: int, *, name: str) -> nn.Module:
    tokens = corpus(name).train[torch.from_numpy(indices)]
    return train(gpt2(VOCABULARY[name]), tokens, epochs=EPOCHS[name], seed=seed)[0]


def utility(model: nn.Module, *, name: str) -> dict[str, Tensor]:
    """Log-likelihood a token of the queries of both roles: "learn" serves to choose defaults, "eval" to report."""
    data = corpus(name)
    return {"learn": log_likelihood(model, data.learn), "eval": log_likelihood(model, data.evaluate)}


def recipe(name: str) -> Recipe:
    return Recipe(
        name=f"GPT-2-like on half of {SIZES[name][0]:,} sequences of {name}",
        train=partial(train_on, name=name),
        utility=partial(utility, name=name),
        n_train=SIZES[name][0],
        subsets=SUBSETS,
    )
