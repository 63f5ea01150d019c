"""What an open index has at hand: its files, and the model, task and training data where they were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from unde.checkpoints import Checkpoint
from unde.data import Collate, Rows
from unde.errors import UndeError
from unde.fingerprints import ModelWatch
from unde.groups import Groups
from unde.index.feature_runner import FeatureRunner
from unde.index.reader import IndexReader
from unde.index.scorer import Scorer
from unde.parallel import SERIAL, Executor
from unde.parallel.model_transport import AnyRecipe, ModelInputs
from unde.tasks.base import Task


@dataclass
class IndexState:
    stored: IndexReader
    ids: Sequence[Any] | None = None
    model: nn.Module | None = None
    task: Task | None = None
    checkpoints: Sequence[Checkpoint] | None = None
    collate: Collate | None = None
    rows: Rows | None = None  # the training data
    executor: Executor = SERIAL  # who computes what is asked
    recipe: AnyRecipe | None = None  # how others make the model
    device: str | None = None  # where they put it
    watch: ModelWatch | None = None  # of the model since it was compared with the index; None: it was not
    unfinished: int = 0  # shards that other workers have not written yet

    diagnosis: list[str] | None = field(
        default=None, init=False, repr=False
    )  # of model and examples, once known

    def __post_init__(self) -> None:
        self.stored.record_files()

    @cached_property
    def groups(self) -> Groups:
        return self.stored.manifest.as_groups()

    def check_finished(self) -> None:
        if self.unfinished:
            raise UndeError(
                f"{self.stored.folder} is not finished: {self.unfinished} shards were not written yet when this worker "
                "ended. When all have ended, run the same build once more without the array (unde finish)"
            )

    @cached_property
    def scorer(self) -> Scorer:
        self.check_finished()
        return Scorer(self.stored, self.groups, self.ids, self.executor)

    @cached_property
    def runner(self) -> FeatureRunner:
        self.check_finished()
        if self.model is None or self.task is None:
            raise UndeError(
                "this index was opened without its model and task: pass both to Index.open for query features"
            )
        inputs = ModelInputs(self.model, self.task, self.rows, self.checkpoints, self.recipe, self.device)
        stored = self.stored
        return FeatureRunner(stored.folder, stored.manifest, inputs, self.executor, self.watch)
