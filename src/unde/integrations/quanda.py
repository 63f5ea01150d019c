"""Explainers for quanda, whose metrics then measure unde: classes with the interface of its `Explainer`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unde.errors import unknown
from unde.index import Index
from unde.integrations import require
from unde.methods import Method
from unde.tasks import CausalLM, Classification, Task
from unde.weights import Weights

TASKS: dict[str, type[Task]] = {
    "image_classification": Classification,
    "text_classification": Classification,
    "causal_lm": CausalLM,
}
LEARN = "learn"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "labels")  # of texts; other columns stay out


def explainer(
    method: str | Method = "trak", weights: Weights | str | None = None, **options: Any
) -> type[Any]:
    """A class of explainers, as quanda's metrics and benchmarks take them (`explainer_cls`).

    `weights` are those to score with; "learn" learns them by self-retrieval, from the training data alone. `options`
    are those of `Index.build`, such as groups="tensor". What is made of the class takes `model`, `train_dataset`,
    `task`, `checkpoints` and `checkpoints_load_func` as any explainer of quanda does, and `cache_dir` and `model_id`:
    an index is kept in cache_dir/model_id and found again there; without `cache_dir` it is gone with the explainer.
    Several checkpoints are those of `Index.build`; the model is left with the last of them.

        cls = unde.integrations.quanda.explainer(method="trak")
        found = cls(model=model, train_dataset=train).explain(test_data=x, targets=y)  # (Q, N)
    """
    if isinstance(weights, str) and weights != LEARN:
        raise unknown("weights", weights, (LEARN,))
    base = require("quanda.explainers", "quanda").Explainer

    class UndeExplainer(base):
        accepted_tasks: ClassVar[list[str]] = list(TASKS)

        def __init__(
            self,
            model: nn.Module,
            train_dataset: Any,
            task: str = "image_classification",
            checkpoints: str | list[str] | None = None,
            checkpoints_load_func: Any = None,
            model_id: str = "unde",
            cache_dir: str | None = None,
        ) -> None:
            more = {"checkpoints": checkpoints, "checkpoints_load_func": checkpoints_load_func}
            super().__init__(model=model, train_dataset=train_dataset, task=task, **more)
            self.unde_task, self._examples = TASKS[task](), _Examples(train_dataset)
            if cache_dir is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="unde-quanda-")
                cache_dir = self._temporary.name
            self._folder = Path(cache_dir) / model_id

        @cached_property
        def index(self) -> Index:
            """Built when it is first asked for, or found."""
            states = []  # of each checkpoint; the model keeps the last
            for path in self.checkpoints:
                self.checkpoints_load_func(self.model, path)
                states.append({k: v.detach().clone() for k, v in self.model.state_dict().items()})
            settings: dict[str, Any] = {"progress": False, "method": method, **options}
            if len(states) > 1:
                settings["checkpoints"] = states
            return Index.build(self.model, self.unde_task, self._examples, self._folder, **settings)

        @cached_property
        def weights(self) -> Weights | None:
            return self.index.learn_weights() if isinstance(weights, str) else weights

        def explain(self, test_data: Any, targets: Any) -> Tensor:
            """(queries, training examples); positive = proponent."""
            scores = self.index.score(_queries(test_data, targets))
            return scores.total(self.weights).to(self.device)

        def self_influence(self, batch_size: int = 32) -> Tensor:
            """(training examples,); as many at a time as the memory of the index holds, whatever the batch size."""
            return self.index.self_influence(self.weights).to(self.device)

    return UndeExplainer


class _Examples(Dataset):
    """A data set of quanda as unde reads it: rows of texts as tensors, without columns that are for people."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        row = self.data[index]
        if not isinstance(row, Mapping):
            return row
        return {k: torch.as_tensor(row[k]) for k in _INPUTS if k in row}


def _queries(test_data: Any, targets: Any) -> Any:
    labels = torch.as_tensor(targets)
    if isinstance(test_data, Mapping):
        return {**{k: v for k, v in test_data.items() if k in _INPUTS}, "labels": labels}
    return test_data, labels.to(test_data.device)
