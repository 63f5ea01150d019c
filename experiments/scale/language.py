"""WikiText-103: GPT-2-small from scratch; LDS and tail-patch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.scale import findings
from experiments.scale.sources import texts
from experiments.scale.study import Study, initial, losses
from experiments.scale.tokens import Sequences, sequences, tokenizer_in
from experiments.scale.training import State, fit, optimizer_of
from unde.errors import UndeError
from unde.evaluate import TailPatch, random_indices, tail_patch
from unde.methods import EKFAC, LoGRA, Method, TracIn
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

        return fit(
            model, loss, len(rows), self.setting.recipe, seed=seed, rows=self.place.rows, checkpoint=checkpoint,
            title=self.name,
        )  # fmt: skip

    def utility(self, model: nn.Module) -> dict[str, Tensor]:
        return {
            role: -losses(self.task, model, self.queries(role), self.place.rows, self.place.device)
            for role in ("learn", "eval")
        }

    def patches(self) -> Path:
        """Tail-patch: one more step on the top 128 examples of each query."""
        self.begin()
        s, (model, state) = self.setting, self.trained()
        data, queries, name = self.train_data(), self.queries("eval"), f"{self.name}-tail-patch"
        lr = s.recipe.lr * (s.recipe.final or 1)

        def patch(indices: Any, title: str) -> TailPatch:
            return findings.kept(
                self.folder / "tail-patch" / f"{title}.npz",
                torch.as_tensor(indices),
                lambda: tail_patch(
                    model, self.task, data, queries, indices, optimizer=lambda ps: optimizer_of(ps, s.recipe),
                    optimizer_state=state, lr=lr, micro_batch=self.place.rows,
                    max_grad_norm=s.recipe.max_grad_norm,
                ),
            )  # fmt: skip

        k = min(s.patch, len(data))
        found = patch(random_indices(len(data), len(queries), k), "random")
        results: dict[str, Any] = {"methods": {}, "bank": None, "random": found.per_token.as_dict(), "k": k}
        path = self.place.results / f"{name}.json"
        for title, method in self.methods(model).items():
            index = self.index(model, method)
            weights, without = self.weighed(index, method)
            scores = self.scores(index, method, "eval")
            results["methods"][title] = findings.patch_entry(
                method, scores, weights, without, k, lambda rows, rule, t=title: patch(rows, f"{t}-{rule}")
            )
            path = findings.write(self.place.results, name, results, s)
        return path
