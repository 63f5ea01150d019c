"""Index: the features of a training set on disk, and what can be asked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods, plan
from unde.build.checkpoints import Checkpoint
from unde.build.checks import read_ids
from unde.build.context import Given
from unde.build.queries import QueryFeatures
from unde.build.settle import checked, settle
from unde.data import Collate, Rows, own_collate, parse_bytes
from unde.errors import UndeError
from unde.evaluate.baselines import baseline_scores
from unde.execution import Executor, ending, named
from unde.features import moments
from unde.groups import Groups, trainable, unwrapped
from unde.index import living, making, merging, self_retrieval
from unde.index.calibrate import calibrate
from unde.index.calibration import Calibration
from unde.index.diagnose import diagnose
from unde.index.facts import index_facts
from unde.index.opened import Opened
from unde.index.trust import SHOWN, Trust, of_several
from unde.index.verify import verify
from unde.methods import Method
from unde.plan import Plan
from unde.recipe import Recipe
from unde.scores import diagnostics
from unde.scores.group_scores import GroupScores, WeightsLike
from unde.scores.pieces import Pieces
from unde.scores.rescore import Asked
from unde.scores.tokens import TokenScores
from unde.scores.top import Top
from unde.store import layout
from unde.store.manifest import Manifest
from unde.store.remote import Place, place, there
from unde.store.verified import Verified
from unde.tasks.base import Task
from unde.tasks.identity import kind_of
from unde.weights import Weights


class Index:
    """Make one with `Index.build` or `Index.open`."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._retrieved: tuple[Any, Any] | None = None
        self._use_calibration = True
        self._announced = False  # whether the calibration was mentioned
        self._calibration: Calibration | None = None

    def __len__(self) -> int:
        return self.manifest.examples

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes that were started for it; what is asked next starts them anew."""
        self._opened.executor.close()

    def __repr__(self) -> str:
        m, groups = self.manifest, len(self.groups)
        lived = "" if m.living is None else f"; {m.living.brief}"
        return f"Index({str(self.folder)!r}, {self.method}, {m.examples} × {m.width}, {groups} groups{lived})"

    def _repr_html_(self) -> str:
        return index_facts(self.folder, self.manifest, self.method, self.groups.names)

    @property
    def folder(self) -> Place:
        return self._opened.stored.folder

    @property
    def manifest(self) -> Manifest:
        """What the index is, and what was settled for it."""
        return self._opened.stored.manifest

    @property
    def method(self) -> Method:
        """What it was built for."""
        return self._opened.method

    def method_for(self, method: str | Method | None = None) -> Method:
        """A method as it is scored with on this index: its projection is that of the index, damping="auto" a number."""
        return methods.on_index(method, self.method, kind_of(self.manifest.task), self.manifest.examples)

    @property
    def groups(self) -> Groups:
        return self._opened.groups

    @property
    def ids(self) -> Sequence[Any] | None:
        """The user's names of the training examples."""
        return self._opened.ids

    @property
    def memory(self) -> int:
        """The budget, in bytes."""
        return self._opened.stored.memory

    @property
    def model(self) -> nn.Module | None:
        return self._opened.model

    @property
    def task(self) -> Task | None:
        return self._opened.task

    @property
    def train_data(self) -> Rows | None:
        return self._opened.rows

    @property
    def unfinished(self) -> int:
        """Shards that other workers had not written yet when this one, of an array, had done its share."""
        return self._opened.unfinished

    @property
    def skipped(self) -> Tensor:
        """(N,) bool: examples left out because of NaN gradients."""
        return self._opened.stored.skipped

    # --- making one -------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: nn.Module,
        task: Task,
        train_data: Any,
        path: str | Place,
        *,
        method: str | Method = "trak",
        groups: Groups | str | Mapping[str, str] = "layer",
        batch_size: int | None = None,
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        exclude: Sequence[str] = (),
        collate: Collate | None = None,
        num_workers: int = 0,
        device: str | torch.device | None = None,
        store_dtype: str = "auto",
        ids: Sequence[Any] | None = None,
        memory: int | str = "2GB",
        seed: int = 0,
        on_bad: str = "error",
        second_moments: Any = None,
        executor: str | Executor = "serial",
        threads: int | None = None,
        recipe: str | Recipe | None = None,
        progress: bool = True,
    ) -> Index:
        """Compute the features of `train_data`, or finish an index that was begun in `path`, a folder or a URL such as
        s3://bucket/idx.

        `checkpoints` are state dicts or .safetensors files; `checkpoint_weights` their η_c (learning rates
        for TracInCP; equal shares by default). `exclude` names parameters to leave out, by regular
        expressions. `on_bad` is what to do about NaN gradients: "error", or "skip" and record.
        `second_moments`, an Adam-like optimizer, its state_dict() or {parameter: v}, puts scores into its metric
        v^−1/2: gradients are divided by v^1/4 on each side. "gradients" takes v from some training examples. Several
        `checkpoints` may be those of one training, or an ensemble of models trained independently: scores are the mean
        of theirs.
        `store_dtype` is how features are stored: "float32", "float16", "bfloat16", "int8", "int4", "factored(1)", or
        "auto": float32 up to 256 MiB, int8 beyond. `memory` and what is fast decide how many examples go through the
        model at a time, which is recorded; a `batch_size` is understood and not needed.

        `executor` says who computes: "serial", "processes:4", "ray", "array" (one of many workers, each of which does
        its share; the index is whole when all have ended and `build` was called once more without it), or an Executor;
        with the same number of `threads` for each job the bytes are the same. Other processes make the model for
        themselves, by the `recipe`: a function that returns the same `Setup`, as "my_project.setup:make". Models of
        transformers and diffusers need none.
        """
        making.check_task(task)
        rows = Rows(train_data, collate or own_collate(task.collate, train_data))
        folder, runs, model = place(path), named(executor, threads=threads), unwrapped(model)
        chosen = making.settled_method(
            method, Given(model, task, rows, checkpoints), folder, exclude, progress
        )
        making.check_options(chosen, on_bad, batch_size, store_dtype)
        ids = making.ids_for(rows, ids)
        budget = parse_bytes(memory)
        with making.on_device(model, device), ending(executor, runs):
            given = Given(model, task, rows, checkpoints, making.as_recipe(recipe), making.plainly(device))
            if isinstance(second_moments, str) and second_moments == moments.GRADIENTS:
                second_moments = moments.of_gradients(model, task, rows, trainable(model, exclude))
            checked(given, chosen, groups, exclude, second_moments)  # before a folder is made
            settling = partial(
                settle,
                groups=groups,
                exclude=exclude,
                store_dtype=store_dtype,
                seen_by=chosen,
                seed=seed,
                on_bad=on_bad,
                checkpoint_weights=checkpoint_weights,
                ids=ids,
                second_moments=second_moments,
                memory=budget,
                workers=num_workers,
                each=threads or runs.threads,
                executor=runs,
            )
            contexts = making.computed(folder, given, chosen, settling, runs, progress)
        return cls(making.opened(contexts, budget, ids, runs))

    @classmethod
    def finish(
        cls, path: str | Place, model: nn.Module, task: Task, train_data: Any, **options: Any
    ) -> Index:
        """What is left of an index that was begun, with everything as it was settled then.

        `options` are those of `build` that say what is given (`checkpoints`, `collate`, `ids`, …) and who computes.
        """
        m = Manifest.read(place(path))
        return cls.build(model, task, train_data, path, **(making.recorded(m, model) | options))

    @classmethod
    def open(
        cls,
        path: str | Place,
        *,
        model: nn.Module | None = None,
        task: Task | None = None,
        train_data: Any = None,
        groups: Groups | None = None,
        checkpoints: Sequence[Checkpoint] | None = None,
        collate: Collate | None = None,
        memory: int | str = "2GB",
        verify: bool = True,
        accept_code: bool = False,
        executor: str | Executor = "serial",
        threads: int | None = None,
        recipe: str | Recipe | None = None,
        device: str | None = None,
    ) -> Index:
        """An index on disk, after checking that it is whole and was made from what is given here.

        Without `model` and `task` it can score stored query features only. `train_data` is compared with what
        was indexed (all of it if that takes seconds). `verify=False` skips the checksums. A task whose code changed
        since is refused, unless it gives the same features (which is tried where model and `train_data` are given), or
        `accept_code=True` says that it does; that is noted in the index and in all scores. `executor` says who
        computes what is asked, as in `build`; other processes put the model on `device`.
        """
        runs = named(executor, threads=threads)
        if not runs.alone:
            raise UndeError(f"{runs} does a share of a build: ask an index with another executor")
        at = Opened(
            making.found(place(path), parse_bytes(memory), verify),
            model=None if model is None else unwrapped(model),
            task=task,
            checkpoints=checkpoints,
            collate=collate,
            executor=runs,
            recipe=making.as_recipe(recipe),
            device=device,
        )
        return cls(making.checked(at, train_data, groups, accept_code))

    @property
    def fishers(self) -> tuple[str, ...]:
        """The values of `fisher` that methods can have on this index: "empirical", and what was built or added."""
        return self._opened.stored.fishers

    def add_fisher(self, kind: str, *, progress: bool = True) -> None:
        """Compute the gradients that methods with `fisher=kind` need, beside those of the index.

        Args:
            kind: "sampled", one label drawn for each example, or "true", every label.
            progress: Whether to show a bar.

        Raises:
            UndeError: The index was opened without its model, task and data; it was changed since it was built; or the
                task has too many labels.

        >>> index.add_fisher("true")  # doctest: +SKIP
        >>> index.score(queries, unde.methods.TRAK(fisher="true"))  # doctest: +SKIP
        """
        making.add_fisher(self._opened, kind, progress)

    # --- changing it ------------------------------------------------------------------------------------

    def append(self, more_data: Any, ids: Sequence[Any] | None = None, *, progress: bool = True) -> None:
        """Add training examples: their features are computed, those of the others stay as they are stored.

        `ids` are their names, where the index has names. Kernels are fitted anew when they are next asked for, from
        what is stored; pca directions stay those of the examples that the index was built on. Whenever this is
        interrupted the index is as it was before, and the same call goes on where it stopped.
        """
        self.__init__(living.appended(self._opened, more_data, ids, progress))

    def holds(self, data: Any) -> Tensor:
        """(n,) bool: which examples are in the index already, by their content."""
        return living.held(self._opened.stored, Rows(data))

    def remove(self, ids: Sequence[Any] | None = None, *, indices: Sequence[int] | None = None) -> None:
        """Take training examples out, by their ids or by their `indices`, positions from 0 on; in an index without ids
        these are the same. Those behind them move up.

        Nothing is computed again, but for the covariances of EKFAC, which need the model and the data. When this
        returns, the folder holds no byte of what was removed: see docs/living-indexes.md for what else might.
        """
        self.__init__(living.removed(self._opened, ids, indices))

    @classmethod
    def merge(cls, indexes: Sequence[Index | str | Place], path: str | Place) -> Index:
        """A new index in `path` of all examples of several, in their order; these stay as they are.

        They must have been measured alike: same weights, task, method, projection, seed, groups and precision. The new
        one is opened without its model and task.
        """
        merging.merged([i.folder if isinstance(i, Index) else place(i) for i in indexes], place(path))
        return cls.open(path)

    def repack(self, path: str | Place, store_dtype: str) -> Index:
        """A new index in `path` of the same examples, stored in another way: `store_dtype` as in `build`. Nothing is
        computed again, and this one stays as it is. The new one is opened with all that this one was.

        >>> small = index.repack("runs/small", "int8")  # doctest: +SKIP
        """
        self._opened.check_finished()
        merging.repacked(self.folder, place(path), store_dtype)
        found = making.found(place(path), self.memory, verify=False)
        return Index(replace(self._opened, stored=found, ids=read_ids(found.folder, found.manifest)))

    @staticmethod
    def plan(model: nn.Module, task: Task, example: Any = None, **options: Any) -> Plan:
        """What building and asking an index would need, for a model that may be on the meta device.

        Options are those of `unde.plan.plan`: n_examples, seq_len, and most of `Index.build`.
        """
        return plan.plan(unwrapped(model), task, example, **options)

    # --- asking -----------------------------------------------------------------------------------------

    def features(self, queries: Any, path: str | Place | None = None) -> QueryFeatures:
        """Features of queries, to be used instead of them. With `path` they are kept there and reused.

        `a.mean()` asks about several queries as one, `a - b` about what sets one apart from the other.
        """
        if isinstance(queries, QueryFeatures):
            if queries.index != self.manifest.lineage:
                raise UndeError(
                    "these query features were computed for another index: compute them anew with this one"
                )
            return queries
        rows = Rows(queries, own_collate(self._opened.collate, queries))
        kept, m = None if path is None else place(path), self.manifest
        if kept is not None and there(kept):
            found = QueryFeatures.load(kept, m.lineage, (m.terms, m.width))
            if found.digests != rows.digests():
                raise UndeError(
                    f"{path} holds the features of other queries: choose another path, or delete it"
                )
            return found
        made = self._opened.session.features(rows)
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
        at = self._opened
        rows = None if made is queries else Rows(queries, own_collate(at.collate, queries))
        again = Asked(at.stored, lambda: at.session, at.rows, rows)
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
                or an `unde.evaluate.Training`.
            queries: Data like that which will be asked about, 100 to 500 examples, none of them trained on.
            halves: How many random halves to train on: 8 choose a setting, 16 also fit weights.
            budget: A time, such as "30min", after which no further model is begun.
            how: "retrain" from the start, or "local": one more epoch from the final model with the optimizer of a
                `Training`. Local trainings are cheap and order settings as retraining does; their LDS means nothing
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
        self._opened.check_finished()
        runs = self._opened.executor if executor is None else named(executor)
        with nullcontext() if executor is None else ending(executor, runs):
            made = calibrate(
                self._opened,
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
        if self._calibration is None and there(self.folder / layout.CALIBRATION):
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

    def uncalibrated(self) -> Index:
        """The same index without its calibration: the method that it was built for, and uniform weights."""
        made = Index(self._opened)
        made._use_calibration = False
        return made

    def _announce(self, calibration: Calibration) -> None:
        if not self._announced:
            console.note(f"calibrated: {calibration}")
            self._announced = True

    def _baselines(self, queries: Any, wanted: Mapping[str, Any] | bool) -> Mapping[str, Any]:
        if isinstance(wanted, Mapping):
            return wanted
        at = self._opened
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
        return diagnose(self._opened, scores, top, queries)

    def verify(self) -> Verified:
        """Every byte on disk against its checksum: true if all is well, else it says what is damaged and what to do."""
        return verify(self.folder)

    def tokens(self, scores: GroupScores, weights: WeightsLike = None) -> TokenScores:
        """Contributions of single tokens: `index.tokens(scores)(q, example)` adds up to the score of `example`."""
        at = self._opened
        return TokenScores(at.session, at.scorer, at.collate, scores, weights)

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
        scorer, chosen = self._opened.scorer, self.method_for(method)
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
        return self_retrieval.Retrieval.made(self._opened, chosen, perturb, examples, seed).weights()

    def trust(
        self,
        weights: Weights | None = None,
        method: str | Method | None = None,
        examples: int = SHOWN,
        seed: int = 0,
        perturb: Any = None,
    ) -> Trust:
        """How many training examples find themselves through a change, by its strength: see `unde.index.trust`."""
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
        return of_several(self._opened, weights, chosen, examples, seed, perturb)

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
            self._retrieved = (key, made(self._opened, method, None, few, 0, groups))
        return self._retrieved[1]
