"""`python -m experiments run SETTING --scale paper …`: the studies at the paper's models and sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.scale import language, vision
from experiments.scale.diffusion import Generation, Pokemon, layout
from experiments.scale.language import OpenWebText, WikiText
from experiments.scale.settings import (
    ARTBENCH2,
    CIFAR2,
    LLAMA_OWT,
    NARUTO,
    RESNET18,
    SB_POKEMON,
    VIT_B16,
    WIKITEXT103,
)
from experiments.scale.sources import HUB
from experiments.scale.study import Place, Study
from experiments.scale.vision import ImageNet
from experiments.shared.paths import RUNS
from unde.errors import unknown


@dataclass(frozen=True)
class Offer:
    """A setting: what it is, what --data holds, and which studies can be run in it."""

    what: str
    study: Callable[[Any, Place], Study]
    setting: Any
    data: str
    studies: tuple[str, ...] = ("lds", "ablations")  # methods of the study, run_…

    @property
    def model(self) -> str:
        """What --model holds."""
        return getattr(self.setting, "pretrained", None) or "nothing"


_DIFFUSION = "Stable Diffusion with LoRA on"
_WRONG, _PATCH = ("lds", "mislabel", "ablations"), ("lds", "patches", "ablations")
_OFFERS = (
    Offer("ResNet-18 on 50,000 images of ImageNet", ImageNet, RESNET18, vision.LAYOUT, _WRONG),
    Offer("ViT-B/16 on 50,000 images of ImageNet", ImageNet, VIT_B16, vision.LAYOUT, _WRONG),
    Offer("GPT-2-small on 232,585 sequences of WikiText-103", WikiText, WIKITEXT103, language.LAYOUT, _PATCH),
    Offer("a DDPM of 35.7M parameters on 5,000 images of two classes of CIFAR-10", Generation, CIFAR2, layout(CIFAR2)),
    Offer(f"{_DIFFUSION} 5,000 paintings of two styles of ArtBench", Generation, ARTBENCH2, layout(ARTBENCH2)),
    Offer(f"{_DIFFUSION} 1,221 captioned images", Generation, NARUTO, layout(NARUTO)),
    Offer(
        f"{_DIFFUSION} 600 images of 30 categories", Pokemon, SB_POKEMON, layout(SB_POKEMON),
        ("lds", "recall", "ablations"),
    ),
    Offer(
        "Llama-3-8B-Instruct as it is on 99,642 sequences of OpenWebText", OpenWebText, LLAMA_OWT,
        language.OPEN_LAYOUT, ("patches",),
    ),
)  # fmt: skip
SETTINGS = {offer.setting.name: offer for offer in _OFFERS}


def run(name: str, arguments: Sequence[str]) -> None:
    """Runs the studies of a setting at the paper's size; "list" shows what there is."""
    if name == "list":
        for setting, offer in SETTINGS.items():
            print(f"{setting:20}{offer.what}: {', '.join(offer.studies)}")
        return
    if name not in SETTINGS:
        raise unknown("setting at the paper's scale", name, SETTINGS)
    offer, given = SETTINGS[name], vars(options(name).parse_args(list(arguments)))
    if given["device"].startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    chosen = given.pop("study") or offer.studies
    study = offer.study(offer.setting, Place(**given))
    for title in chosen:
        print(f"{title}: wrote {getattr(study, f'run_{title}')()}", flush=True)


def options(name: str) -> argparse.ArgumentParser:
    offer = SETTINGS[name]
    p = argparse.ArgumentParser(
        prog=f"python -m experiments run {name} --scale paper",
        description=offer.what,
        epilog=f"--data has {offer.data}. --model has {offer.model}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--study", choices=offer.studies, nargs="+", help="some of the studies, not all of them")
    p.add_argument(
        "--data", default="", help=f"a folder, or {HUB}NAME or {HUB}NAME:CONFIG, which may be downloaded"
    )
    p.add_argument("--model", type=Path, help="folder of the pretrained model, or of the tokenizer")
    p.add_argument(
        "--out", type=Path, default=RUNS / "paper", help="where work is kept; a run goes on from there"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--rows", type=int, default=16, help="examples (or noisy images) on the device at once")
    p.add_argument("--workers", type=int, default=0, help="processes that read examples ahead")
    p.add_argument("--processes", type=int, default=1, help="halves that are trained at the same time")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each of these")
    p.add_argument("--memory", help="budget of an index, such as 64GB (default: the setting's)")
    return p
