"""Calibrate an index: retrain on random halves, choose the setting and the weights by what the models did."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from unde import console
from unde.data import Rows, choose_collate, to_device
from unde.errors import UndeError, unknown
from unde.evaluate import calibration as statistics
from unde.evaluate.bank import Bank, TrainingSpec
from unde.evaluate.bank.bank import describe_function
from unde.evaluate.bank.bank_io import ModelResult, UnfinishedBank
from unde.evaluate.bank.subsets import SubsetPlan
from unde.evaluate.bank.training import UNNAMED, EnoughModels, TrainJob, train_all
from unde.evaluate.calibration import quantile, standard_error
from unde.gradients.model_state import frozen_eval
from unde.index.calibration import BANK, LOCAL, RETRAIN, Calibration
from unde.index.ground_truth import FEWEST_HALVES, GroundTruth, parse_duration, read_bank
from unde.index.predictions import Predictor
from unde.index.settings import Setting, list_settings
from unde.index.state import IndexState
from unde.parallel import Executor
from unde.scoring.data_splits import refuse_shared
from unde.store import layout
from unde.tasks.base import Task
from unde.version import __version__
from unde.weights import Weights

FEWEST_QUERIES = 10
MOST_HALVES = 1024  # subsets of the plan: a later call may ask for more than the first
REPEATED = 2  # halves that are trained with a second seed, after the first few
SURE_FROM = statistics.FEWEST_FOR_WEIGHTS  # halves before the training may stop early
SURE_WITHIN = 0.01  # it stops when no other setting is better by more than this LDS, with 95 % confidence
BATCH = 32  # queries that go through a model at once
Retrain = Callable[[np.ndarray, int], nn.Module]


class Candidates:
    """Predictions of every setting of an index for some subsets and queries."""

    def __init__(self, opened: IndexState, queries: Rows, masks: np.ndarray) -> None:
        features = opened.runner.features(queries)
        predictor = Predictor(opened.scorer, features.features, features.digests, masks)
        curves = list_settings(opened.stored)
        self.settings: dict[str, Setting] = {}
        self.predictions: dict[str, np.ndarray] = {}
        self.curves: list[list[str]] = []
        self.refused: dict[str, str] = {}
        count = sum(map(len, curves))
        with console.progress("settings", count, unit="settings") as advance:
            for curve in curves:
                names = []
                for setting in curve:
                    try:
                        predicted = predictor.predict(setting.method, setting.terms(opened.stored))
                    except (
                        UndeError
                    ) as e:  # a kernel beyond the memory budget, a damping that rounding decides
                        self.refused[setting.name] = str(e)
                    else:
                        self.settings[setting.name] = setting
                        self.predictions[setting.name] = predicted
                        names.append(setting.name)
                    advance(1)
                self.curves += [names] if names else []
        if not self.settings:
            raise UndeError(
                f"no setting of the index can be scored; the first says: {next(iter(self.refused.values()))}"
            )

    def of(self, subsets: Sequence[int]) -> dict[str, np.ndarray]:
        """The predictions of some of the subsets."""
        return {name: p[list(subsets)] for name, p in self.predictions.items()}


def calibrate(
    opened: IndexState,
    queries: Any,
    train: Retrain | TrainingSpec | None,
    halves: int,
    budget: str | float | None,
    how: str,
    bank: Bank | tuple[Any, Any] | None,
    seed: int,
    executor: Executor,
    baselines: Mapping[str, Any] | None,
) -> Calibration:
    """See `Index.calibrate`."""
    rows = Rows(queries, choose_collate(opened.collate, queries))
    _check_queries(opened, rows)
    if bank is not None:
        masks, utility = read_bank(bank, len(rows), opened.stored.manifest.examples)
        candidates = Candidates(opened, rows, masks)
        none = np.zeros(0, dtype=np.int64)
        truth = GroundTruth(masks, utility, np.zeros((0, len(rows))), none, 0.0)
        return conclude(opened, rows, candidates, truth, BANK, seed, baselines, {})
    if how not in (RETRAIN, LOCAL):
        raise unknown("how", how, (RETRAIN, LOCAL))
    if not FEWEST_HALVES <= halves <= MOST_HALVES:
        raise UndeError(f"halves is {halves}: expected {FEWEST_HALVES} to {MOST_HALVES}, such as 8 or 16")
    retrain = _retraining(opened, train, how)
    plan = _plan(opened, rows, retrain, how, seed)
    candidates = Candidates(opened, rows, np.stack([plan.mask(s) for s in range(halves)]))
    truth = train_halves(opened, rows, plan, retrain, halves, budget, executor, candidates)
    record = {"train": plan.name, "requested halves": halves}
    candidates.predictions = candidates.of(range(len(truth.masks)))
    return conclude(opened, rows, candidates, truth, how, seed, baselines, record)


def _check_queries(opened: IndexState, rows: Rows) -> None:
    if opened.model is None or opened.task is None:
        raise UndeError("calibration asks the model about queries: open the index with model= and task=")
    if len(rows) < FEWEST_QUERIES:
        raise UndeError(
            f"{console.counted(len(rows), 'query')} cannot tell settings apart: expected at least "
            f"{FEWEST_QUERIES}, and 100 to 500 are better"
        )
    held = opened.stored.find_digests(rows.digests())
    refuse_shared(len(held), "queries", "the training data")


# --- training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class QueryUtility:
    """How well a model does on the queries: −loss, one number for each."""

    task: Task
    rows: Rows

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> torch.Tensor:
        first = next(iter(model.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        cuts = [range(a, min(a + BATCH, len(self.rows))) for a in range(0, len(self.rows), BATCH)]
        with frozen_eval(model):
            parts = [self.task.loss(model, to_device(self.rows.batch(c), device)) for c in cuts]
        return -torch.cat(parts).double().cpu()


@dataclass(frozen=True, eq=False)
class CopyModel:
    """The initial model of a continued training: a copy of the final one."""

    model: nn.Module

    def __call__(self, seed: int) -> nn.Module:
        copy = deepcopy(self.model)
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(name in trained)
        return copy


def _retraining(opened: IndexState, train: Retrain | TrainingSpec | None, how: str) -> Retrain | TrainingSpec:
    if train is None:
        raise UndeError(
            "there is no way to train: pass train=, a function (indices, seed) -> model or an "
            "unde.evaluate.TrainingSpec, or bank=(masks, utility) of models that are retrained already"
        )
    if not callable(train):
        raise UndeError(f"train is a {type(train).__name__}: expected a function (indices, seed) -> model")
    if how == RETRAIN:
        return train
    if not isinstance(train, TrainingSpec):
        raise UndeError(
            "how='local' continues the training for an epoch with its own optimizer and rate: pass train= as an "
            "unde.evaluate.TrainingSpec, which says what they are"
        )
    assert opened.model is not None
    return replace(train, model=CopyModel(opened.model), epochs=1, schedule=None, order=None)


def _plan(opened: IndexState, rows: Rows, train: Retrain, how: str, seed: int) -> SubsetPlan:
    """Which examples and seeds models get. Its name says what is trained, so that other trainings are refused."""
    asked = hashlib.sha256("".join(rows.digests()).encode()).hexdigest()[:16]
    name = f"{how}, {describe_function(train)}, index {opened.stored.manifest.id}, queries {asked}"
    return SubsetPlan(name, opened.stored.manifest.examples, MOST_HALVES, 0.5, seed, seeds_per_subset=2)


def order_of(halves: int) -> list[int]:
    """Numbers of models: those of the first seeds, and of second seeds of some after the first few.

    >>> order_of(6)
    [0, 2, 4, 6, 1, 3, 8, 10]
    """
    first = [2 * s for s in range(halves)]
    return [*first[:FEWEST_HALVES], *(2 * s + 1 for s in range(REPEATED)), *first[FEWEST_HALVES:]]


def train_halves(
    opened: IndexState,
    rows: Rows,
    plan: SubsetPlan,
    train: Retrain | TrainingSpec,
    halves: int,
    budget: str | float | None,
    executor: Executor,
    candidates: Candidates,
) -> GroundTruth:
    """Train models until there are enough; what an earlier call has trained is read."""
    assert opened.task is not None
    home = opened.stored.folder / layout.CALIBRATION_HALVES
    home.mkdir(parents=True, exist_ok=True)
    folder = UnfinishedBank.of(home / hashlib.sha256(plan.name.encode()).hexdigest()[:16])
    watcher = Watcher(candidates, halves, None if budget is None else parse_duration(budget))
    with folder.fill(plan.config()) as parts:
        job = TrainJob(
            plan, train, QueryUtility(opened.task, rows), executor.threads or torch.get_num_threads(), parts
        )
        train_all(job, executor, numbers=order_of(halves), watch=watcher)
        found = {n: part for n in order_of(halves) if (part := parts.read(n)) is not None}
    return _truth(plan, found)


def _truth(plan: SubsetPlan, found: Mapping[int, ModelResult]) -> GroundTruth:
    """Of subsets 0 … S − 1, all of which have a model; what is beyond a gap waits for the next call."""
    done = 0
    while 2 * done in found:
        done += 1
    repeated = [s for s in range(done) if 2 * s + 1 in found]
    values = {n: part.utility[UNNAMED] for n, part in found.items()}
    again = [values[2 * s + 1] for s in repeated]
    return GroundTruth(
        masks=np.stack([plan.mask(s) for s in range(done)]),
        utility=np.stack([values[2 * s] for s in range(done)]),
        second_utility=np.stack(again) if again else np.zeros((0, len(values[0]))),
        repeated=np.array(repeated, dtype=np.int64),
        seconds=float(sum(part.seconds for part in found.values())),
    )


class Watcher:
    """Watch the results of models: report the best LDS, stop when more are not needed or not affordable."""

    def __init__(self, candidates: Candidates, halves: int, budget: float | None) -> None:
        self.candidates, self.halves, self.budget = candidates, halves, budget
        self.started = time.monotonic()
        self.trained = -1  # in this call; the first look comes before the first model

    def __call__(self, found: Mapping[int, ModelResult]) -> str:
        self.trained += 1
        subsets = [s for s in range(self.halves) if 2 * s in found]
        enough = len(subsets) >= FEWEST_HALVES
        if self.budget is not None and self.trained:
            spent = time.monotonic() - self.started
            each = spent / self.trained
            if spent + each > self.budget and len(subsets) < self.halves:
                if not enough:
                    raise UndeError(
                        f"the budget of {console.duration(self.budget)} is too short for {FEWEST_HALVES} halves: a "
                        f"model takes {console.duration(each)}, and {len(subsets)} are there. Raise it, or call again: "
                        "models that are trained are kept"
                    )
                raise EnoughModels
        if not enough:
            return ""
        utility = np.stack([found[2 * s].utility[UNNAMED] for s in subsets])
        predictions = self.candidates.of(subsets)
        best = statistics.select_setting(predictions, utility, self.candidates.curves)
        if len(subsets) >= SURE_FROM and is_sure(predictions, utility, best):
            raise EnoughModels
        estimate = statistics.measure(predictions[best].sum(2), utility)
        return f"best LDS so far {100 * estimate.mean:.0f} (± {100 * (estimate.ci95_total or 0):.0f}), {best}"


def is_sure(predictions: Mapping[str, np.ndarray], utility: np.ndarray, best: str) -> bool:
    """Whether no other setting is better by more than a point, with 95 % confidence."""
    level = quantile(0.95, len(utility) - 1)
    chosen = predictions[best].sum(2)
    here, left_out = statistics.pearson(chosen, utility).mean(), statistics.jackknife(chosen, utility)
    for name, resolved in predictions.items():
        if name != best:
            total = resolved.sum(2)
            behind = float(here - statistics.pearson(total, utility).mean())
            error = standard_error(left_out - statistics.jackknife(total, utility))
            if behind + SURE_WITHIN < level * error:
                return False
    return True


# --- concluding ----------------------------------------------------------------------------------------------


def conclude(
    opened: IndexState,
    rows: Rows,
    candidates: Candidates,
    truth: GroundTruth,
    how: str,
    seed: int,
    baselines: Mapping[str, Any] | None,
    record: Mapping[str, Any],
) -> Calibration:
    """Choose, and estimate what the choice is worth."""
    predictions, utility, curves = candidates.predictions, truth.utility, candidates.curves
    if len(utility) < FEWEST_HALVES:
        raise UndeError(f"{len(utility)} retrained models are too few: expected at least {FEWEST_HALVES}")
    if not np.ptp(utility, axis=0).any():
        raise UndeError("all retrained models do equally well on every query: there is nothing to predict")
    chosen = statistics.select(predictions, utility, curves, seed)
    expected = statistics.measure(statistics.crossfit(predictions, utility, curves, seed), utility)
    ceiling = None
    if len(truth.repeated):
        ceiling = float(np.sqrt(statistics.reliability(utility, truth.second_utility, truth.repeated)))
    rated = {name: statistics.measure(p.sum(2), utility) for name, p in predictions.items()}
    digests = rows.digests()
    weights = None
    if chosen.weights is not None:
        story = {"how": "fitted to retrained models", "weight_decay": chosen.weight_decay}
        weights = Weights(torch.from_numpy(chosen.weights), list(opened.groups.names), digests, story)
    members = truth.masks.astype(np.float64)
    others = {
        name: _row(statistics.measure(members @ np.asarray(scores, dtype=np.float64).T, utility))
        for name, scores in (baselines or {}).items()
    }
    order = sorted(rated, key=lambda name: -rated[name].mean)
    return Calibration(
        setting=candidates.settings[chosen.setting],
        weights=weights,
        expected=expected,
        ceiling=ceiling,
        settings=[{"name": name, **_row(rated[name])} for name in order],
        baselines=others,
        how=how,
        halves=len(utility),
        trainings=len(utility) + len(truth.repeated) if how != BANK else 0,
        seconds=truth.seconds,
        index=opened.stored.manifest.id,
        query_digests=digests,
        provenance={
            **record,
            "seed": seed,
            "queries": len(rows),
            "examples": opened.stored.manifest.examples,
            "refused settings": candidates.refused,
            "weight_decay": chosen.weight_decay,
            "unde": __version__,
            "torch": torch.__version__,
        },
    )


def _row(estimate: Any) -> dict[str, float]:
    return {"lds": estimate.mean, "ci95": float(estimate.ci95_total)}
