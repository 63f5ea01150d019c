"""Questions to an open index: features, scores, self-influence, calibration, learned weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from unde import console
from unde.data import Rows, choose_collate
from unde.default_device import host_default
from unde.errors import UndeError
from unde.evaluate.baselines import baseline_scores
from unde.index.audit import audit
from unde.index.calibrate import Calibrator
from unde.index.calibration import Calibration
from unde.index.diagnose import diagnose
from unde.index.label_free import EXAMPLES, learn_without_labels
from unde.index.query_features import QueryFeatures, check_fits
from unde.index.rescore import IndexRescorer
from unde.index.state import IndexProperties, IndexState
from unde.index.token_scores import TokenScores
from unde.index.verify import verify
from unde.methods import Method
from unde.parallel import Executor, close_workers, get_executor
from unde.scoring import diagnostics
from unde.scoring.base import WeightsLike
from unde.scoring.documents import Pieces
from unde.scoring.group_scores import GroupScores
from unde.scoring.top import Top, need_library
from unde.store import layout
from unde.store.layout import VerifyReport
from unde.store.remote import StorePath, exists, place
from unde.weights import Weights

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R", bound="QueryableIndex")


@host_default
class QueryableIndex(IndexProperties):
    """The part of `Index` that answers questions; `Index` adds building, opening and changing."""

    def __init__(self, state: IndexState) -> None:
        super().__init__(state)
        self._use_calibration = True
        self._announced = False  # whether the calibration was mentioned
        self._calibration: Calibration | None = None

    # --- asking -----------------------------------------------------------------------------------------

    def features(self, queries: Any, path: str | StorePath | None = None) -> QueryFeatures:
        """Compute features of queries, which can be passed wherever queries are accepted.

        Args:
            queries: Data like the training data.
            path: File to store the features in; features of the same queries that it holds already are reused.

        Returns:
            The features. `a.mean()` is a set of queries as one query, `a - b` the difference of two.

        Raises:
            UndeError: The index was opened without its model and task, the model has changed, a gradient is NaN or
                infinite, or the file holds the features of other queries.

        >>> features = index.features(queries, "queries.safetensors")  # doctest: +SKIP
        """
        if isinstance(queries, QueryFeatures):
            if queries.index != self.manifest.lineage:
                raise UndeError(
                    "these query features were computed for another index: compute them anew with this one"
                )
            return queries
        rows = Rows(queries, choose_collate(self._state.collate, queries))
        file, m = None if path is None else place(path), self.manifest
        if file is None or not exists(file):
            check_fits(len(rows), m)
            features = self._state.runner.features(rows)
            if file is not None:
                features.save(file)
            return features
        features = QueryFeatures.load(file, m.lineage, (m.terms, m.width))
        if features.digests != rows.digests():
            raise UndeError(f"{path} holds the features of other queries: choose another path, or delete it")
        return features

    def score(self, queries: Any, method: str | Method | None = None) -> GroupScores:
        """Score all training examples for each query, resolved by groups of parameters.

        Args:
            queries: Data like the training data, or features of queries.
            method: A method or its name. By default that of the calibration with its weights, if the index has one,
                else the method that the index was built for.

        Returns:
            The scores; `scores.top(10)` lists the strongest examples of each query.

        Raises:
            UndeError: As `features`, or the method does not fit the index.

        >>> index.score(queries).top(10)  # doctest: +SKIP
        """
        at, features, chosen = self._state, self.features(queries), self._method(method)
        calibration, rows = self.calibration if method is None else None, None
        if features is not queries:
            rows = Rows(queries, choose_collate(at.collate, queries))
            chosen.check_query(rows[0])
        rescorer = IndexRescorer(at, rows)
        if calibration is None:
            return replace(at.scorer.scores(chosen, features.features, features.digests), rescorer=rescorer)
        self._announce(f"calibrated: {calibration}")
        last = calibration.setting.last_checkpoint
        scores = at.scorer.scores(chosen, features.features, features.digests, last_checkpoint=last)
        provenance = scores.provenance | {"calibration": str(calibration)}
        return replace(scores, rescorer=rescorer, default_weights=calibration.weights, provenance=provenance)

    # --- calibration ------------------------------------------------------------------------------------

    def calibrate(
        self,
        train: Any = None,
        queries: Any = None,
        *,
        halves: int = 16,
        budget: str | float | None = None,
        how: str = "retrain",
        bank: Any = None,
        seed: int = 0,
        executor: str | Executor | None = None,
        baselines: Mapping[str, Any] | bool = True,
    ) -> Calibration:
        """Choose method, damping and weights by models retrained on random halves, and estimate the LDS to expect.

        Every setting that the index can give is judged by what the retrained models did on the queries. The choice is
        kept in the index, and `score` uses it from then on. What is trained is kept too: a call that was interrupted
        goes on, and a later one with more `halves` adds to it.

        Args:
            train: A function (indices, seed) -> model that trains on these training examples as the model was trained,
                or an `unde.evaluate.TrainingSpec`.
            queries: Data like that which will be asked about, 100 to 500 examples, none of them trained on.
            halves: How many random halves to train on: 8 choose a setting, 16 also fit weights.
            budget: A time, such as "30min", after which no further model is begun.
            how: "retrain" from the start, or "local": one more epoch from the final model with the optimizer of a
                `TrainingSpec`. Local trainings are cheap and order settings as retraining does; their LDS means nothing
                else.
            bank: An `unde.evaluate.Bank` of the same queries, or (masks, utility): then nothing is trained.
            seed: Of the halves, the trainings and the folds.
            executor: Who trains, such as "processes:2"; by default who computes for this index.
            baselines: Whether simple baselines are judged too, or their scores {name: (Q, N)}.

        Returns:
            The calibration. It is saved as calibration.json in the folder of the index.

        Raises:
            UndeError: If there is no way to train, a training diverges, the budget does not suffice for four halves,
                queries are training data, or a bank does not fit.

        >>> calibration = index.calibrate(train, queries, halves=16)  # doctest: +SKIP
        >>> print(calibration.table())  # doctest: +SKIP
        """
        if queries is None:
            raise UndeError("queries is missing: pass data like that which will be asked about")
        self._state.check_finished()
        runs = self._state.executor if executor is None else get_executor(executor)
        with nullcontext() if executor is None else close_workers(executor, runs):
            rows = Rows(queries, choose_collate(self._state.collate, queries))
            calibrator = Calibrator(self._state, rows, seed, self._baselines(queries, baselines))
            if bank is None:
                calibration = calibrator.with_training(train, halves, budget, how, runs)
            else:
                calibration = calibrator.with_bank(bank)
        calibration.save(self.folder / layout.CALIBRATION)
        self._calibration, self._announced = calibration, True
        console.note(str(calibration))
        return calibration

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the index, None without one. One of the index before it was changed is not used."""
        if not self._use_calibration:
            return None
        if self._calibration is None and exists(self.folder / layout.CALIBRATION):
            self._calibration = Calibration.load(self.folder / layout.CALIBRATION)
        calibration = self._calibration
        if calibration is None or calibration.index == self.manifest.id:
            return calibration
        self._announce(
            f"{self.folder} has changed since it was calibrated: calibrate it again. Until then it is not used"
        )
        return None

    def uncalibrated(self: R) -> R:
        """The same index without its calibration: the method that it was built for, and uniform weights."""
        index = type(self)(self._state)
        index._use_calibration = False
        return index

    def learn_weights(
        self,
        queries: Any = None,
        method: str | Method | None = None,
        perturb: Any = None,
        examples: int = EXAMPLES,
        seed: int = 0,
    ) -> Weights:
        """Learn weights without labels, and print what they do. `calibrate` alone tells whether they help.

        Args:
            queries: Data like that which will be asked about, 100 to 500 examples, none of them trained on, for the
                paper's Algorithm 1. Without queries, it learns from `examples` perturbed training examples. The line
                that is printed costs up to 340 queries more.
            method: The method to learn for; by default that of the calibration or of the index.
            perturb: A function (example, strength, random) -> example, with a strength from 0.05 to 1 and a NumPy
                generator to draw from; "weights" for noise on the model's weights; None for the perturbations of the
                task: noise, replaced tokens, augmented images. The strength is searched.
            examples: Perturbed training examples to learn from.
            seed: Seed of the examples and their copies, and of Algorithm 1.

        Returns:
            The weights. They are used only where they are passed.

        Raises:
            UndeError: If the index was opened without model, task or training data, or has too few examples.

        >>> weights = index.learn_weights()  # doctest: +SKIP
        """
        scores = None if queries is None else self.score(queries, self._method(method))
        return learn_without_labels(self._state, self._method(method), scores, perturb, examples, seed)

    def _announce(self, text: str) -> None:
        if not self._announced:
            console.note(text)
            self._announced = True

    def _baselines(self, queries: Any, wanted: Mapping[str, Any] | bool) -> Mapping[str, Any]:
        if isinstance(wanted, Mapping):
            return wanted
        at = self._state
        if not wanted or at.model is None or at.task is None or at.rows is None:
            return {}
        return baseline_scores(
            at.model, at.task, at.rows.data, queries, collate=at.collate or at.rows.collate
        )

    def diagnose(
        self,
        scores: GroupScores | None = None,
        weights: WeightsLike = None,
        *,
        top: Top | None = None,
        queries: Pieces | None = None,
    ) -> list[str]:
        """What to know before scores are read, in sentences; none where nothing is wrong.

        Args:
            scores: Scores of some queries. Without them only the model and the training examples are looked at.
            weights: Weights under which the strongest training examples are compared.
            top: The lists to compare, if they are at hand: `scores.top(10, weights)` by default.
            queries: Which query each row of `scores` is a piece of, where queries were cut.

        Returns:
            Sentences about queries and training examples with a gradient of zero, a model whose mean training loss is
            near that of a guess, and training examples that lead the lists of most queries.

        >>> for sentence in index.diagnose(index.score(queries)):  # doctest: +SKIP
        ...     print(sentence)
        """
        if scores is not None and top is None and len(scores) >= diagnostics.FEWEST:
            count = min(diagnostics.TOP, len(self) - int(self.skipped.sum()))
            top = scores.top(count, weights, queries=queries)
        return diagnose(self._state, scores, top, queries)

    def verify(self) -> VerifyReport:
        """Check every byte on disk against its checksum.

        Returns:
            A report, true if nothing is damaged; else it names what is damaged and how to repair it.

        >>> assert index.verify()  # doctest: +SKIP
        """
        return verify(self.folder)

    def tokens(self, scores: GroupScores, weights: WeightsLike = None) -> TokenScores:
        """Split scores into contributions of single tokens.

        Args:
            scores: Scores of some queries.
            weights: Weights of the groups.

        Returns:
            A function of a query's number and a training example: (T,) contributions that add up to its score.

        Raises:
            UndeError: The task defines no token losses.

        >>> index.tokens(scores)(0, train_data[7])  # doctest: +SKIP
        """
        return TokenScores(self._state, scores, weights)

    def self_influence(
        self,
        weights: WeightsLike = None,
        normalize_top: int | None = None,
        subset: Sequence[int] | None = None,
        method: str | Method | None = None,
    ) -> Tensor:
        """Score training examples by their own gradient, τ(i, i); high values mark wrong labels.

        Args:
            weights: Weights of the groups.
            normalize_top: Divide by the sum of the m largest scores of i over the training set; 0 where that sum is
                not positive.
            subset: Positions of examples; all by default.
            method: A method or its name; by default the one that the index was built for.

        Returns:
            (N,) scores, or those of `subset`.

        >>> suspects = index.self_influence().topk(20)  # doctest: +SKIP
        """
        where = torch.arange(len(self)) if subset is None else torch.as_tensor(subset)
        scorer, chosen = self._state.scorer, self.method_for(method)
        return scorer.self_influence(chosen, weights, normalize_top, where)

    def audit_labels(
        self, weights: WeightsLike = None, *, classes: Sequence[str] | None = None, progress: bool = True
    ) -> pd.DataFrame:
        """Find the training examples of a classifier whose labels look wrong.

        A label is suspicious where the model finds it unlikely and the most similar training examples carry another
        one. `unde audit` writes the same as a page and a file.

        Args:
            weights: Weights of groups, for the proponents and opponents.
            classes: Names of the classes, in the order of the model's outputs; numbers without them.
            progress: Whether to show a progress bar.

        Returns:
            A row for each training example, in order: id, file (where the data know it), is_label_issue, label_quality
            (from 0 to 1, low for suspicious labels), given_label, predicted_label, suggested_label, confidence (the
            share of the nearest examples that carry the suggested label), and of issues the ids of the strongest
            opponents and proponents. `frame.attrs` has expected_precision, expected_wrong, at_least_wrong (a 95 %
            bound) and how they are estimated.

        Raises:
            UndeError: The task has no classes, the index was opened without its model, task or data, or pandas is
                missing.

        >>> frame = index.audit_labels()  # doctest: +SKIP
        >>> frame[frame.is_label_issue].sort_values("label_quality")  # doctest: +SKIP
        """
        need_library("pandas")
        result = audit(self, weights, progress=progress)
        frame = result.table(classes).to_pandas()
        frame.attrs = {
            "expected_precision": result.precision,
            "expected_wrong": result.precision * len(result.issues),
            "at_least_wrong": result.at_least,
            "estimate": result.estimate,
        }
        return frame

    def _method(self, method: str | Method | None) -> Method:
        """The method to ask with: that of the calibration where none is named."""
        if method is None and self.calibration is not None:
            return self.calibration.method
        return self.method_for(method)
