"""Synthetic facts about invented people, and which sentences a language model has an answer from.

A fact is an attribute of a person, told in four of six wordings; a query tells it in another one, with a loss on the
answer alone. Relevant are the four sentences that tell this fact; 12 others are about the same person.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import Index
from unde.evaluate import Estimate, TrainingSpec
from unde.evaluate.baselines import baseline_scores
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import CausalLM

FIRST = "Ada Bela Cora Dina Ezra Fritz Gala Hugo Ines Jona Kira Lars Mona Nils Olga Pavel Rosa Sven Tara Ugo"
LAST = "Abel Brandt Costa Dahl Ender Fink Gray Holm Irving Jansen Kern Lund Marsh Nord Olsen"
VALUES = {
    "city": "Lyon Porto Turin Ghent Cork Bergen Malmo Graz Split Gdansk Leeds Basel",
    "work": "baker pilot tailor surgeon miner painter lawyer printer farmer singer sailor weaver",
    "pet": "cat dog horse parrot turtle rabbit snake goat ferret canary hamster donkey",
    "sport": "tennis rowing chess fencing cycling boxing golf judo sailing skating running diving",
}
WORDINGS = {
    "city": "{} was born in {}|{} grew up in {}|the home town of {} is {}|{} comes from {}|"
    "the parents of {} lived in {}|people say that {} is from {}",
    "work": "{} works as a {}|{} earns money as a {}|the job of {} is {}|{} became a {}|"
    "every day {} goes to work as a {}|people say that {} is a {}",
    "pet": "{} has a {}|{} lives with a {}|the pet of {} is a {}|{} feeds a {}|"
    "at home {} looks after a {}|people say that {} owns a {}",
    "sport": "{} likes {}|{} is good at {}|the sport of {} is {}|{} practises {}|"
    "on Sundays {} does {}|people say that {} enjoys {}",
}
PEOPLE, TOLD, ASKED, MODELS = 120, 4, 200, 2


@cache
def told() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, tuple[list[str], list[str]]]:
    """Training sentences and queries as tokens, (queries, sentences) which are relevant, and both as texts."""
    random = np.random.default_rng(0)
    names = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    facts = [
        (names[person], attribute, random.choice(VALUES[attribute].split()))
        for person in random.permutation(len(names))[:PEOPLE]
        for attribute in VALUES
    ]
    asked = set(random.permutation(len(facts))[:ASKED].tolist())
    rows: list[tuple[str, int]] = []
    queries: list[tuple[str, int]] = []
    for fact, (name, attribute, value) in enumerate(facts):
        texts = [wording.format(name, value) for wording in WORDINGS[attribute].split("|")]
        order = random.permutation(len(texts))
        rows += [(texts[i], fact) for i in order[:TOLD]]
        queries += [(texts[order[TOLD]], fact)] * (fact in asked)
    rows = [rows[i] for i in random.permutation(len(rows))]
    words = sorted({word for text, _ in rows + queries for word in text.split()})
    number = {word: i + 1 for i, word in enumerate(words)}

    def tokens(texts: Iterable[str], answer: bool) -> dict[str, Tensor]:
        ids = [torch.tensor([number[word] for word in text.split()]) for text in texts]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        labels = torch.where(padded == 0, -100, padded)
        if answer:  # the last word
            last = torch.tensor([len(row) - 1 for row in ids])[:, None]
            labels = torch.where(torch.arange(padded.shape[1]) == last, labels, -100)
        return {"input_ids": padded, "labels": labels}

    texts = [text for text, _ in rows], [text for text, _ in queries]
    relevant = torch.tensor([[a == b for _, b in rows] for _, a in queries])
    return tokens(texts[0], False), tokens(texts[1], True), relevant, texts


def language_model(seed: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    size = 1 + int(told()[0]["input_ids"].max())
    config = GPT2Config(
        vocab_size=size, n_positions=16, n_embd=96, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def run(folder: Path) -> dict[str, Any]:
    """{"methods": {name: {"MRR", "Recall@4", "Recall@10"}}}, over the queries of all models."""
    train, queries, relevant, texts = told()
    spec = TrainingSpec(
        model=language_model,
        data=train,
        loss=CausalLM().loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 2e-3, total_steps=steps
        ),
        clip=1.0,
        epochs=30,
    )
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    right = []
    for seed in range(MODELS):
        model = spec(np.arange(len(texts[0])), seed)
        right.append(_right(model, queries))
        shutil.rmtree(folder / "index", ignore_errors=True)
        index = Index.build(model, CausalLM(), train, folder / "index", progress=False)
        totals = baseline_scores(model, CausalLM(), train, queries, texts=texts)
        default = index.score(queries)
        totals[f"default: {type(default.method).__name__} on whole gradients"] = default.total()
        shutil.rmtree(folder / "index")
        index = Index.build(
            model, CausalLM(), train, folder / "index", method=EKFAC("kron(16)"), progress=False
        )
        asked = index.features(queries)
        for m in (TracIn(), TRAK(damping=0.1), LoGRA(damping=0.1), EKFAC("kron(16)", damping=0.1)):
            totals[f"{type(m).__name__}, kron(16)"] = index.score(asked, m).total()
        for name, total in totals.items():
            found.setdefault(name, []).append(_retrieval(total, relevant))
        shutil.rmtree(folder / "index")
    methods = {
        name: {key: Estimate(np.mean([row[key] for row in rows], axis=0)).as_dict() for key in rows[0]}
        for name, rows in found.items()
    }
    return {
        "sentences": len(texts[0]),
        "queries": len(texts[1]),
        "right": float(np.mean(right)),
        "methods": methods,
    }


@torch.no_grad()
def _right(model: nn.Module, queries: dict[str, Tensor]) -> float:
    """How many queries the model completes rightly."""
    labels = queries["labels"][:, 1:]
    guess = model(input_ids=queries["input_ids"]).logits[:, :-1].argmax(-1)
    return float((guess == labels)[labels != -100].float().mean())


def _retrieval(total: Tensor, relevant: Tensor) -> dict[str, np.ndarray]:
    """Of each query: one over the rank of the first relevant sentence, and the share of all of them in the top k."""
    order = relevant.gather(1, total.argsort(dim=1, descending=True, stable=True)).double()
    first = 1 / (1 + order.argmax(1).double())
    recall = {f"Recall@{k}": (order[:, :k].sum(1) / order.sum(1)).numpy() for k in (TOLD, 10)}
    return {"MRR": first.numpy(), **recall}
