"""Choosing fine-tuning data for a target.

The pool holds sequences of 64 tokens of three kinds: the WikiText-2 articles and State of the Union addresses that
were held out of the pretraining (experiments/shared/finetuning.py), and chats made of the same documents: "User: What
is said about TITLE? Assistant: SENTENCE", one after another, for every third sentence of 8 to 30 words. Of each kind,
32 sequences say what is wanted, 64 others measure, and 400 are in the pool. 5 % of the pool is chosen for each kind,
the pretrained model is fine-tuned on it, and its loss on the measuring sequences is compared with that of fine-tunings
on as many random sequences. LESS: two checkpoints of a fine-tuning on a random 5 % of the pool, learning rates as
weights, second moments of Adam; on whole gradients, the default of Index.build, and on kron(16), which was run first.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared import finetuning
from experiments.shared.corpora import addresses, articles, chunks, log_likelihood, training
from experiments.shared.paths import RUNS
from unde import Index, select
from unde.evaluate import bm25, compare_choices, representation_similarity
from unde.evaluate.bank.training_spec import SingleTrainer
from unde.methods import TracIn
from unde.tasks import CausalLM

PAPER = ""
DATA = {None: ("wikitext-2",)}
SHARE, QUERIES, MEASURED, SEEDS = 0.05, 32, 64, 4
FEATURES = {"kron(16)": ("index", "kron(16)"), "whole": ("index-whole", "none")}
CHECKPOINTS, POOL = 2, 400  # POOL: sequences of each kind


def documents() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Documents of each kind."""
    rows = {"wikitext": articles()["train"], "sotu": addresses()["train"]}
    rows = {kind: some[:: finetuning.HELD_OUT] for kind, some in rows.items()}
    return rows | {
        "chats": [(chat(text, about["title"]), about) for some in rows.values() for text, about in some]
    }


def chat(text: str, title: str) -> str:
    sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text))
    said = [s for s in sentences if 8 <= len(s.split()) <= 30][::3]
    return " ".join(f"User: What is said about {title}? Assistant: {s}" for s in said)


def corpus() -> dict[str, dict[str, Tensor]]:
    """Sequences by role, then by kind."""
    tokenizer = finetuning.corpus()[1].tokenizer
    out: dict[str, dict[str, Tensor]] = {"queries": {}, "measured": {}, "pool": {}}
    for number, (kind, rows) in enumerate(documents().items()):
        ids = chunks(tokenizer, rows)[0]
        ids = ids[torch.from_numpy(np.random.default_rng(number).permutation(len(ids)))]
        ends = np.cumsum([0, QUERIES, MEASURED])
        out["queries"][kind], out["measured"][kind] = ids[: ends[1]], ids[ends[1] : ends[2]]
        out["pool"][kind] = ids[ends[2] : ends[2] + POOL]
    return out


def initial(seed: int) -> nn.Module:
    return finetuning.pretrained()


def warm_up(pool: Tensor) -> tuple[nn.Module, list[dict[str, Tensor]], list[float], Any]:
    """The model after a short fine-tuning, its checkpoints, their learning rates, and the optimizer."""
    rows = np.random.default_rng(0).permutation(len(pool))[: round(SHARE * len(pool))]
    trainer = SingleTrainer(training(initial, pool, **finetuning.FINETUNING), rows, seed=0)
    batches = list(trainer.batches)
    states, rates = [], []
    for step, batch in enumerate(batches, 1):
        trainer.backward(batch)
        rate = trainer.optimizer.param_groups[0]["lr"]
        trainer.step()
        if step in {round(c * len(batches) * 0.9 / CHECKPOINTS) for c in range(1, CHECKPOINTS + 1)}:
            states.append({k: v.clone() for k, v in trainer.model.state_dict().items()})
            rates.append(rate)
    return trainer.finish(), states, rates, trainer.optimizer


def utility(measured: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {kind: log_likelihood(model, rows) for kind, rows in measured.items()}


def run(variant: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    data = corpus()
    kinds, pool = list(data["pool"]), torch.cat(list(data["pool"].values()))
    belongs = np.repeat(np.arange(len(kinds)), [len(rows) for rows in data["pool"].values()])
    count = round(SHARE * len(pool))
    model, states, rates, optimizer = warm_up(pool)
    folder = RUNS / "selection"
    indexes = {
        name: Index.build(
            model, CausalLM(), {"input_ids": pool}, folder / place, method=TracIn(projection=projection),
            checkpoints=states, checkpoint_weights=rates, second_moments=optimizer,
        )
        for name, (place, projection) in FEATURES.items()
    }  # fmt: skip
    tokenizer = finetuning.corpus()[1].tokenizer
    texts = [tokenizer.decode(row.tolist()) for row in pool]
    choices, whole = {}, {}
    for kind, queries in data["queries"].items():
        words = [tokenizer.decode(row.tolist()) for row in queries]
        columns = [{"input_ids": rows} for rows in (pool, queries)]
        states_alike = representation_similarity(model, CausalLM(), *columns, layer="transformer.h.3")
        target = {kind: {"input_ids": queries}}
        choices[f"LESS, kron(16) for {kind}"] = select(indexes["kron(16)"], target, count).indices
        choices[f"BM25 for {kind}"] = bm25(texts, words).mean(0).topk(count).indices
        choices[f"hidden states for {kind}"] = states_alike.mean(0).topk(count).indices
        whole[f"LESS for {kind}"] = select(indexes["whole"], target, count).indices
    compared: dict[str, Any] = {}
    for place, some in (("models-whole", whole), ("models", choices)):
        result = compare_choices(
            some, training(initial, pool, **finetuning.FINETUNING), partial(utility, data["measured"]), len(pool),
            seeds=SEEDS, path=folder / place,
        )  # fmt: skip
        for row in result.rows():
            print(*row, sep="\t", flush=True)
        compared |= result.as_dict()
    choices |= whole
    shares = {
        name: {kind: float((belongs[np.asarray(at)] == k).mean()) for k, kind in enumerate(kinds)}
        for name, at in choices.items()
    }
    before = {kind: float(-u.mean()) for kind, u in utility(data["measured"], initial(0)).items()}
    sizes = {kind: len(rows) for kind, rows in data["pool"].items()}
    return {
        "pool": sizes, "chosen": count, "seeds": SEEDS, "pretrained loss": before, "choices": compared,
        "share of each kind": shares,
    }  # fmt: skip
