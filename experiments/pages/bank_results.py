"""LDS of a bank as the page needs it, from the study `lds`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.pages.book import Book

# What chose the weights, in the order of the page
RULES = {
    "search": "Algorithm 1, searched on learning queries",
    "fixed": "Algorithm 1, k = 5, λ′ = 0.5",
    "calibrated": "calibrated on 16 retrained models",
    "best": "Algorithm 1, best on the evaluation",
    "fitted": "fitted to half of the models",
}
CHIEF = ("search", "fixed", "calibrated")  # that the first sentence is about
RELIABLE = 0.6  # r of banks that can tell


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
    "finetuned-vit": Setting(
        "fine-tuning, ViT",
        "2,000 CIFAR-10 images of four classes, a ViT pretrained on the other six",
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
    "finetuned-lora": Setting(
        "fine-tuning, LoRA", "1,500 sequences, LoRA of rank 8, one epoch", "no counterpart"
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
    "finetuned-unet": Setting(
        "robots, one start",
        "the same pictures and model, fine-tuned from one start, judged at 50 timesteps",
        "SB-Pokemon: 600 pictures of 256 × 256, LoRA of rank 128 on Stable Diffusion",
    ),
}


def reliable(book: Book) -> list[str]:
    """Banks whose models agree well enough with those of other seeds."""
    found = book.results("reliability", BANKS)
    return [bank for bank, there in found.items() if there["r"] >= RELIABLE]


def of_bank(book: Book, bank: str) -> dict[str, Any] | None:
    """Of its methods on projected features, and on whole gradients where they were measured."""
    found, whole = book.get(f"lds_{bank}"), book.get(f"lds_{bank}_whole")
    if found is None or whole is None:
        return found or whole
    return found | {"methods": found["methods"] | whole["methods"]}


def methods_of(book: Book, bank: str) -> dict[str, Any]:
    return (of_bank(book, bank) or {"methods": {}})["methods"]


def differences(
    book: Book, rule: str, banks: Iterable[str] = BANKS
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """{bank: {method: paired difference}} of all cells that a rule was measured on."""
    out: dict[str, dict[str, Mapping[str, Any]]] = {}
    for bank in banks:
        rows = methods_of(book, bank).items()
        cells = {m: row["rules"][rule]["difference"] for m, row in rows if rule in row["rules"]}
        if cells:
            out[bank] = cells
    return out
