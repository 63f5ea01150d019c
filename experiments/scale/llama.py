"""Llama-3-8B-Instruct as it is, on OpenWebText: tail-patch with the top-1 example of each generated query."""

from __future__ import annotations

from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.scale.language import measure_patches
from experiments.scale.sources import Sequences, sequences, texts, tokenizer_in
from experiments.scale.study import Study
from experiments.scale.training import State
from experiments.shared.paths import unfinished
from unde import Weights, console
from unde.errors import UndeError
from unde.integrations.language import load_model
from unde.methods import LoGRA, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import CausalLM
from unde.tasks.language import IGNORE

LAYOUT = "OpenWebText with the column 'text': train*.parquet (or .jsonl, .arrow), or what save_to_disk wrote"
BATCH = 1000  # entries read together


class OpenWebText(Study):
    task, name = CausalLM(), "llama-owt"

    def blank(self) -> nn.Module:
        if self.place.model is None or not (self.place.model / "config.json").exists():
            raise UndeError(
                f"no model in {self.place.model}: give --model FOLDER with {self.setting.pretrained}"
            )
        return load_model(str(self.place.model))

    def _made(self) -> tuple[nn.Module, State]:
        """ "Assuming that the model was pre-trained on this corpus, without further training" (C.6)."""
        return self.blank().to(self.place.device).eval(), {}

    def train(self, model: nn.Module, rows: np.ndarray, seed: int, checkpoint: Path) -> State:
        raise UndeError("this model is attributed as it is: nothing is trained, and there are no halves")

    def methods(self, model: nn.Module) -> dict[str, Method]:
        return {"TracIn": TracIn(self.setting.projection), "LoGRA": LoGRA(self.setting.projection)}

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_in(self.place.model, self.setting.pretrained.what)

    @cached_property
    def _train(self) -> Sequences:
        s = self.setting
        some = islice(texts(self.place.source, "train", LAYOUT, BATCH), -(-s.entries // BATCH))
        path, what = self.folder / "train.tokens", str(self.place.source)
        return sequences(path, some, self._tokenizer, s.length, s.train, self.place.fewer, what)

    def train_data(self) -> Sequences:
        return self._train

    @cached_property
    def _generated(self) -> dict[str, Tensor]:
        """(Q, length) tokens of each role: a snippet of a training sequence, and what the model makes of it."""
        path = self.folder / "queries.pt"
        if path.exists():
            return torch.load(path, weights_only=True)
        s = self.setting
        order = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(0))
        if s.learn + s.evaluate > len(order):
            raise UndeError(f"{s.learn + s.evaluate} snippets from {len(order)} sequences: expected more")
        chosen = {"learn": order[: s.learn], "eval": order[s.learn : s.learn + s.evaluate]}
        made = {}
        for seed, (role, which) in enumerate(chosen.items()):
            prompts = self._train.rows(which)[:, : s.snippet]
            made[role] = continued(self.trained()[0], prompts, s.length, seed, self.place.rows, role)
            made[f"{role} sources"] = which
        with unfinished(path) as part:
            torch.save(made, part)
        return made

    def queries(self, role: str, method: Method | None = None) -> dict[str, Tensor]:
        """The generated tokens alone have a loss."""
        rows = self._generated[role]
        labels = rows.clone()
        labels[:, : self.setting.snippet] = IGNORE
        return {"input_ids": rows, "labels": labels}

    def patches(self) -> Path:
        self.begin()
        self.trained()
        sources = self._generated["eval sources"]

        def snippets(scores: GroupScores, weights: Weights) -> dict[str, Any]:
            ways = {"unweighted": None, "fixed": weights}
            hits = {name: scores.top(1, w).indices[:, 0] == sources for name, w in ways.items()}
            return {"own snippet is top-1": {name: float(hit.float().mean()) for name, hit in hits.items()}}

        optimizer = partial(torch.optim.AdamW, lr=self.setting.lr)
        return measure_patches(self, self.name, snippets, optimizer=optimizer, max_grad_norm=1.0)


@torch.no_grad()
def continued(model: nn.Module, prompts: Tensor, length: int, seed: int, rows: int, title: str) -> Tensor:
    """(n, length): each prompt, and tokens drawn one after the other from the model's own distribution."""
    draw, device, out = torch.Generator().manual_seed(seed), next(model.parameters()).device, []
    with console.progress(f"generating queries: {title}", len(prompts), estimate="queries") as advance:
        for part in prompts.split(rows):
            tokens, past = part.to(device), None
            new = tokens
            while tokens.shape[1] < length:
                found = model(input_ids=new, past_key_values=past, use_cache=True)
                past = found.past_key_values
                chances = found.logits[:, -1].float().softmax(-1).cpu()  # drawn alike on every device
                new = torch.multinomial(chances, 1, generator=draw).to(device)
                tokens = torch.cat([tokens, new], 1)
            out.append(tokens.cpu())
            advance(len(part))
    return torch.cat(out)
