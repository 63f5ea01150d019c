"""An open index: what it is, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.data import Rows, own_collate
from unde.errors import UndeError
from unde.evaluate.baselines import baseline_scores
from unde.groups import Groups
from unde.index import self_retrieval
from unde.index.calibrate import calibrate
from unde.index.calibration import Calibration
from unde.index.diagnose import diagnose
from unde.index.facts import index_facts
from unde.index.query_features import QueryFeatures
from unde.index.rescore import Asked
from unde.index.retrieval_curve import SHOWN, Trust, of_several
from unde.index.state import IndexState
from unde.index.token_scores import TokenScores
from unde.index.verify import verify
from unde.methods import Method
from unde.parallel import Executor, ending, named
from unde.scoring import diagnostics
from unde.scoring.documents import Pieces
from unde.scoring.group_scores import GroupScores, WeightsLike
from unde.scoring.top import Top
from unde.store import layout
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, exists, place
from unde.store.verify_report import Verified
from unde.tasks.base import Task
from unde.tasks.identity import kind_of
from unde.weights import Weights

R = TypeVar("R", bound="QueryableIndex")


class QueryableIndex:
    """An open index: what it is, and what can be asked of it."""

    def __init__(self, opened: IndexState) -> None:
        self._state = opened
        self._retrieved: tuple[Any, Any] | None = None
        self._use_calibration = True
        self._announced = False  # whether the calibration was mentioned
        self._calibration: Calibration | None = None

    def __len__(self) -> int:
        return self.manifest.examples

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes that were started for it; what is asked next starts them anew."""
        self._state.executor.close()

    def __repr__(self) -> str:
        m, groups = self.manifest, len(self.groups)
        lived = "" if m.living is None else f"; {m.living.brief}"
        return f"Index({str(self.folder)!r}, {self.method}, {m.examples} × {m.width}, {groups} groups{lived})"

    def _repr_html_(self) -> str:
        return index_facts(self.folder, self.manifest, self.method, self.groups.names)

    @property
    def folder(self) -> StorePath:
        return self._state.stored.folder

    @property
    def manifest(self) -> Manifest:
        """What the index is, and what was settled for it."""
        return self._state.stored.manifest

    @property
    def method(self) -> Method:
        """What it was built for."""
        return self._state.method

    def method_for(self, method: str | Method | None = None) -> Method:
        """A method as it is scored with on this index: its projection is that of the index, damping="auto" a number."""
        return methods.on_index(method, self.method, kind_of(self.manifest.task), self.manifest.examples)

    @property
    def groups(self) -> Groups:
        return self._state.groups

    @property
    def ids(self) -> Sequence[Any] | None:
        """The user's names of the training examples."""
        return self._state.ids

    @property
    def memory(self) -> int:
        """The budget, in bytes."""
        return self._state.stored.memory

    @property
    def model(self) -> nn.Module | None:
        return self._state.model

    @property
    def task(self) -> Task | None:
        return self._state.task

    @property
    def train_data(self) -> Rows | None:
        return self._state.rows

    @property
    def unfinished(self) -> int:
        """Shards that other workers had not written yet when this one, of an array, had done its share."""
        return self._state.unfinished

    @property
    def skipped(self) -> Tensor:
        """(N,) bool: examples left out because of NaN gradients."""
        return self._state.stored.skipped

    # --- asking -----------------------------------------------------------------------------------------

    def features(self, queries: Any, path: str | StorePath | None = None) -> QueryFeatures:
        """Features of queries, to be used instead of them. With `path` they are kept there and reused.

        `a.mean()` asks about several queries as one, `a - b` about what sets one apart from the other.
        """
        if isinstance(queries, QueryFeatures):
            if queries.index != self.manifest.lineage:
                raise UndeError(
                    "these query features were computed for another index: compute them anew with this one"
                )
            return queries
        rows = Rows(queries, own_collate(self._state.collate, queries))
        kept, m = None if path is None else place(path), self.manifest
        if kept is not None and exists(kept):
            found = QueryFeatures.load(kept, m.lineage, (m.terms, m.width))
            if found.digests != rows.digests():
                raise UndeError(
                    f"{path} holds the features of other queries: choose another path, or delete it"
                )
            return found
        made = self._state.query_runner.features(rows)
        if kept is not None:
            made.save(kept)
        return made

    def score(self, queries: Any, method: str | Method | None = None) -> GroupScores:
        """Group-resolved scores of queries.

        Without a `method` the setting and weights of the calibration are used, where the index has one, else the method
        that it was built for.
        """
        calibration = self.calibration if method is None else None
        chosen = self.method_for(method) if calibration is None else calibration.method
        made = self.features(queries)
        if not isinstance(queries, QueryFeatures):
            chosen.check_query(Rows(queries)[0])
        at_hand = None not in (self.model, self.task, self.train_data)
        judging = partial(self._retrieval, chosen) if at_hand else None
        at = self._state
        rows = None if made is queries else Rows(queries, own_collate(at.collate, queries))
        again = Asked(at.stored, lambda: at.query_runner, at.rows, rows)
        if calibration is None:
            return replace(at.scorer.scores(chosen, made.features, made.digests, judging), again=again)
        self._announce(calibration)
        last = calibration.setting.last_checkpoint
        scores = at.scorer.scores(chosen, made.features, made.digests, judging, last_checkpoint=last)
        provenance = scores.provenance | {"calibration": str(calibration)}
        return replace(scores, again=again, default_weights=calibration.weights, provenance=provenance)

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
        """
        if queries is None:
            raise UndeError("queries is missing: pass data like that which will be asked about")
        self._state.check_finished()
        runs = self._state.executor if executor is None else named(executor)
        with nullcontext() if executor is None else ending(executor, runs):
            made = calibrate(
                self._state,
                queries,
                train,
                halves,
                budget,
                how,
                bank,
                seed,
                runs,
                self._baselines(queries, baselines),
            )
        made.save(self.folder / layout.CALIBRATION)
        self._calibration = made
        self._announced = True
        console.note(str(made))
        return made

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the index, None without one. One of the index before it was changed is not used."""
        if not self._use_calibration:
            return None
        if self._calibration is None and exists(self.folder / layout.CALIBRATION):
            self._calibration = Calibration.load(self.folder / layout.CALIBRATION)
        found = self._calibration
        if found is not None and found.index != self.manifest.id:
            if not self._announced:
                console.note(
                    f"{self.folder} has changed since it was calibrated: calibrate it again. Until then it is not used"
                )
                self._announced = True
            return None
        return found

    def uncalibrated(self: R) -> R:
        """The same index without its calibration: the method that it was built for, and uniform weights."""
        made = type(self)(self._state)
        made._use_calibration = False
        return made

    def _announce(self, calibration: Calibration) -> None:
        if not self._announced:
            console.note(f"calibrated: {calibration}")
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

    def verify(self) -> Verified:
        """Every byte on disk against its checksum: true if all is well, else it says what is damaged and what to do."""
        return verify(self.folder)

    def tokens(self, scores: GroupScores, weights: WeightsLike = None) -> TokenScores:
        """Contributions of single tokens: `index.tokens(scores)(q, example)` adds up to the score of `example`."""
        at = self._state
        return TokenScores(at.query_runner, at.scorer, at.collate, scores, weights)

    def self_influence(
        self,
        weights: WeightsLike = None,
        normalize_top: int | None = None,
        subset: Sequence[int] | None = None,
        method: str | Method | None = None,
    ) -> Tensor:
        """τ(i, i) of every training example, or of those in `subset`; high values mark wrong labels.

        With `normalize_top=m` divided by the sum of the m largest scores of i over the training set; where
        that sum is not positive the example says nothing about itself and gets 0.
        """
        where = torch.arange(len(self)) if subset is None else torch.as_tensor(subset)
        scorer, chosen = self._state.scorer, self.method_for(method)
        return scorer.self_influence(chosen, weights, normalize_top, where)

    def learn_weights(
        self,
        method: str | Method | None = None,
        perturb: Any = None,
        examples: int = self_retrieval.EXAMPLES,
        seed: int = 0,
    ) -> Weights:
        """Weights with which perturbed training examples find themselves: no labels, no queries, no k.

        `perturb` is a function (example, strength, random) -> example, with a strength from 0.05 to 1 and a NumPy
        generator to draw from; "weights" for noise on the model's weights; or None for what the task knows: noise,
        replaced tokens, augmented images. The strength is searched. `examples` copies are learned from, others judge
        and report, all of different training examples. Where weights would not help they are uniform;
        `weights.provenance` tells what was found. Costs as much as 600 queries, and `examples` more, at most.
        """
        chosen = self._method(method)
        usual = (None, self_retrieval.EXAMPLES, 0)  # what also judges weights from queries
        if (perturb, examples, seed) == usual:
            return self._retrieval(chosen, self.groups).weights()
        self._retrieved = None  # its memory is free for this one
        return self_retrieval.Retrieval.made(self._state, chosen, perturb, examples, seed).weights()

    def trust(
        self,
        weights: Weights | None = None,
        method: str | Method | None = None,
        examples: int = SHOWN,
        seed: int = 0,
        perturb: Any = None,
    ) -> Trust:
        """How many training examples find themselves through a change, by its strength: see `index.retrieval_curve`."""
        given = {} if weights is None else {"weighted": weights}
        return next(iter(self.trust_of(given, method, examples, seed, perturb).values()))

    def trust_of(
        self,
        weights: Mapping[str, Weights],
        method: str | Method | None = None,
        examples: int = SHOWN,
        seed: int = 0,
        perturb: Any = None,
    ) -> dict[str, Trust]:
        """The same for each named set of weights, all on the same copies; without any, of the unweighted method."""
        chosen = self.method_for(method)
        return of_several(self._state, weights, chosen, examples, seed, perturb)

    def _method(self, method: str | Method | None) -> Method:
        """The method to ask with: that of the calibration where none is named."""
        if method is None and self.calibration is not None:
            return self.calibration.method
        return self.method_for(method)

    def _retrieval(self, method: Method, groups: Groups) -> self_retrieval.Retrieval:
        """Self-retrieval as it is by default, under one method and partition; the one used last is held on to."""
        key = (method, tuple(groups.members.items()))
        if self._retrieved is None or self._retrieved[0] != key:
            self._retrieved = None  # its memory is free for the next
            few, made = self_retrieval.EXAMPLES, self_retrieval.Retrieval.made
            self._retrieved = (key, made(self._state, method, None, few, 0, groups))
        return self._retrieved[1]
