"""WikiText-103: GPT-2-small from scratch; LDS and tail-patch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.scale import findings
from experiments.scale.findings import Learned
from experiments.scale.sources import Sequences, sequences, texts, tokenizer_in
from experiments.scale.study import Study, initial
from experiments.scale.training import State, optimizer_of
from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate import TailPatch, random_indices, tail_patch
from unde.methods import EKFAC, LoGRA, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import CausalLM

LAYOUT = (
    "the splits train, validation and test of WikiText-103 with the column 'text': train*.parquet (or .jsonl, "
    ".arrow) and so on, in the folder or in data/, or what save_to_disk wrote"
)
SPLITS = {"train": "train", "learn": "test", "eval": "validation"}


class WikiText(Study):
    task, name = CausalLM(), "wikitext103"

    @cached_property
    def _data(self) -> dict[str, Sequences]:
        s, place = self.setting, self.place
        tokenizer = tokenizer_in(place.model, "one with GPT-2's tokenizer")
        known = self.config.vocab_size
        if len(tokenizer) > known:
            raise UndeError(
                f"the tokenizer knows {len(tokenizer):,} tokens, the model {known:,}: not GPT-2's"
            )
        counts = {"train": s.train, "learn": s.learn, "eval": s.evaluate}
        return {
            role: sequences(
                self.folder / f"{role}.tokens",
                texts(place.source, split, LAYOUT),
                tokenizer,
                s.length,
                counts[role],
                place.fewer,
                f"the {split} split of {place.source}",
            )
            for role, split in SPLITS.items()
        }

    @property
    def config(self) -> Any:
        from transformers import GPT2Config

        return GPT2Config(**self.setting.config, use_cache=False)

    def blank(self) -> nn.Module:
        from transformers import GPT2LMHeadModel

        return initial(lambda: GPT2LMHeadModel(self.config))

    def methods(self, model: nn.Module) -> dict[str, Method]:
        s = self.setting
        return {
            "TracIn": TracIn(s.projection),
            "TRAK": LoGRA(s.projection, blocks=s.trak_blocks),  # "full" is TRAK's own matrix
            "LoGRA": LoGRA(s.logra),
            "EKFAC": EKFAC(s.logra),
        }

    def train_data(self) -> Sequences:
        return self._data["train"]

    def queries(self, role: str, method: Method | None = None) -> Sequences:
        return self._data[role]

    def train(self, model: nn.Module, rows: np.ndarray, seed: int, checkpoint: Path) -> State:
        data = self.train_data()

        def loss(model: nn.Module, part: Tensor, draws: torch.Generator) -> Tensor:
            ids = data.rows(rows[part.numpy()]).to(self.place.device)
            return self.task.loss(model, {"input_ids": ids})

        return self.fit(model, loss, len(rows), seed, checkpoint)

    def patches(self) -> Path:
        """Tail-patch: one more step on the top 128 examples of each query."""
        self.begin()
        recipe, (_, state) = self.setting.recipe, self.trained()
        return measure_patches(
            self,
            f"{self.name}-tail-patch",
            optimizer=lambda parameters: optimizer_of(parameters, recipe),
            optimizer_state=state,
            lr=recipe.lr * (recipe.final or 1),
            max_grad_norm=recipe.max_grad_norm,
        )


def measure_patches(
    study: Study, name: str, more: Callable[[GroupScores, Any], dict[str, Any]] | None = None, **step: Any
) -> Path:
    """Tail-patch of each method with its top `setting.patch` examples; `step` goes to `tail_patch`."""
    model, _ = study.trained()
    data, queries = study.train_data(), study.queries("eval")
    k = min(study.setting.patch, len(data))

    def patch(indices: Any, title: str) -> TailPatch:
        return findings.kept(
            study.folder / "tail-patch" / f"{title}.npz",
            torch.as_tensor(indices),
            lambda: tail_patch(
                model, study.task, data, queries, indices, micro_batch=study.place.rows, **step
            ),
        )

    def entry(learned: Learned) -> dict[str, Any]:
        scores = study.scores(learned.index, learned.method, "eval")
        found = findings.patch_entry(
            learned, scores, k, lambda rows, rule: patch(rows, f"{learned.title}-{rule}")
        )
        return found | (more(scores, learned.weights) if more else {})

    found = patch(random_indices(len(data), len(Rows(queries)), k), "random")
    return study.measure_methods(name, entry, random=found.per_token.as_dict(), k=k)
