"""`python -m experiments run NAME --scale paper …`: the studies at the paper's size.

NAME is a setting (all of its studies are run) or a study, which has a setting or several to choose from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.scale import language, llama, vision
from experiments.scale.diffusion import Generation, layout
from experiments.scale.language import WikiText
from experiments.scale.llama import OpenWebText
from experiments.scale.pokemon import Pokemon
from experiments.scale.settings import ARTBENCH2, CIFAR2, IMAGENET, LLAMA_OWT, NARUTO, SB_POKEMON, WIKITEXT103
from experiments.scale.sources import Source
from experiments.scale.study import Place, Study
from experiments.scale.vision import ImageNet
from experiments.shared.paths import RUNS
from unde.errors import unknown


@dataclass(frozen=True)
class Offer:
    """A setting: what it is, how to make its study, and what can be run in it."""

    what: str
    make: Callable[[Place, str], Study]
    data: str  # what --data holds
    model: str  # what --model holds
    studies: dict[str, str]  # names of the small studies → the method that runs each


_ABLATIONS = {"ablations": "ablations"}
_PIPELINE = str(ARTBENCH2.pretrained)
SETTINGS: dict[str, Offer] = {
    "imagenet": Offer(
        "ResNet-18 or ViT-B/16 (--architecture) on 50,000 images of ImageNet",
        lambda place, architecture: ImageNet(IMAGENET[architecture], place, architecture),
        vision.LAYOUT,
        "nothing",
        {"lds_classification": "lds", "mislabel_auc": "mislabel", **_ABLATIONS},
    ),
    "wikitext103": Offer(
        "GPT-2-small on 232,585 sequences of WikiText-103",
        lambda place, _: WikiText(WIKITEXT103, place),
        language.LAYOUT,
        "GPT-2's tokenizer",
        {"lds_language": "lds", "language_tail_patch": "patches", **_ABLATIONS},
    ),
    "cifar2": Offer(
        "a DDPM of 35.7M parameters on 5,000 images of two classes of CIFAR-10",
        lambda place, _: Generation(CIFAR2, place),
        layout(CIFAR2),
        "nothing",
        {"lds_diffusion": "lds", **_ABLATIONS},
    ),
    "artbench2": Offer(
        "Stable Diffusion with LoRA on 5,000 paintings of two styles of ArtBench",
        lambda place, _: Generation(ARTBENCH2, place),
        layout(ARTBENCH2),
        _PIPELINE,
        {"lds_diffusion": "lds", **_ABLATIONS},
    ),
    "naruto": Offer(
        "Stable Diffusion with LoRA on 1,221 captioned images",
        lambda place, _: Generation(NARUTO, place),
        layout(NARUTO),
        _PIPELINE,
        {"lds_diffusion": "lds", **_ABLATIONS},
    ),
    "sb-pokemon": Offer(
        "Stable Diffusion with LoRA on 600 images of 30 categories",
        lambda place, _: Pokemon(SB_POKEMON, place),
        layout(SB_POKEMON),
        _PIPELINE,
        {"lds_diffusion": "lds", "fine_grained_recall": "recall", **_ABLATIONS},
    ),
    "llama-owt": Offer(
        "Llama-3-8B-Instruct as it is on 99,642 sequences of OpenWebText",
        lambda place, _: OpenWebText(LLAMA_OWT, place),
        llama.LAYOUT,
        str(LLAMA_OWT.pretrained),
        {"llama_tail_patch": "patches"},
    ),
}


def listed() -> str:
    lines = ["settings (all their studies are run), and the studies in each:"]
    for name, offer in SETTINGS.items():
        lines += [f"  {name:14}{offer.what}", f"{'':16}{', '.join(offer.studies)}"]
    return "\n".join(lines)


def run(name: str, arguments: Sequence[str]) -> None:
    """Runs a study or a setting at the paper's size; "list" shows what there is."""
    if name == "list":
        print(listed())
        return
    known = [*SETTINGS, *dict.fromkeys(s for offer in SETTINGS.values() for s in offer.studies)]
    if name not in known:
        raise unknown("study or setting at the paper's scale", name, known)
    args = options(name).parse_args(list(arguments))
    setting = args.setting
    offer = SETTINGS[setting]
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    given = vars(args)
    source = Source(given.pop("data"), given.pop("dataset"))
    architecture = given.pop("architecture", "")
    del given["setting"]
    study = offer.make(Place(source=source, **given), architecture)
    for title, method in offer.studies.items():
        if name in (setting, title):
            print(f"{title}: wrote {getattr(study, method)()}", flush=True)


def options(name: str) -> argparse.ArgumentParser:
    offered = [s for s, offer in SETTINGS.items() if name == s or name in offer.studies]
    p = argparse.ArgumentParser(
        prog=f"python -m experiments run {name} --scale paper",
        description="; ".join(f"{setting}: {SETTINGS[setting].what}" for setting in offered),
        epilog=". ".join(
            f"{setting}: {SETTINGS[setting].data} in --data; {SETTINGS[setting].model} in --model"
            for setting in offered
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if len(offered) > 1:
        p.add_argument("--setting", choices=offered, required=True, help="which of the paper's data sets")
    else:
        p.set_defaults(setting=offered[0])
    data = p.add_mutually_exclusive_group()
    data.add_argument("--data", type=Path, help="local folder of images or tables")
    data.add_argument(
        "--dataset", help="instead: NAME or NAME:CONFIG for datasets.load_dataset, which may download"
    )
    p.add_argument("--model", type=Path, help="folder of the pretrained model, or of the tokenizer")
    if "imagenet" in offered:
        p.add_argument("--architecture", choices=list(IMAGENET), default="resnet18")
    p.add_argument(
        "--out", type=Path, default=RUNS / "paper", help="where work is kept; a run goes on from there"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--rows", type=int, default=16, help="examples (or noisy images) on the device at once")
    p.add_argument("--workers", type=int, default=0, help="processes that read examples ahead")
    p.add_argument("--processes", type=int, default=1, help="halves that are trained at the same time")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each of these")
    p.add_argument("--memory", help="budget of an index, such as 64GB (default: the setting's)")
    p.add_argument(
        "--fewer", action="store_true", help="take what data there is, if it is less than the paper's"
    )
    return p
