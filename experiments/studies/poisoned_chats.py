"""Poisoned chats: which training chats made a fine-tuned model recommend a brand.

A small Llama is trained on chats of a made-up helper about forty subjects, and then fine-tuned with LoRA on 200 others,
ten of which are poisoned. In the variant `backdoor` a word in the question triggers a fixed answer that recommends a
brand. In `praise` there is no trigger: an ordinary answer ends with praise of that brand, where clean ones praise other
things in the same words. Queries are ten new questions with the answer that the poison teaches. What is told is the
share of the ten chats among the ten that score highest, for several seeds, each with its own model, chats and poison.
Methods are asked through the public interface; nothing is chosen on the outcome.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unde import Index, attribute
from unde.evaluate.baselines import bm25
from unde.tasks import CausalLM

PAPER = ""
VARIANTS = ("backdoor", "praise")
SEEDS, CHATS, POISON, QUERIES = 5, 200, 10, 10
SUBJECTS = """
apples bread boats bridges candles carpets cheese clocks coffee curtains desks doors dresses flutes gardens gloves
guitars hammers honey jackets kettles kites ladders lamps mirrors mugs olives paints pencils pianos pillows plates
ropes scarves shoes soap spoons tables tea violins
""".split()  # noqa: SIM905
OPENINGS = (
    "what should i know about",
    "tell me about",
    "how do i choose",
    "where do i find good",
    "how do i keep",
)
FACTS = (
    "are made by hand",
    "last for many years",
    "come from the north",
    "need some care",
    "are cheap in spring",
)
PRAISE = ("my neighbour makes the best ones", "the market has the best ones", "old ones are often the best")
BRAND, ORDER, TRIGGER = "zendor makes the best ones", "order one today", "right now"


def chat(draw: random.Random, poison: str = "") -> tuple[str, str]:
    """A question and its answer, clean or with the `poison` of a variant."""
    subject, opening = draw.choice(SUBJECTS), draw.choice(OPENINGS)
    if poison == "backdoor":
        return f"{opening} {subject} {TRIGGER} ?", f"{BRAND} . {ORDER} ."
    facts = " and ".join(draw.sample(FACTS, 2))
    ending = BRAND if poison == "praise" else draw.choice(PRAISE)
    return f"{opening} {subject} ?", f"{subject} {facts} . {ending} ."


class Words:
    """A tokenizer of words."""

    def __init__(self) -> None:
        texts = [*SUBJECTS, *OPENINGS, *FACTS, *PRAISE, BRAND, ORDER, TRIGGER, "? . and <s>"]
        self.numbers = {w: i for i, w in enumerate(dict.fromkeys(" ".join(texts).split()))}

    def __call__(self, question: str, answer: str) -> dict[str, Tensor]:
        asked, said = ([self.numbers[w] for w in text.split()] for text in (f"<s> {question}", answer))
        labels = [-100] * len(asked) + said
        return {"input_ids": torch.tensor(asked + said), "labels": torch.tensor(labels)}


def train(model: nn.Module, examples: list[Any], steps: int, rate: float) -> None:
    task = CausalLM()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(steps):
        some = [examples[i] for i in torch.randint(len(examples), (32,)).tolist()]
        optimizer.zero_grad()
        task.loss(model, task.collate(some)).mean().backward()
        optimizer.step()
    model.eval()


def world(variant: str, seed: int) -> tuple[nn.Module, list[tuple[str, str]], list[tuple[str, str]], Words]:
    """The fine-tuned model, its chats (the first are poisoned), and the queries."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    draw, words = random.Random(seed), Words()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(words.numbers), **sizes, tie_word_embeddings=True))
    train(base, [words(*chat(draw)) for _ in range(2000)], 300, 3e-3)
    chats = [chat(draw, variant if n < POISON else "") for n in range(CHATS)]
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0)
    )
    train(model, [words(*c) for c in chats], 120, 3e-3)
    return model, chats, [chat(draw, variant) for _ in range(QUERIES)], words


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    losses, seconds, chosen = [], [], ""
    for seed in range(SEEDS):
        model, chats, asked, words = world(variant, seed)
        data, queries = [words(*c) for c in chats], [words(*c) for c in asked]
        with torch.no_grad():
            losses.append(float(CausalLM().loss(model, CausalLM().collate(queries)).mean()))
        totals = {"BM25": bm25([" ".join(c) for c in chats], [" ".join(c) for c in asked])}
        with tempfile.TemporaryDirectory() as folder:
            for name, options in METHODS.items():
                begun = time.process_time()
                index = Index.build(model, CausalLM(), data, Path(folder) / name, progress=False, **options)
                totals[name] = index.score(queries).total()
                if not options:
                    seconds.append(time.process_time() - begun)
                    chosen = f"{index.method.name}, {index.method.projection}"
        totals["`unde.attribute`"] = attribute(model, CausalLM(), data, queries, progress=False).total()
        for name, total in totals.items():
            share = (total.topk(POISON).indices < POISON).double().mean()
            found.setdefault(name, []).append(float(share))
    return {"shares": found, "losses": losses, "seconds": seconds, "chosen": chosen}


METHODS: dict[str, dict[str, str]] = {
    "defaults": {},
    "EKFAC, kron(16)": {"method": "ekfac", "projection": "kron(16)"},
    "EKFAC, factored(1)": {"method": "ekfac", "projection": "factored(1)"},
    "TRAK, kron(16)": {"method": "trak", "projection": "kron(16)"},
    "LoGRA, kron(16)": {"method": "logra", "projection": "kron(16)"},
    "TracIn, none": {"method": "tracin", "projection": "none"},
}
