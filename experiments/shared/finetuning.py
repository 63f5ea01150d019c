"""A GPT-2-like model pretrained once on WikiText-2 and State of the Union addresses, then fine-tuned on others.

One in ten documents of both is held out of pretraining. Their sequences are dealt out at random: 1,500 fine-tune,
250 learn weights from queries, 250 evaluate, so that queries have relatives in the fine-tuning data. All
fine-tunings start from the same checkpoint, kept in experiments/models; their seeds order the data.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared import models
from experiments.shared.banks import Recipe
from experiments.shared.corpora import (
    Corpus,
    addresses,
    articles,
    chunks,
    gpt2,
    log_likelihood,
    make_tokenizer,
    train,
    training,
)
from unde.evaluate import TrainingSpec

VOCABULARY = 4096
HELD_OUT = 10  # every tenth document
SIZES = (1500, 250, 250)
PRETRAINING = {"epochs": 1, "batch_size": 16, "lr": 3e-3}
FINETUNING = {"epochs": 3, "batch_size": 8, "lr": 1e-3}
LORA = {"epochs": 1, "batch_size": 16, "lr": 3e-3}


@cache
def corpus() -> tuple[Tensor, Corpus]:
    """Sequences to pretrain on, and the fine-tuning data in its three roles."""
    pools = [articles()["train"], addresses()["train"]]
    pretrain = [row for rows in pools for i, row in enumerate(rows) if i % HELD_OUT]
    held_out = [row for rows in pools for row in rows[::HELD_OUT]]
    tokenizer = make_tokenizer([text for text, _ in pretrain], VOCABULARY)
    ids, where = chunks(tokenizer, held_out)
    order = np.random.default_rng(0).permutation(len(ids))
    ends = np.cumsum(SIZES)
    roles = {
        role: order[end - size : end]
        for role, size, end in zip(("train", "learn", "evaluate"), SIZES, ends, strict=True)
    }
    about = {role: [where[i] for i in rows] for role, rows in roles.items()}
    data = Corpus("finetuned", tokenizer, **{role: ids[rows] for role, rows in roles.items()}, about=about)
    return chunks(tokenizer, pretrain)[0], data


def pretrained() -> nn.Module:
    def pretrain() -> nn.Module:
        return train(gpt2(VOCABULARY), corpus()[0], seed=0, **PRETRAINING)[0]

    return models.attributed("gpt2-pretrained", partial(gpt2, VOCABULARY), pretrain)


def with_lora() -> nn.Module:
    """The pretrained model, frozen, under LoRA of rank 8 on every matrix of its blocks; always the same start."""
    from peft import LoraConfig, get_peft_model

    targets = ["c_attn", "c_proj", "c_fc"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(
            pretrained(), LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=True)
        )


START = {"gpt2": (pretrained, FINETUNING), "lora": (with_lora, LORA)}


def _training(kind: str) -> TrainingSpec:
    """At a constant rate for LoRA: in a single epoch, a falling one would weigh sequences by their place in it."""
    spec = training(partial(_initial, kind), train_tokens, **START[kind][1])
    return replace(spec, schedule=None) if kind == "lora" else spec


def attributed(kind: str = "gpt2") -> nn.Module:
    """Fine-tuned on all 1,500 sequences once; of LoRA, the adapter."""
    start = START[kind][0]
    make = partial(gpt2, VOCABULARY) if kind == "gpt2" else start
    return models.attributed(f"{kind}-finetuned", make, lambda: _training(kind)(np.arange(SIZES[0]), 0))


def _initial(kind: str, seed: int) -> nn.Module:
    return START[kind][0]()


def train_tokens() -> Tensor:
    return corpus()[1].train


def utility(model: nn.Module) -> dict[str, Tensor]:
    data = corpus()[1]
    return {"learn": log_likelihood(model, data.learn), "eval": log_likelihood(model, data.evaluate)}


def recipe(kind: str = "gpt2") -> Recipe:
    return Recipe(
        name=f"GPT-2-like, pretrained, {'LoRA ' * (kind == 'lora')}on half of 1,500 sequences",
        train=_training(kind),
        utility=utility,
        n_train=SIZES[0],
        subsets=64,
    )
