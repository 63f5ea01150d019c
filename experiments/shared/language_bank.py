"""GPT-2-like models trained on random halves of a corpus, for the banks sotu-gpt2 and wikitext-gpt2.

All start from the same initial weights; the order of the data differs.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from experiments.shared.banks import Recipe
from experiments.shared.corpora import EPOCHS, SIZES, VOCABULARY, corpus, gpt2, log_likelihood, training

SUBSETS = 64


def initial(seed: int, *, vocabulary: int) -> nn.Module:
    return gpt2(vocabulary)


def train_tokens(name: str) -> Tensor:
    return corpus(name).train


def utility(model: nn.Module, *, name: str) -> dict[str, Tensor]:
    """Log-likelihood a token of the queries of both roles: "learn" serves to choose defaults, "eval" to report."""
    data = corpus(name)
    return {"learn": log_likelihood(model, data.learn), "eval": log_likelihood(model, data.evaluate)}


def recipe(name: str) -> Recipe:
    return Recipe(
        name=f"GPT-2-like on half of {SIZES[name][0]:,} sequences of {name}",
        train=training(
            partial(initial, vocabulary=VOCABULARY[name]), partial(train_tokens, name), epochs=EPOCHS[name]
        ),
        utility=partial(utility, name=name),
        n_train=SIZES[name][0],
        subsets=SUBSETS,
    )
