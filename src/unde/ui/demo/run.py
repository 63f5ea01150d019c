"""The demo: fine-tune a small vision transformer, calibrate on retrained halves, and show what weights do."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from unde import console
from unde.data import Rows
from unde.evaluate import Bank, Estimate, TrainingSpec, lds, mislabel_auc
from unde.evaluate.baselines import baseline_scores
from unde.evaluate.compare import Comparison, compare
from unde.gradients.feature_pass import torch_threads
from unde.index import Index
from unde.index.calibration import Calibration
from unde.integrations.source import ModelSource
from unde.scoring import GroupScores
from unde.setup import Setup
from unde.tasks import Classification
from unde.ui.demo import finetuned
from unde.ui.demo.finetuned import CORRUPTED, TRAINED, DigitRoles, accuracy, digits
from unde.ui.report import Page, ResultTable, Step, meaning
from unde.ui.report.labels_page import LabelReview
from unde.ui.report.panels import predictions, query_panels
from unde.ui.report.summary import Change, Measured, SummaryPanel
from unde.ui.report.weights import weights_panel
from unde.version import __version__
from unde.weights import Weights

Ways = dict[str, Weights | None]  # of scoring, by name

PROCESSES, STACKED = min(2, os.cpu_count() or 1), 32
CALIBRATE, JUDGE = 24, 40  # retrained halves: to choose and fit by, and to judge by
SHOWN, FIRST = 12, 2  # queries on the page, and in its summary
SUSPECTS = 40  # digits whose labels are doubted
TOP = 10
BOOTSTRAP = 1000  # resamplings of the models, for intervals
MODEL = "model.safetensors"
PROJECT = """\"\"\"What the demo was made of, for other commands: unde serve demo.project:make --index demo/index\"\"\"

from pathlib import Path

from unde.ui.demo.run import project


def make():
    return project(Path(__file__).parent, seed={seed})
"""
WEIGHED = "Weights above 1 mark layers whose gradients say more about what retrained models did."


class Clock:
    """The steps that were run and how long each took."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @contextmanager
    def step(self, name: str, note: str = "") -> Generator[None]:
        console.say(f"[bold]{name}[/] …")
        started = time.perf_counter()
        yield
        self.steps.append(Step(name, time.perf_counter() - started, note))


@dataclass(frozen=True)
class Judgement:
    """What the second half of the retrained models says of the scores of held-out digits."""

    baselines: dict[str, Estimate]
    built: Estimate  # of the method that the index was built for, unweighted
    compared: Comparison  # of the calibrated setting, without and with its weights

    @property
    def gain(self) -> str:
        """The difference that weights make, in points with a 95 % interval over queries and models."""
        e = self.compared.difference
        return f"{100 * e.mean:+.1f} ± {100 * _half(e):.1f}".replace("-", "−")

    @property
    def significant(self) -> bool:
        return self.compared.difference.mean > _half(self.compared.difference)


def run(out: Path, method: str = "tracin", seed: int = 0) -> Path:
    """Train, index, retrain halves, calibrate, judge, attribute, find wrong labels; write `out/report.html`."""
    clock = Clock()
    if (out / "index" / "manifest.json").exists():  # of an earlier demo: this one trains its model anew
        shutil.rmtree(out / "index")
    data = digits(seed)
    with clock.step("Pretrain a vision transformer", "on the digits 0 to 4 of scikit-learn"):
        pretrained = _train(finetuned.pretraining(data), len(data.pretrain[1]), seed)
    training = finetuned.finetuning(pretrained, data)
    wrong = f"{TRAINED} digits from 5 to 9, {CORRUPTED:.0%} of their labels wrong on purpose"
    with clock.step("Fine-tune it", wrong):
        model = _train(training, TRAINED, seed).eval()
    setup = _setup(model, data)
    with clock.step("Build the index", "whole gradients of every training digit, layer by layer"):
        index = Index.build(
            model, setup.task, data.train, out / "index", method=method, projection="none", seed=seed
        )
    _remember(out, model, index, seed)
    with clock.step(
        "Retrain on random halves", f"{CALIBRATE} to calibrate, {JUDGE} others to judge the result"
    ):
        bank = _retrain(out / "halves.npz", training, data, seed)
    with clock.step("Calibrate", f"choose setting and weights by {CALIBRATE} retrained models"):
        seen = bank.masks[:CALIBRATE], bank.utility["calibrate"][:CALIBRATE]
        calibration = index.calibrate(queries=data.calibrate, bank=seen, seed=seed)
        weights = calibration.weights or Weights.uniform(index.groups.names)
        weights.save(out / "weights.json")
    with clock.step("Judge it", f"by the other {JUDGE} models, on {len(data.evaluate[1])} other digits"):
        scores = index.score(data.evaluate)
        judgement = _judge(index, scores, weights, data, bank)
    ways: Ways = {"unweighted": Weights.uniform(scores.groups), "weighted": weights}
    with clock.step("Attribute held-out digits"):
        queries = Rows(data.evaluate)
        panels = query_panels(setup, queries, scores, ways, which=_interesting(setup, queries))
    with clock.step("Look for wrong labels", "by the labels of similar digits, beside other rankings"):
        labels = LabelReview(index, setup, weights, count=SUSPECTS, details=False).panel()
        suspicion = {name: index.self_influence(w, method=calibration.method) for name, w in ways.items()}
    verdict = _verdict(judgement, calibration)
    console.say(verdict)
    page = Page(
        "Which training digits made it say that?",
        f"A vision transformer fine-tuned on {TRAINED} handwritten digits, right on "
        f"{accuracy(model, *data.evaluate):.0%} of {len(data.evaluate[1])} held-out ones.",
        summary=SummaryPanel(
            verdict,
            panels[:FIRST],
            _measured(judgement, calibration),
            weights_panel(weights),
            _changes(scores, weights, suspicion, data),
            f"LDS in %: the rank correlation of what scores predict and what {JUDGE} models did that were retrained on "
            "random halves; 95 % intervals over digits and models. None of these models or digits was used to choose.",
        ),
        queries=panels,
        calibration=calibration,
        weights=[weights_panel(weights, WEIGHED)],
        mislabelled=labels,
        tables=[_table(judgement, calibration), _agreement(scores, ways, data)],
        steps=clock.steps,
        meaning=meaning(scores.method, setup.task),
        provenance=_provenance(seed, index),
    )
    return page.write(out / "report.html")


def project(folder: Path, seed: int) -> Setup:
    """The model of an earlier demo and its digits, as a setup for other commands."""
    model = finetuned.vit()
    load_model(model, folder / MODEL)
    return _setup(model.eval(), digits(seed))


def _setup(model: nn.Module, data: DigitRoles) -> Setup:
    return Setup(
        model,
        Classification(),
        data.train,
        learn_queries=data.calibrate,
        eval_queries=data.evaluate,
        true_labels=data.true_labels,
    )


def _train(training: TrainingSpec, examples: int, seed: int) -> nn.Module:
    """With one thread, as the halves are trained: the model does not depend on how many cores there are."""
    with torch_threads(1):
        return training(np.arange(examples), seed)


def _retrain(path: Path, training: TrainingSpec, data: DigitRoles, seed: int) -> Bank:
    """Models on random halves; those of an earlier demo are trained anew, as its model is."""
    path.unlink(missing_ok=True)
    halves = CALIBRATE + JUDGE
    return Bank.run(
        path,
        train=training,
        utility=partial(finetuned.utilities, data=data),
        n_train=TRAINED,
        subsets=halves,
        seed=seed,
        stacked=STACKED,
        processes=PROCESSES,
    )


def _judge(index: Index, scores: GroupScores, weights: Weights, data: DigitRoles, bank: Bank) -> Judgement:
    truth = bank.masks[CALIBRATE:], bank.utility["evaluate"][CALIBRATE:]
    built = index.score(data.evaluate, method=index.method).total()
    simple = baseline_scores(index.model, index.task, data.train, data.evaluate)
    return Judgement(
        {name: lds(values, *truth, bootstrap=BOOTSTRAP) for name, values in simple.items()},
        lds(built, *truth, bootstrap=BOOTSTRAP),
        compare(scores, weights, *truth),
    )


def _half(estimate: Estimate) -> float:
    return estimate.ci95 if estimate.ci95_total is None else estimate.ci95_total


def _verdict(judgement: Judgement, calibration: Calibration) -> str:
    before, after = (100 * e.mean for e in (judgement.compared.unweighted, judgement.compared.weighted))
    if calibration.weights is None:
        return "Weights stayed uniform: the retrained models did not show that weights help here."
    words = "Learned weights raise" if judgement.significant else "Learned weights change"
    return (
        f"{words} the LDS of {calibration.setting.name} from {before:.1f} to {after:.1f} ({judgement.gain} points) on "
        "models and digits that they were not fitted to."
    )


def _measured(judgement: Judgement, calibration: Calibration) -> list[Measured]:
    return [
        Measured(name, 100 * e.mean, 100 * _half(e), kind) for name, e, kind in _rows(judgement, calibration)
    ]


def _rows(judgement: Judgement, calibration: Calibration) -> list[tuple[str, Estimate, str]]:
    both, chosen = judgement.compared, calibration.setting.name
    simple = [(name, e, "baseline") for name, e in judgement.baselines.items()]
    built = [("TracIn, unweighted", judgement.built, "")] if chosen != "TracIn" else []
    plain = (f"{chosen}, unweighted", both.unweighted, "")
    return [*simple, *built, plain, (f"{chosen}, weighted", both.weighted, "after")]


def _changes(
    scores: GroupScores, weights: Weights, suspicion: dict[str, Tensor], data: DigitRoles
) -> list[Change]:
    plain, weighted = (scores.top(TOP, w).indices for w in (Weights.uniform(scores.groups), weights))
    kept = (plain[:, :, None] == weighted[:, None, :]).any(2).float().sum(1).mean()
    wrong = data.train[1] != data.true_labels
    found = [f"{int(wrong[s.topk(SUSPECTS).indices].sum())} of {SUSPECTS}" for s in suspicion.values()]
    areas = [f"{mislabel_auc(s, wrong):.3f}" for s in suspicion.values()]
    return [
        Change(f"same digits among the top {TOP}", "", f"{kept:.1f}"),
        Change("wrong labels of highest self-influence", *found),
        Change("AUC of finding wrong labels", *areas),
    ]


def _table(judgement: Judgement, calibration: Calibration) -> ResultTable:
    rows = [
        [name, f"{100 * e.mean:.1f} ± {100 * e.ci95:.1f}", f"± {100 * _half(e):.1f}"]
        for name, e, _ in _rows(judgement, calibration)
    ]
    difference = judgement.compared.difference
    rows.append(
        [
            "weights add",
            judgement.gain.split(" ±")[0] + f" ± {100 * difference.ci95:.1f}",
            f"± {100 * _half(difference):.1f}",
        ]
    )
    return ResultTable(
        f"LDS, % of {JUDGE} retrained models",
        ["scores", "over queries", "over queries and models"],
        rows,
        note="The models and digits that judge were used for nothing else. Intervals are 95 %.",
    )


def _remember(out: Path, model: nn.Module, index: Index, seed: int) -> None:
    """Files with which other commands find the demo: `unde serve --index demo/index`, from the same folder."""
    save_model(model, str(out / MODEL))
    (out / "project.py").write_text(PROJECT.format(seed=seed), encoding="utf-8")
    if not out.is_absolute() and all(part.isidentifier() for part in out.parts):
        ModelSource(target=".".join([*out.parts, "project:make"])).save(index.folder)


def _interesting(setup: Setup, queries: Rows) -> list[int]:
    """A right answer and a wrong one first, then more wrong ones, then a right one for each digit."""
    labels = [int(queries[q][1]) for q in range(len(queries))]
    predicted = predictions(setup, queries) or labels
    wrong = [q for q in range(len(queries)) if predicted[q] != labels[q]]
    right = [q for q in range(len(queries)) if predicted[q] == labels[q]]
    firsts = [next(q for q in right if labels[q] == label) for label in sorted({labels[q] for q in right})]
    chosen = [*firsts[:1], *wrong[: SHOWN // 2], *firsts[1:]]
    return chosen[:SHOWN]


def _agreement(scores: GroupScores, ways: Ways, data: DigitRoles) -> ResultTable:
    """How often a proponent shows the digit that the query shows: a sanity check that needs no retraining."""
    truth, asked = data.true_labels, data.evaluate[1]
    rows = []
    for name, w in ways.items():
        top = scores.top(TOP, w).indices
        same = (truth[top] == asked[:, None]).float().mean(1)
        rows.append([name, f"{100 * same.mean():.1f} ± {196 * same.std() / len(same) ** 0.5:.1f}"])
    return ResultTable(
        "Proponents that show the query's digit",
        ["scores", f"% of the top {TOP}"],
        rows,
        note="Mean over the held-out digits with its 95 % interval. It shows what kind of digits are listed: "
        "whether scores predict retrained models is what LDS says.",
    )


def _provenance(seed: int, index: Index) -> dict[str, object]:
    return {
        "unde": __version__,
        "command": "unde demo",
        "method": str(index.method),
        "index": f"{len(index):,} examples × {index.manifest.width:,} features in {len(index.groups)} groups",
        "seed": seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "data": "sklearn.datasets.load_digits(): 1,797 digits of 8 × 8 pixels, enlarged",
    }
