"""What a command works on: a setup, its index, its weights, and its three disjoint sets of data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from unde import console
from unde.cli.options import ModelOptions
from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.index import Index
from unde.integrations.documents import Texts
from unde.integrations.source import ModelSource
from unde.parallel import SERIAL, Executor
from unde.scoring import GroupScores
from unde.scoring.data_splits import refuse_shared, shared
from unde.setup import Recipe
from unde.store.files import CannotWrite
from unde.store.layout import QUERIES
from unde.store.remote import StorePath, Unreachable, exists
from unde.weights import Weights


class Project:
    """The setup of a command line: MODULE:FUNCTION, or a Hugging Face model and texts.

    Args:
        model: The options of the model.
        index: Where options of the model that are not named are looked up.
        learn: Texts of queries to learn from; for Hugging Face models, whose setup has none.
        evaluate: Texts of queries to ask about, likewise.
        query_field: The field of the text in files of queries.
    """

    def __init__(
        self,
        model: ModelOptions,
        *,
        index: StorePath | None = None,
        learn: Texts | None = None,
        evaluate: Texts | None = None,
        query_field: str | None = None,
    ) -> None:
        target, source = model.target, model.source()
        texts = source.text_options
        if target is not None and texts:
            raise UndeError(
                f"{target} and --{'hf-model' if 'model' in texts else next(iter(texts)).replace('_', '-')}: give "
                "MODULE:FUNCTION, or --hf-model with --data, not both"
            )
        if target is not None and source.trust_remote_code:
            raise UndeError(f"--trust-remote-code goes with --hf-model: the code of {target} is run anyway")
        self.source: ModelSource | None = None
        if target is not None:
            if learn is not None or evaluate is not None:
                raise UndeError(
                    f"queries as texts go with --hf-model: {target} brings its own, learn_queries and eval_queries"
                )
            self.name, self.setup = target, Recipe(target).make()
        else:
            complete = source.complete(index)
            self.name, self.setup = str(complete.model), complete.setup(learn, evaluate, query_field)
            self.source = replace(
                complete, seq_len=getattr(self.setup.train_data, "length", complete.seq_len)
            )
        self.checkpoints, self.rates = source.checkpoints_of(self.setup.model, index)
        self.shares: Sequence[float] | None = None  # of checkpoints, for all methods
        if self.checkpoints is None and self.setup.checkpoints is not None:
            self.checkpoints, self.shares = list(self.setup.checkpoints), self.setup.checkpoint_weights
        self.memory = self.source or ModelSource(
            target=target, checkpoints=source.checkpoints
        )  # kept by an index
        self.device = model.device
        if self.device is not None:
            _move(self.setup.model, self.device)

    @property
    def recipe(self) -> Recipe:
        """How another process makes the same setup."""
        return Recipe(self.name) if self.source is None else self.source.recipe

    def index(
        self, path: StorePath, executor: Executor = SERIAL, whole: bool = True, uncalibrated: bool = False
    ) -> Index:
        """Open an index.

        Args:
            path: The folder or URL.
            executor: Where jobs run.
            whole: Whether the training data of the setup are those of the index.
            uncalibrated: Whether to ignore the calibration.
        """
        s = self.setup
        made = Index.open(
            path,
            model=s.model,
            task=s.task,
            train_data=s.train_data if whole else None,
            checkpoints=self.checkpoints,
            collate=s.collate,
            executor=executor,
            recipe=self.recipe,
            device=self.device,
        )
        if whole and made.manifest.changes is not None:  # positions are those of the index
            s.train_data, s.ids = made.train_data, made.ids
        return made.uncalibrated() if uncalibrated else made

    def queries(self, role: str) -> Rows:
        if role not in ("learn", "eval"):
            raise unknown("queries", role, ("learn", "eval"))
        data = self.setup.learn_queries if role == "learn" else self.setup.eval_queries
        if data is None and self.source is not None:
            other = (
                "to evaluate (--queries FILE.jsonl)"
                if role == "learn"
                else "to learn weights (--queries FILE.jsonl)"
            )
            raise UndeError(f"no queries: give texts that are not in the training data and not used {other}")
        if data is None:
            raise UndeError(f"{self.name} gives no {role}_queries: set Setup(..., {role}_queries=...)")
        return self.setup.rows(data)

    def disjoint_queries(self, role: str) -> Rows:
        """The queries of a role, after checking that the roles share no example."""
        queries, other = self.queries(role), "eval" if role == "learn" else "learn"
        name_of_role = f"{role}_queries" if self.source is None else "queries"
        digests = queries.digests()
        rest = self.setup.eval_queries if role == "learn" else self.setup.learn_queries
        for name, data in (("the training data", self.setup.train_data), (f"{other}_queries", rest)):
            found = shared(digests, Rows(data).digests()) if data is not None else []
            refuse_shared(len({digests[i] for i in found}), name_of_role, name)
        return queries

    def names(self, role: str) -> list[str] | None:
        """The ids of the queries of a file."""
        return self.queries(role).data.ids if self.source is not None else None


def cached_scores(index: Index, queries: Rows, method: str | None) -> GroupScores:
    """Score queries; their features are cached in the index for the next command."""
    key = hashlib.blake2b("".join(queries.digests()).encode(), digest_size=8).hexdigest()
    path = index.folder / QUERIES / f"{key}.safetensors"
    features = None
    if exists(path):
        try:
            features = index.features(queries, path)
        except Unreachable:
            raise
        except UndeError as e:
            console.note(f"{e}; computed again")
    if features is None:
        features = index.features(queries)
        try:
            features.save(path)
        except (CannotWrite, Unreachable) as e:  # an index that may be read, and not written
            console.note(f"features of these queries are not cached for the next command ({e.strerror})")
    return index.score(features, method)


def load_weights(path: StorePath, scores: GroupScores) -> Weights:
    """Load weights; queries that they were learned on are refused."""
    if path.is_dir():
        raise UndeError(f"{path} is a folder: expected a file of weights, written by `unde learn`")
    weights = Weights.load(path)
    try:
        weights.aligned_to(scores.groups)
    except UndeError as e:
        raise UndeError(f"{path}: {e}") from None
    seen = shared(scores.query_digests, weights.query_digests)
    if seen:
        raise UndeError(
            f"{path} was learned on {len(seen)} of these queries: attribute and evaluate other ones"
        )
    return weights


def _move(model: nn.Module, device: str) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as e:
        raise UndeError(f"cannot use the device {device!r} ({str(e).splitlines()[0]})") from None
