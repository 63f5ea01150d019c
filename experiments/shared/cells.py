"""Every bank with the model that is attributed, its methods, and the queries of both roles, under one interface.

A cell is a bank and a method. What is slow to make (the attributed model, its index, features of queries) is made
once: models are kept in experiments/models with the bank they belong to, the rest in experiments/runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from experiments.shared import banks, digits
from experiments.shared.models import kept
from experiments.shared.paths import RUNS
from unde import Index
from unde.evaluate import Bank, Estimate, lds
from unde.index import QueryFeatures
from unde.methods import DAS, DTRAK, EKFAC, PROJECTION, TRAK, Damped, JourneyTRAK, LoGRA, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import CausalLM, Classification
from unde.tasks.base import Task

DAMPING = 0.1  # of the study `label_free`
# The paper's methods on projected features, at the default damping of the kind of task; the study `lds` sweeps it
IMAGES: dict[str, Method] = {"TracIn": TracIn(), "TRAK": TRAK()}
TEXTS: dict[str, Method] = {**IMAGES, "LoGRA": LoGRA(), "EKFAC": EKFAC()}
STEPS = 10  # of the 50 of a trajectory, of "Journey-TRAK, per step"
DENOISERS: dict[str, Method] = {
    **IMAGES,
    "Journey-TRAK": JourneyTRAK(),
    "Journey-TRAK, per step": JourneyTRAK(training="per-step", inference_steps=STEPS),
    "D-TRAK": DTRAK(),
    "DAS": DAS(),
}
# What an index with enough disk keeps by default: whole gradients
WHOLE: dict[str, Method] = {"TracIn, whole": TracIn("none"), "EKFAC, whole": EKFAC("none")}


@dataclass(eq=False)
class Cell:
    """One bank: call `get(name)` for it."""

    name: str
    domain: str  # "images", "text" or "diffusion"
    methods: dict[str, Method]
    load: Callable[[], nn.Module]  # the attributed model
    task: Callable[[], Task]
    train: Callable[[], Any]
    queries: Callable[[str], Any]  # of "learn" or "eval"; "… journey" with trajectories
    built_for: dict[str, Method]  # name of an index (see `index_name`) → the method that it is built for
    groups: str = "layer"
    defaults: dict[str, Method] = field(
        default_factory=dict
    )  # on the package's default features, for the study `lds`
    corpus: Callable[[], Any] | None = None  # of texts
    _built: dict[str, Index] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        return RUNS / self.name

    @cached_property
    def model(self) -> nn.Module:
        return self.load()

    @cached_property
    def bank(self) -> Bank:
        return banks.open_bank(self.name)

    def lds(self, total: Tensor, bootstrap: int = 0) -> Estimate:
        """Of scores (Q, N) of the evaluation queries, against the bank."""
        bank = self.bank
        return lds(total, bank.masks, bank.utility["eval"], bootstrap=bootstrap)

    def index_for(self, method: Method) -> Index:
        name = index_name(method)
        if name not in self._built:
            size = 64 if self.domain == "images" else 32
            dtype = "int8" if method.projection == "none" else "float32"
            folder, built_for = self.folder / name / "index", self.built_for[name]
            self._built[name] = self.build(folder, built_for, batch_size=size, store_dtype=dtype)
        return self._built[name]

    def features(self, method: Method, role: str) -> QueryFeatures:
        return self.index_for(method).features(self.asked(method, role), self.features_path(method, role))

    def asked(self, method: Method, role: str) -> Any:
        asked = self.queries(f"{role}{' journey' * isinstance(method, JourneyTRAK)}")
        if method.steps == 1:
            return asked
        every = (
            asked["timesteps"].shape[1] // method.steps
        )  # the steps of a sampler of fewer are some of these
        return asked | {name: asked[name][:, every - 1 :: every] for name in ("trajectory", "timesteps")}

    def features_path(self, method: Method, role: str) -> Path:
        journey = "-journey" * isinstance(method, JourneyTRAK)
        return self.folder / index_name(method) / f"{role}{journey}.safetensors"

    def damped(self, name: str, dampings: Iterable[float]) -> dict[str, tuple[float | None, Method]]:
        """A method at each damping, by title: (damping, method); one that has no damping as it is."""
        method = self.methods[name]
        if not isinstance(method, Damped):
            return {name: (None, method)}
        return {f"{name}, damping {d:g}": (d, replace(method, damping=d)) for d in dampings}

    def scores(self, method: Method, role: str) -> GroupScores:
        return self.index_for(method).score(self.features(method, role), method)

    def learn_scores(self, name: str) -> GroupScores:
        return self.scores(self.methods[name], "learn")

    def eval_scores(self, name: str) -> GroupScores:
        return self.scores(self.methods[name], "eval")

    def build(self, folder: Path, method: Method, **options: Any) -> Index:
        options = {"projection": "auto" if method.projection else PROJECTION} | options
        return Index.build(
            self.model, self.task(), self.train(), folder, method=method, groups=self.groups, memory="4GB",
            **{"store_dtype": "float32"} | options,
        )  # fmt: skip


def index_name(method: Method) -> str:
    """Methods of one name share an index."""
    features = {None: "", "none": "-whole"}.get(method.projection, f"-{method.projection}")
    return method.measure + features + f"-{method.steps}-steps" * (method.steps > 1)


# --- the banks -------------------------------------------------------------------------------------------


def _images(data_set: str, architecture: str) -> Cell:
    from experiments.shared import cifar10
    from experiments.shared.classification_bank import images

    name = f"{data_set}-{architecture}"
    source = digits if data_set == "mnist" else cifar10
    make = digits.RECIPES[architecture][0] if data_set == "mnist" else partial(cifar10.initial, architecture)
    return Cell(
        name,
        "images",
        IMAGES,
        load=lambda: kept(name, make, lambda: source.train(architecture, *images(data_set).train)),
        task=Classification,
        train=lambda: images(data_set).train,
        queries=lambda role: images(data_set).learn if role == "learn" else images(data_set).evaluate,
        built_for={"loss": TRAK(), "loss-whole": EKFAC("none")},
        defaults=WHOLE if data_set == "cifar10" else {},
    )


def _images_finetuned(architecture: str) -> Cell:
    from experiments.shared import image_finetuning as study

    return Cell(
        f"finetuned-{architecture}",
        "images",
        TEXTS,
        load=partial(study.attributed, architecture),
        task=Classification,
        train=study.train_images,
        queries=lambda role: study.images().learn if role == "learn" else study.images().evaluate,
        built_for={"loss": EKFAC("kron(32)")},
    )


def _texts_finetuned(kind: str) -> Cell:
    from experiments.shared import finetuning

    return _text(f"finetuned-{kind}", partial(finetuning.attributed, kind), lambda: finetuning.corpus()[1])


def _corpus(name: str) -> Cell:
    from experiments.shared import corpora, language

    make = partial(corpora.gpt2, corpora.VOCABULARY[name])
    load = partial(kept, f"{name}-gpt2", make, lambda: language.trained(name, "gpt2")[0])
    return _text(f"{name}-gpt2", load, partial(corpora.corpus, name))


def _text(name: str, load: Callable[[], nn.Module], data: Callable[[], Any]) -> Cell:
    return Cell(
        name,
        "text",
        TEXTS,
        load=load,
        task=CausalLM,
        train=lambda: {"input_ids": data().train},
        queries=lambda role: {"input_ids": data().learn if role == "learn" else data().evaluate},
        built_for={"loss": EKFAC("kron(32)"), "loss-whole": EKFAC("none")},
        defaults=WHOLE if name == "finetuned-gpt2" else {},
        corpus=data,
    )


def denoiser(name: str, study: ModuleType) -> Cell:
    """Of a module with `attributed`, `columns`, `GROUPS` and, for a bank, `queries`."""
    from experiments.shared import denoising
    from unde.tasks import Diffusion

    def queries(role: str) -> dict[str, Any]:
        which, _, journey = role.partition(" ")
        return study.queries(which).queries(journey == "journey")

    return Cell(
        name,
        "diffusion",
        DENOISERS,
        load=study.attributed,
        task=lambda: Diffusion(denoising.scheduler(), denoising.AVERAGED),
        train=study.columns,
        queries=queries,
        built_for={index_name(m): m for m in (DENOISERS["Journey-TRAK, per step"], TRAK(), DTRAK(), DAS())},
        groups=study.GROUPS,
    )


def _diffusion(name: str) -> Cell:
    from experiments.shared.diffusion_bank import STUDIES

    return denoiser(name, STUDIES[name])


def _robots_finetuned() -> Cell:
    from experiments.shared import robots_finetuning

    return denoiser("finetuned-unet", robots_finetuning)


def _emoji() -> Cell:
    from experiments.shared import emoji

    return denoiser("emoji", emoji)


CELLS: dict[str, Callable[[], Cell]] = {
    "mnist-resnet": lambda: _images("mnist", "resnet"),
    "mnist-vit": lambda: _images("mnist", "vit"),
    "cifar10-resnet": lambda: _images("cifar10", "resnet"),
    "cifar10-vit": lambda: _images("cifar10", "vit"),
    "sotu-gpt2": lambda: _corpus("sotu"),
    "wikitext-gpt2": lambda: _corpus("wikitext"),
    "finetuned-gpt2": lambda: _texts_finetuned("gpt2"),
    "finetuned-resnet": lambda: _images_finetuned("resnet"),
    "finetuned-vit": lambda: _images_finetuned("vit"),
    "cifar2": lambda: _diffusion("cifar2"),
    "robots": lambda: _diffusion("robots"),
    "finetuned-unet": _robots_finetuned,
    "finetuned-lora": lambda: _texts_finetuned("lora"),
}
WITHOUT_BANK = {"emoji": _emoji}  # lends weights to robots


@cache
def get(name: str) -> Cell:
    torch.set_num_threads(1)  # one thread computes the same bits on every machine of a kind
    return (CELLS | WITHOUT_BANK)[name]()
