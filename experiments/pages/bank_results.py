"""LDS of a bank as the page needs it, from the study `lds`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.pages.book import Book

# How weights were learned, in the order of the page
RULES = {
    "top-k 0.1": "the paper's objective",
    "self-retrieval": "self-retrieval",
    "top-k": "the paper's objective, judged by self-retrieval",
    "both": "mean of these two",
    "reference": "fitted to the bank itself (no method, but what weights could do)",
}
CHIEF = ("top-k 0.1", "self-retrieval")  # the two that the page is about


@dataclass(frozen=True)
class Setting:
    name: str
    what: str
    smaller: str


BANKS = {
    "mnist-resnet": Setting(
        "MNIST, ResNet",
        "4,000 digits, a ResNet of 78 thousand parameters",
        "50,000 ImageNet images, ResNet-18",
    ),
    "mnist-vit": Setting(
        "MNIST, ViT", "4,000 digits, a ViT of 76 thousand parameters", "50,000 ImageNet images, ViT-B/16"
    ),
    "cifar10-resnet": Setting(
        "CIFAR-10, ResNet", "4,000 images, a ResNet of three stages", "50,000 ImageNet images, ResNet-18"
    ),
    "cifar10-vit": Setting(
        "CIFAR-10, ViT", "4,000 images, a ViT of four layers", "50,000 ImageNet images, ViT-B/16"
    ),
    "finetuned-resnet": Setting(
        "fine-tuning, ResNet",
        "2,000 CIFAR-10 images of four classes, a ResNet pretrained on the other six",
        "no counterpart",
    ),
    "wikitext-gpt2": Setting(
        "WikiText-2, GPT-2-like",
        "3,072 sequences of 64 tokens, 4 layers, 128 wide",
        "232,585 sequences of 512 tokens of WikiText-103, GPT-2-small",
    ),
    "sotu-gpt2": Setting(
        "State of the Union, GPT-2-like", "2,048 sequences of 64 tokens, 4 layers, 128 wide", "no counterpart"
    ),
    "finetuned-gpt2": Setting(
        "fine-tuning, GPT-2-like", "1,500 sequences on top of a pretrained model", "no counterpart"
    ),
    "cifar2": Setting(
        "CIFAR-2",
        "2,000 images of 16 × 16, a UNet of 1.1 M parameters, 1,400 steps",
        "5,000 images of 32 × 32, 35.7 M parameters, 200 epochs",
    ),
    "robots": Setting(
        "robots",
        "600 pictures of 32 × 32, LoRA of rank 16 on a UNet of 4.7 M parameters",
        "SB-Pokemon: 600 pictures of 256 × 256, LoRA of rank 128 on Stable Diffusion",
    ),
}


def of_bank(book: Book, bank: str) -> dict[str, Any] | None:
    return book.get(f"lds_{bank}")


def methods_of(book: Book, bank: str) -> dict[str, Any]:
    return (of_bank(book, bank) or {"methods": {}})["methods"]


def differences(book: Book, rule: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    """{bank: {method: paired difference}} of all cells that a rule was measured on."""
    out: dict[str, dict[str, Mapping[str, Any]]] = {}
    for bank in BANKS:
        rows = methods_of(book, bank).items()
        cells = {m: row["rules"][rule]["difference"] for m, row in rows if rule in row["rules"]}
        if cells:
            out[bank] = cells
    return out
