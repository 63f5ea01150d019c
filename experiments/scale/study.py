"""What the settings share: a cell, as the small studies know it, that trains its own models.

A setting is a subclass that says what its model, data and queries are. All that takes long is kept in a folder of the
setting and made once: the trained model, the bank, indexes, features of queries, and each method that was measured.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.runner import machine
from experiments.scale.settings import Recipe
from experiments.shared.cells import Cell, index_name
from experiments.shared.paths import RESULTS, RUNS, computed, unfinished, write_json
from experiments.shared.sweep import sweep
from experiments.studies import group_strength, lds, loss_ablation, noise_sensitivity, transfer_methods
from unde import Index, console
from unde.data import Rows, map_tensors, to_device
from unde.devices import device_of
from unde.evaluate import Bank, TrainingSpec
from unde.evaluate.bank.training import TargetUtility
from unde.evaluate.bank.training_spec import SingleTrainer, isolated_rng
from unde.groups import trainable
from unde.methods import PAPER_DAMPINGS, Damped, Method
from unde.projection import Spec, feature_size

ALPHA = 0.5  # share of the data in a subset (B.2.1)
SWEPT = {
    "loss_ablation": loss_ablation,
    "transfer_methods": transfer_methods,
    "noise_sensitivity": noise_sensitivity,
}


@dataclass(frozen=True)
class Place:
    """What belongs to a machine and not to the paper."""

    data: str = ""  # a folder, or the name of a data set (experiments/scale/sources.py)
    model: Path | None = None  # folder of a pretrained model, or of a tokenizer
    out: Path = RUNS / "paper"
    results: Path = RESULTS / "paper"
    device: str = "cpu"
    rows: int = 16  # examples (or noisy images) on the device at once
    workers: int = 0  # processes that read images ahead
    processes: int = 1  # halves that are trained at the same time
    threads: int = 1
    memory: str | None = None  # instead of the setting's


class Study(Cell, ABC):
    """One model on one data set."""

    domain = "paper"
    exclude: tuple[str, ...] = ()

    def __init__(self, setting: Any, place: Place) -> None:
        self.setting, self.place = setting, place
        self.name, self.groups, self._built = setting.name, setting.groups, {}

    def __reduce__(self) -> Any:
        """Other processes get what the study was made from and read the rest themselves."""
        return type(self), (self.setting, self.place)

    # --- what a setting says, beside `task` and `methods` --------------------------------------------------

    @abstractmethod
    def blank(self) -> nn.Module:
        """The model before training; always with the same initial weights."""

    @abstractmethod
    def train(self) -> Any:
        """All training examples, as an index gets them."""

    @abstractmethod
    def queries(self, role: str) -> Any:
        """The queries of a role, "learn" or "eval"; "… journey" with trajectories."""

    def examples(self) -> Any:
        """All training examples, as training gets them."""
        return self.train()

    def prepare(self, batch: Any, draws: torch.Generator) -> Any:
        """What a model sees of a batch of `examples` in a step of training."""
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """(n,) losses that training minimises."""
        return self.task().loss(model, batch)

    # --- kept in a folder ---------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """Another one for another setting, data or pretrained model."""
        origin = f"{self.setting!r} {self.place.data} {self.place.model}"
        return self.place.out / f"{self.name}-{hashlib.blake2b(origin.encode(), digest_size=4).hexdigest()}"

    @cached_property
    def count(self) -> int:
        return len(Rows(self.train()))

    def load(self) -> nn.Module:
        return self.trained[0]

    @cached_property
    def trained(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model that is attributed, with the state of its optimizer; trained once, on all examples."""
        path, model = self.folder / "model.pt", self.blank().to(self.place.device)
        if not path.exists():
            trainer = self.fit(np.arange(self.count), 0)
            own = {*trainable(trainer.model), *(name for name, _ in trainer.model.named_buffers())}
            state = {name: v for name, v in trainer.model.state_dict().items() if name in own}
            with unfinished(path) as part:
                torch.save({"model": state, "optimizer": trainer.optimizer.state_dict()}, part)
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"], strict=False)
        return model.eval(), saved["optimizer"]

    def fit(self, indices: np.ndarray, seed: int, rows: int | None = None) -> SingleTrainer:
        """Trains on these examples, `rows` of them at a time."""
        recipe: Recipe = self.setting.recipe
        spec = TrainingSpec(
            model=lambda seed: self.blank().to(self.place.device), data=self.examples, loss=self.loss,
            optimizer=partial(optimizer_of, recipe=recipe), schedule=partial(schedule_of, recipe=recipe),
            epochs=recipe.epochs, batch_size=recipe.batch_size, clip=recipe.max_grad_norm, prepare=self.prepare,
        )  # fmt: skip
        steps = recipe.epochs * -(-len(indices) // recipe.batch_size)
        with isolated_rng(seed), console.progress(f"training {self.name}", steps, unit="steps") as advance:
            trainer = PartTrainer(spec, indices, seed)
            trainer.rows = rows or self.place.rows
            for batch in trainer.batches:
                trainer.backward(batch)
                trainer.step()
                advance(1)
            trainer.finish()
        return trainer

    def index_for(self, method: Method) -> Index:
        """One for all methods on the same measurement and projection; the most demanding of them builds it."""
        name, place = index_name(method), self.place
        if name not in self._built:
            those = [m for m in self.methods.values() if index_name(m) == name]
            builder = max(those or [method], key=lambda m: (m.factors, bool(m.extra_measures)))
            dtype = getattr(self.setting, "store_dtype", "float32")
            self._built[name] = Index.build(
                self.model, self.task(), self.train(), self.folder / name / "index", method=builder,
                groups=self.groups, exclude=self.exclude, batch_size=place.rows, num_workers=place.workers,
                store_dtype=dtype, memory=place.memory or self.setting.memory,
            )  # fmt: skip
        return self._built[name]

    @cached_property
    def bank(self) -> Bank:
        self._utility  # noqa: B018  generated queries are there before other processes look for them
        return Bank.run(
            self.folder / "bank.npz", train=self.train_half, utility=self.utility, n_train=self.count,
            subsets=self.setting.subsets, alpha=ALPHA, processes=self.place.processes, threads=self.place.threads,
            name=f"{self.name}, {self.setting!r}",
        )  # fmt: skip

    def train_half(self, indices: np.ndarray, seed: int) -> nn.Module:
        return self.fit(indices, seed).model

    def utility(self, model: nn.Module) -> dict[str, Tensor]:
        """How well a retrained model does on the queries of both roles."""
        return self._utility(model)

    @cached_property
    def _utility(self) -> TargetUtility:
        return TargetUtility(self.task(), {role: self.queries(role) for role in ("learn", "eval")})

    # --- studies ------------------------------------------------------------------------------------------

    def measure(self, name: str, parts: Mapping[str, Callable[[], Any]]) -> Path:
        """NAME.json with what each part gives; what was measured before is not measured again."""
        folder = self.folder / "measured" / name
        found = {title: computed(folder / f"{title}.json", part) for title, part in parts.items()}
        provenance = {"setting": repr(self.setting), "examples": self.count, **machine()}
        path = self.place.results / f"{self.name}-{name}.json"
        write_json(path, {"results": found, "provenance": provenance})
        return path

    def measure_methods(self, name: str, part: Callable[[str], Any], **more: Callable[[], Any]) -> Path:
        return self.measure(name, {**more, **{title: partial(part, title) for title in self.methods}})

    def run_lds(self) -> Path:
        """The paper's LDS table and Table 9: λ, k and λ′ searched, with all columns of the study `lds`."""

        def entry(title: str) -> dict[str, Any]:
            method = self.methods[title]
            if not isinstance(method, Damped):
                return lds.measure(self, [method])
            return lds.measure(self, [replace(method, damping=d, relative=False) for d in PAPER_DAMPINGS])

        return self.measure_methods("lds", entry, bank=self.describe_bank)

    def run_ablations(self) -> Path:
        """Tables 10 and 12, Figures 1 and 7: other objectives and methods' weights, single groups, noise."""
        parts = {name: partial(sweep, self, study.learn) for name, study in SWEPT.items()}
        return self.measure("ablations", {**parts, "group_strength": partial(group_strength.measure, self)})

    def describe_bank(self) -> dict[str, Any]:
        masks = self.bank.masks
        return {
            "subsets": len(masks),
            "in each": int(masks[0].sum()),
            "seconds": float(self.bank.seconds.mean()),
        }


class PartTrainer(SingleTrainer):
    """A batch goes through the model in parts of `rows` examples, whose gradients add up."""

    rows: int

    def backward(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        sizes: list[int] = []
        map_tensors(batch, lambda x: sizes.append(len(x)))
        total = torch.zeros(())
        for start in range(0, sizes[0], self.rows):
            some = slice(start, start + self.rows)
            part = to_device(map_tensors(batch, lambda x, some=some: x[some]), device_of(self.model))
            losses = self.spec.loss(self.model, part)
            (losses.sum() / sizes[0]).backward()
            total += losses.detach().sum().cpu() / sizes[0]
        return total


def optimizer_of(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer of training; a tail-patch step makes it again."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
    return torch.optim.AdamW(parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay)


def schedule_of(optimizer: torch.optim.Optimizer, steps: int, recipe: Recipe) -> LambdaLR:
    return LambdaLR(optimizer, partial(share_of_peak, steps, recipe))


def share_of_peak(steps: int, recipe: Recipe, step: int) -> float:
    """Of the learning rate: a linear warm-up, then a cosine."""
    warm = round(recipe.warm_up * steps)
    if step < warm:
        return (step + 1) / warm
    return recipe.final + (1 - recipe.final) * 0.5 * (
        1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))
    )


def closest(model: nn.Module, features: int) -> str:
    """The two-sided projection whose features are closest in number to k of the paper."""
    shapes = dict(model.named_parameters())
    named = [tuple(shapes[name].shape) for name in trainable(model)]
    widths = {r: sum(feature_size(Spec("kron", r), shape) for shape in named) for r in range(1, 129)}
    return f"kron({min(widths, key=lambda r: abs(widths[r] - features))})"


def initial(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Always the same initial weights, whoever drew random numbers before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
