"""What the settings share: where things are, indexes, scores, the bank of halves, and LDS.

A setting is a subclass that says what its model, task, data and queries are. All that takes long is kept in the
folder `out` and made once: the trained model, the bank, indexes, features of queries, generated images.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.scale import findings
from experiments.scale.findings import Learned
from experiments.scale.sources import Source
from experiments.scale.training import Loss, State, fit
from experiments.shared.cells import Cell
from experiments.shared.paths import RESULTS, RUNS, unfinished
from experiments.shared.sweep import sweep
from experiments.studies import group_strength, lds, loss_ablation, noise_sensitivity, transfer_methods
from unde import Index, learn_weights
from unde.errors import UndeError
from unde.evaluate import Bank
from unde.groups import trainable
from unde.methods import PAPER_DAMPINGS, Damped, Method
from unde.projection import Spec, feature_size
from unde.scoring import GroupScores
from unde.tasks.base import Task

ALPHA = 0.5  # share of the data in a subset (B.2.1)


@dataclass(frozen=True)
class Place:
    """What belongs to a machine and not to the paper."""

    source: Source = field(default_factory=Source)
    model: Path | None = None  # folder of a pretrained model, or of a tokenizer
    out: Path = RUNS / "paper"
    results: Path = RESULTS / "paper"
    device: str = "cpu"
    rows: int = 16  # examples (or noisy images) on the device at once
    workers: int = 0  # processes that read images ahead
    processes: int = 1  # halves that are trained at the same time
    threads: int = 1
    memory: str | None = None  # instead of the setting's
    fewer: bool = False


class Study(ABC):
    """One model on one data set."""

    GIVEN = ("setting", "place", "name", "title", "corrupted", "fine")
    name: str  # of results and of the folder in `out`
    task: Task

    def __init__(self, setting: Any, place: Place) -> None:
        self.setting, self.place = setting, place
        self._indexes: dict[Any, Index] = {}
        self._trained: tuple[nn.Module, State] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get what the study was made from and read the rest themselves."""
        given = {key: value for key, value in vars(self).items() if key in self.GIVEN}
        return {**given, "_indexes": {}, "_trained": None}

    # --- what a setting says -----------------------------------------------------------------------------

    @abstractmethod
    def blank(self) -> nn.Module:
        """The model before training; always with the same initial weights."""

    @abstractmethod
    def train(self, model: nn.Module, rows: np.ndarray, seed: int, checkpoint: Path) -> State:
        """Trains the model on the examples `rows`; the state of the optimizer."""

    @abstractmethod
    def train_data(self) -> Any:
        """All training examples, as an index gets them."""

    @abstractmethod
    def queries(self, role: str, method: Method | None = None) -> Any:
        """The queries of a role, "learn" or "eval"."""

    @abstractmethod
    def methods(self, model: nn.Module) -> dict[str, Method]:
        """By the names of the paper's tables; the model may be on the meta device."""

    # --- kept in `out` -----------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.place.out / self.name

    @property
    def n_train(self) -> int:
        return len(self.train_data())

    def begin(self) -> None:
        """Refuses a folder that was begun under another setting."""
        file, now = self.folder / "setting.json", {"setting": repr(self.setting), **self.origin()}
        if file.exists():
            before = json.loads(file.read_text())
            differ = [key for key in now if before.get(key) != now[key]]
            if differ:
                raise UndeError(
                    f"{self.folder} was begun with {differ[0]} {before.get(differ[0])}, not {now[differ[0]]}: "
                    "choose another --out, or delete it"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(now, indent=1) + "\n")

    def origin(self) -> dict[str, str]:
        return {"data": str(self.place.source), "model": str(self.place.model)}

    def trained(self) -> tuple[nn.Module, State]:
        """The model that is attributed, with the state of its optimizer; trained once, on all examples."""
        self._trained = self._trained or self._made()
        return self._trained

    def _made(self) -> tuple[nn.Module, State]:
        path, model = self.folder / "model.pt", self.blank().to(self.place.device)
        if path.exists():
            saved = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(saved["model"], strict=False)
            return model.eval(), saved["optimizer"]
        checkpoint = self.folder / "training.pt"
        state = self.train(model, np.arange(self.n_train), 0, checkpoint)
        own = {*trainable(model), *(name for name, _ in model.named_buffers())}
        with unfinished(path) as part:
            kept = {k: v for k, v in model.state_dict().items() if k in own}
            torch.save({"model": kept, "optimizer": state}, part)
        checkpoint.unlink(missing_ok=True)
        return model, state

    def index(self, model: nn.Module, method: Method) -> Index:
        """One for all methods on the same measurement and projection; the most demanding of them builds it."""
        key = (method.measure, method.projection, method.steps)
        if key not in self._indexes:
            those = [m for m in self.methods(model).values() if (m.measure, m.projection, m.steps) == key]
            builder = max(those or [method], key=lambda m: (m.factors, bool(m.extra_measures)))
            short = f"{method.measure}-{method.projection}".replace("(", "").replace(")", "")
            self._indexes[key] = Index.build(
                model,
                self.task,
                self.train_data(),
                self.folder / f"index-{short}",
                method=builder,
                groups=self.setting.groups,
                exclude=self.exclude,
                batch_size=self.place.rows,
                num_workers=self.place.workers,
                store_dtype=getattr(self.setting, "store_dtype", "float32"),
                memory=self.memory,
            )
        return self._indexes[key]

    @property
    def memory(self) -> str:
        return self.place.memory or self.setting.memory

    @property
    def exclude(self) -> tuple[str, ...]:
        return getattr(self.setting, "exclude", ())

    def scores(self, index: Index, method: Method, role: str) -> GroupScores:
        """Of the queries of a role, whose features are kept beside the index."""
        journey = "-journey" if method.name == "journey-trak" else ""
        path = index.folder.with_name(f"{index.folder.name}-{role}{journey}.safetensors")
        return index.score(index.features(self.queries(role, method), path), method)

    def learned(self, title: str, method: Method) -> Learned:
        index = self.index(self.trained()[0], method)
        return Learned(title, method, index, learn_weights(self.scores(index, method, "learn")))

    def measure_methods(self, name: str, entry: Callable[[Learned], dict[str, Any]], **results: Any) -> Path:
        """NAME.json, written after each method, of which `entry` gives a part."""
        results = {"methods": {}, "bank": None, **results}
        path = self.place.results / f"{name}.json"
        for title, method in self.methods(self.trained()[0]).items():
            results["methods"][title] = entry(self.learned(title, method))
            path = findings.write(self.place.results, name, results, self.setting)
        return path

    def fit(
        self, model: nn.Module, loss: Loss, count: int, seed: int, checkpoint: Path, rows: int | None = None
    ) -> State:
        rows = rows or self.place.rows
        recipe = self.setting.recipe
        return fit(model, loss, count, recipe, seed=seed, rows=rows, checkpoint=checkpoint, title=self.name)

    # --- LDS ---------------------------------------------------------------------------------------------

    def utility(self, model: nn.Module) -> dict[str, Tensor]:
        """How well a retrained model does on the queries of both roles: − loss; where models are retrained."""
        return {
            role: -losses(self.task, model, self.queries(role), self.place.rows, self.place.device)
            for role in ("learn", "eval")
        }

    def train_half(self, indices: np.ndarray, seed: int) -> nn.Module:
        checkpoint = self.folder / "halves" / f"{seed}.pt"
        model = self.blank().to(self.place.device)
        self.train(model, indices, seed, checkpoint)
        checkpoint.unlink(missing_ok=True)
        return model

    def bank(self) -> Bank:
        return Bank.run(
            self.folder / "bank.npz",
            train=self.train_half,
            utility=self.utility,
            n_train=self.n_train,
            subsets=self.setting.subsets,
            alpha=ALPHA,
            processes=self.place.processes,
            threads=self.place.threads,
            name=f"{self.name}, {self.setting!r}",
        )

    def lds(self) -> Path:
        """The paper's LDS table and Table 9: λ, k and λ′ searched, with all columns of the study `lds`."""
        cell = self.cell()

        def entry(method: Method) -> dict[str, Any]:
            if not isinstance(method, Damped):
                return lds.measure(cell, [method])
            return lds.measure(cell, [replace(method, damping=d, relative=False) for d in PAPER_DAMPINGS])

        return self._measured(self.name, {title: partial(entry, m) for title, m in cell.methods.items()})

    def ablations(self) -> Path:
        """Tables 10 and 12, Figures 1 and 7: other objectives and methods' weights, single groups, noise."""
        cell = self.cell()
        studies = {"loss_ablation": loss_ablation, "transfer_methods": transfer_methods}
        studies |= {"noise_sensitivity": noise_sensitivity}
        parts = {name: partial(sweep, cell, study.learn) for name, study in studies.items()}
        parts["group_strength"] = partial(group_strength.measure, cell)
        return self._measured(f"{self.name}-ablations", parts)

    def _measured(self, name: str, parts: Mapping[str, Callable[[], Any]]) -> Path:
        """NAME.json, written after each part."""
        results = {"methods": {}, "bank": findings.bank_entry(self.bank())}
        for title, part in parts.items():
            results["methods"][title] = part()
            path = findings.write(self.place.results, name, results, self.setting)
        return path

    def cell(self) -> Cell:
        self.begin()
        return StudyCell(self)


class StudyCell(Cell):
    """A study as the small ones see a bank."""

    def __init__(self, study: Study) -> None:
        model = study.trained()[0]
        super().__init__(
            study.name, "paper", study.methods(model), load=lambda: model, task=lambda: study.task,
            train=study.train_data, queries=study.queries, built_for={},
        )  # fmt: skip
        self.study = study

    @cached_property
    def bank(self) -> Bank:
        return self.study.bank()

    def scores(self, method: Method, role: str) -> GroupScores:
        return self.study.scores(self.study.index(self.model, method), method, role)


def closest(model: nn.Module, features: int, exclude: tuple[str, ...] = ()) -> str:
    """The two-sided projection whose features are closest in number to k of the paper."""
    shapes = dict(model.named_parameters())
    named = [tuple(shapes[name].shape) for name in trainable(model, exclude)]

    def width(r: int) -> int:
        return sum(feature_size(Spec("kron", r), shape) for shape in named)

    r = 1
    while width(r) < features and width(r + 1) > width(r):
        r += 1
    best = min((r - 1, r), key=lambda side: abs(width(side) - features)) if r > 1 else 1
    return f"kron({best})"


def initial(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Always the same initial weights, whoever drew random numbers before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def losses(
    task: Task, model: nn.Module, queries: Mapping[str, Tensor] | Any, rows: int, device: str
) -> Tensor:
    """(Q,) of the task's loss, some queries at a time."""
    from unde.data import Rows, to_device

    data, parts = Rows(queries, task.collate), []
    with torch.no_grad():
        for start in range(0, len(data), rows):
            batch = data.batch(range(start, min(start + rows, len(data))))
            parts.append(task.loss(model, to_device(batch, torch.device(device))).float().cpu())
    return torch.cat(parts)
