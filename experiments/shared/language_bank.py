"""The retraining banks behind the language studies: GPT-2-like models trained on random halves of a corpus.

    python experiments/language_bank.py sotu        # and: wikitext, with UNDE_DATA set

Each bank is one small file in experiments/banks, kept in the repository. A run that was interrupted goes on
where it stopped. All models start from the same initial weights; the order of the data differs.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared.corpora import CORPORA, EPOCHS, SIZES, VOCABULARY, corpus, gpt2, log_likelihood, train
from experiments.shared.places import BANKS
from unde.evaluate import Bank

SUBSETS = 64


def train_on(indices: np.ndarray, seed: int, *, name: str) -> nn.Module:
    tokens = corpus(name).train[torch.from_numpy(indices)]
    return train(gpt2(VOCABULARY[name]), tokens, epochs=EPOCHS[name], seed=seed)[0]


def utility(model: nn.Module, *, name: str) -> dict[str, Tensor]:
    """Log-likelihood a token of the queries of both roles: "learn" serves to choose defaults, "eval" to report."""
    data = corpus(name)
    return {"learn": log_likelihood(model, data.learn), "eval": log_likelihood(model, data.evaluate)}


def bank(name: str) -> Bank:
    return Bank.run(
        BANKS / f"{name}-gpt2.npz",
        train=partial(train_on, name=name),
        utility=partial(utility, name=name),
        n_train=SIZES[name][0],
        subsets=SUBSETS,
        name=f"GPT-2-like on half of {SIZES[name][0]:,} sequences of {name}",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", choices=CORPORA)
    made = bank(parser.parse_args().corpus)
    print(f"{made.path.name}: {len(made.masks)} subsets, {made.seconds.mean():.1f} s for each model")
