"""Calibrate an index: retrain on random halves, choose the setting and the weights by what the models did.

A setting predicts

    prediction(s, q, j) = Σ_c η_c ⟨ g_j(q), [K_c Σ_{n ∈ s} g(n)]_j ⟩

Scores are linear in the training features, so S subset sums replace N examples: one pass over the stored features
serves all methods and dampings, and each of them costs one kernel applied to S rows.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows
from unde.devices import double_device, put
from unde.errors import UndeError, unknown
from unde.evaluate import calibration as statistics
from unde.evaluate.bank import Bank, TrainingSpec
from unde.evaluate.bank.bank import describe_function
from unde.evaluate.bank.bank_io import ModelResult, UnfinishedBank
from unde.evaluate.bank.subsets import SubsetPlan
from unde.evaluate.bank.training import UNNAMED, EnoughModels, QueryUtility, TrainJob, train_all
from unde.evaluate.calibration import quantile, standard_error
from unde.evaluate.ground_truth import FEWEST_HALVES, GroundTruth, parse_bank
from unde.index.calibration import BANK, FITTED, LOCAL, RETRAIN, Calibration, Setting, list_settings
from unde.index.kernel_cache import KernelCache
from unde.index.reader import FeatureSource
from unde.index.scorer import Scorer
from unde.index.state import IndexState
from unde.methods import Method
from unde.parallel import Executor
from unde.scoring.data_splits import refuse_shared
from unde.store import layout
from unde.version import __version__
from unde.weights import Weights

FEWEST_QUERIES = 10
MOST_HALVES = 1024  # subsets of the plan: a later call may ask for more than the first
REPEATED = 2  # halves that are trained with a second seed, after the first few
SURE_FROM = statistics.FEWEST_FOR_WEIGHTS  # halves before the training may stop early
SURE_WITHIN = 0.01  # it stops when no other setting is better by more than this LDS, with 95 % confidence
Retrain = Callable[[np.ndarray, int], nn.Module]


@dataclass(frozen=True)
class Calibrator:
    """Calibrate an index on some queries; see `Index.calibrate`."""

    opened: IndexState
    rows: Rows  # queries
    seed: int
    baselines: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.opened.inputs("calibration asks the model about queries")
        if len(self.rows) < FEWEST_QUERIES:
            raise UndeError(
                f"{console.counted(len(self.rows), 'query')} cannot tell settings apart: expected at least "
                f"{FEWEST_QUERIES}, and 100 to 500 are better"
            )
        held = self.opened.stored.find_digests(self.rows.digests())
        refuse_shared(len(held), "queries", "the training data")

    def with_bank(self, bank: Bank | tuple[Any, Any]) -> Calibration:
        """Calibrate by models that are retrained already."""
        truth = parse_bank(bank, len(self.rows), self.opened.stored.manifest.examples)
        return self._conclude(Candidates(self.opened, self.rows, truth.masks), truth, BANK, {})

    def with_training(
        self,
        train: Retrain | TrainingSpec | None,
        halves: int,
        budget: str | float | None,
        how: str,
        executor: Executor,
    ) -> Calibration:
        """Train models until there are enough; what an earlier call has trained is read."""
        if how not in (RETRAIN, LOCAL):
            raise unknown("how", how, (RETRAIN, LOCAL))
        if not FEWEST_HALVES <= halves <= MOST_HALVES:
            raise UndeError(f"halves is {halves}: expected {FEWEST_HALVES} to {MOST_HALVES}, such as 8 or 16")
        retrain = _retraining(self.opened, train, how)
        plan = self._plan(retrain, how)
        candidates = Candidates(self.opened, self.rows, np.stack([plan.mask(s) for s in range(halves)]))
        watcher = Watcher(candidates, halves, None if budget is None else parse_duration(budget))
        truth = self._train(plan, retrain, watcher, executor)
        candidates.predictions = candidates.of(range(len(truth.masks)))
        return self._conclude(candidates, truth, how, {"train": plan.name, "requested halves": halves})

    def _plan(self, train: Retrain, how: str) -> SubsetPlan:
        """Which examples and seeds models get. Its name says what is trained, so that other trainings are refused."""
        m, digests = self.opened.stored.manifest, "".join(self.rows.digests())
        asked = hashlib.sha256(digests.encode()).hexdigest()[:16]
        name = f"{how}, {describe_function(train)}, index {m.id}, queries {asked}"
        return SubsetPlan(name, m.examples, MOST_HALVES, 0.5, self.seed, seeds_per_subset=2)

    def _train(
        self, plan: SubsetPlan, train: Retrain | TrainingSpec, watcher: Watcher, executor: Executor
    ) -> GroundTruth:
        assert self.opened.task is not None
        home = self.opened.stored.folder / layout.CALIBRATION_HALVES
        home.mkdir(parents=True, exist_ok=True)
        folder = UnfinishedBank.of(home / hashlib.sha256(plan.name.encode()).hexdigest()[:16])
        utility, threads = QueryUtility(self.opened.task, self.rows), executor.threads
        order = order_of(watcher.halves)
        with folder.fill(plan.config()) as parts:
            job = TrainJob(plan, train, utility, threads or torch.get_num_threads(), parts)
            train_all(job, executor, numbers=order, watch=watcher)
            results = {n: part for n in order if (part := parts.read(n)) is not None}
        return _truth(plan, results)

    def _conclude(
        self, candidates: Candidates, truth: GroundTruth, how: str, record: Mapping[str, Any]
    ) -> Calibration:
        """Choose, and estimate what the choice is worth."""
        predictions, utility, curves = candidates.predictions, truth.utility, candidates.curves
        if len(utility) < FEWEST_HALVES:
            raise UndeError(f"{len(utility)} retrained models are too few: expected at least {FEWEST_HALVES}")
        if not np.ptp(utility, axis=0).any():
            raise UndeError(
                "all retrained models do equally well on every query: there is nothing to predict"
            )
        chosen = statistics.select(predictions, utility, curves, self.seed)
        fair = statistics.crossfit(predictions, utility, curves, self.seed)
        ceiling, digests, weights, unweighted = None, self.rows.digests(), None, None
        if truth.second_utility is not None:
            repeated = np.array(truth.repeated)
            agreement = statistics.reliability(utility, truth.second_utility, repeated)
            ceiling = float(np.sqrt(agreement))
        if chosen.weights is not None:
            story = {"how": FITTED, "weight_decay": chosen.weight_decay}
            names = list(self.opened.groups.names)
            weights = Weights(torch.from_numpy(chosen.weights), names, digests, story)
            plain = statistics.crossfit(predictions, utility, curves, self.seed, weighted=False)
            unweighted = statistics.measure(plain, utility)
        rated: list[dict[str, Any]] = [
            {"name": name, **_rate(p.sum(2), utility)} for name, p in predictions.items()
        ]
        members, m = truth.masks.astype(np.float64), self.opened.stored.manifest
        return Calibration(
            setting=candidates.settings[chosen.setting],
            weights=weights,
            expected=statistics.measure(fair, utility),
            unweighted=unweighted,
            ceiling=ceiling,
            settings=sorted(rated, key=lambda row: -row["lds"]),
            baselines={
                name: _rate(members @ np.asarray(scores, dtype=np.float64).T, utility)
                for name, scores in self.baselines.items()
            },
            how=how,
            halves=len(utility),
            trainings=len(utility) + len(truth.repeated) if how != BANK else 0,
            seconds=truth.seconds,
            index=m.id,
            query_digests=digests,
            provenance={
                **record,
                "seed": self.seed,
                "queries": len(self.rows),
                "examples": m.examples,
                "refused settings": candidates.refused,
                "weight_decay": chosen.weight_decay,
                "unde": __version__,
                "torch": torch.__version__,
            },
            masks=truth.masks,
            utility=utility,
        )


def _rate(predicted: np.ndarray, utility: np.ndarray) -> dict[str, Any]:
    estimate = statistics.measure(predicted, utility)
    return {"lds": estimate.mean, "ci95": float(estimate.ci95_total or 0)}


# --- predictions ----------------------------------------------------------------------------------------------


class Predictor:
    """Predictions of the same subsets and queries under any method.

    Args:
        scorer: The scorer of the index.
        queries: Query features, (C, Q, D).
        digests: Digests of the queries.
        masks: Subsets of the training examples, (S, N) bool.
    """

    def __init__(self, scorer: Scorer, queries: Tensor, digests: list[str], masks: np.ndarray) -> None:
        self.scorer, self.queries, self.digests = scorer, queries, digests
        self.members = torch.from_numpy(np.ascontiguousarray(masks)).float()  # (S, N)
        self._sums = self._sum_features()

    def predict(self, method: Method, terms: Sequence[int] | None = None) -> np.ndarray:
        """Predictions (S, Q, M) under a method, of the checkpoints `terms` or all; (S, Q, 1) where its scores are no
        sums over groups."""
        if not method.linear or method.groupwise:
            total = self.scorer.scores(method, self.queries, self.digests).total()
            members, total = (put(x, self._device, torch.float64) for x in (self.members, total))
            return (members @ total.T).unsqueeze(2).cpu().numpy()
        m, groups = self.scorer.stored.manifest, self.scorer.groups
        out = torch.zeros(len(self.members), self.queries.shape[1], len(groups), device=self._device)
        for c in range(m.terms) if terms is None else terms:
            rows, queries = self._apply_kernel(method, c), put(self.queries[c], self._device)
            for j, columns in zip(groups.of(m.unit_names), m.columns):
                out[:, :, j] += m.checkpoint_weights[c] * (rows[:, columns] @ queries[:, columns].T)
        return out.cpu().numpy()

    @property
    def _device(self) -> torch.device:
        return self.scorer.stored.compute.device

    def _sum_features(self) -> list[Tensor]:
        """Σ_{n ∈ s} g(n) for each checkpoint, (S, D), from one pass over the stored features."""
        stored, m = self.scorer.stored, self.scorer.stored.manifest
        shape, place = (len(self.members), m.width), double_device(self._device)
        sums = [torch.zeros(shape, dtype=torch.float64, device=place) for _ in range(m.terms)]
        for s, rows in enumerate(m.shards):
            for total, block in zip(sums, stored.blocks(s)):
                total += (put(self.members[:, rows], block.device) @ block).to(place)
        return [put(total, self._device, torch.float32) for total in sums]

    def _apply_kernel(self, method: Method, checkpoint: int) -> Tensor:
        """K Σ_{n ∈ s} g(n), (S, D)."""
        cache = KernelCache(self.scorer.stored, method.kernel, checkpoint, self.scorer.executor)
        fitted = cache.fitted()
        combine = getattr(fitted, "combine", None)  # kernels in dual form have no need of the sums
        if combine is not None and cache.source == FeatureSource(self.scorer.stored, checkpoint):
            return combine(self.members)
        return fitted.apply(self._sums[checkpoint])


class Candidates:
    """Predictions of every setting of an index for some subsets and queries."""

    def __init__(self, opened: IndexState, queries: Rows, masks: np.ndarray) -> None:
        features = opened.runner.features(queries)
        predictor = Predictor(opened.scorer, features.features, features.digests, masks)
        curves = list_settings(opened.stored)
        self.settings: dict[str, Setting] = {}
        self.predictions: dict[str, np.ndarray] = {}
        self.refused: dict[str, str] = {}
        with console.progress("settings", sum(map(len, curves)), unit="settings") as advance:
            for setting in chain.from_iterable(curves):
                try:
                    terms = setting.terms(opened.stored)
                    self.predictions[setting.name] = predictor.predict(setting.method, terms)
                    self.settings[setting.name] = setting
                except UndeError as e:  # a kernel beyond the memory budget, a damping that rounding decides
                    self.refused[setting.name] = str(e)
                advance(1)
        self.curves = [[s.name for s in curve if s.name in self.settings] for curve in curves]
        if not self.settings:
            raise UndeError(
                f"no setting of the index can be scored; the first says: {next(iter(self.refused.values()))}"
            )

    def of(self, subsets: Sequence[int]) -> dict[str, np.ndarray]:
        """The predictions of some of the subsets."""
        return {name: p[list(subsets)] for name, p in self.predictions.items()}


# --- training ------------------------------------------------------------------------------------------------


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


def order_of(halves: int) -> list[int]:
    """Numbers of models: those of the first seeds, and of second seeds of some after the first few.

    >>> order_of(6)
    [0, 2, 4, 6, 1, 3, 8, 10]
    """
    first = [2 * s for s in range(halves)]
    return [*first[:FEWEST_HALVES], *(2 * s + 1 for s in range(REPEATED)), *first[FEWEST_HALVES:]]


def _truth(plan: SubsetPlan, results: Mapping[int, ModelResult]) -> GroundTruth:
    """Of subsets 0 … S − 1, all of which have a model; what is beyond a gap waits for the next call."""
    done = next(s for s in count() if 2 * s not in results)
    repeated = [s for s in range(done) if 2 * s + 1 in results]
    values = {n: part.utility[UNNAMED] for n, part in results.items()}
    return GroundTruth(
        np.stack([plan.mask(s) for s in range(done)]),
        np.stack([values[2 * s] for s in range(done)]),
        np.stack([values[2 * s + 1] for s in repeated]) if repeated else None,
        repeated,
        float(sum(part.seconds for part in results.values())),
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


def parse_duration(text: str | float) -> float:
    """Seconds of "30min", "2h", "90s", or a number of seconds.

    >>> parse_duration("30min"), parse_duration("1.5h"), parse_duration(90)
    (1800.0, 5400.0, 90.0)
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0:
        return float(text)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|min|m|h|d)?\s*", str(text))
    if match is None or float(match[1]) <= 0:
        raise UndeError(f"budget is {text!r}: expected a time, such as '30min', '2h' or a number of seconds")
    return float(match[1]) * {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2] or "s"]
