"""WikiText-103: LDS and tail-patch of GPT-2-small from scratch. OpenWebText: tail-patch of Llama-3-8B-Instruct."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.scale.settings import Language, Llama
from experiments.scale.sources import Sequences, sequences, texts, tokenizer_in
from experiments.scale.study import Study, initial, optimizer_of
from experiments.shared.language import patched
from experiments.shared.paths import unfinished
from unde import console
from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate import TailPatch, random_indices, tail_patch
from unde.integrations.language import load_model
from unde.methods import EKFAC, LoGRA, Method, TracIn
from unde.tasks import CausalLM
from unde.tasks.language import IGNORE

TABLES = "with the column 'text': train*.parquet (or .jsonl, .arrow), or what save_to_disk wrote"
LAYOUT = f"the splits train, validation and test of WikiText-103 {TABLES}"
OPEN_LAYOUT = f"OpenWebText {TABLES}"
SPLITS = {"train": "train", "learn": "test", "eval": "validation"}


class Texts(Study):
    task = CausalLM

    @property
    def exclude(self) -> tuple[str, ...]:
        return self.setting.exclude

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_in(self.place.model, self.setting.pretrained)

    def sequences(self, role: str, some: Any, count: int) -> Sequences:
        path, what = self.folder / f"{role}.tokens", f"the texts of {self.place.data}: {role}"
        return sequences(path, some, self._tokenizer, self.setting.length, count, what)

    def tail_patches(
        self, step: dict[str, Any], more: Callable[[dict[str, Tensor]], Any] | None = None
    ) -> Path:
        """Tail-patch of each method with its top `setting.patch` examples; `step` goes to `tail_patch`."""
        data, queries = self.train(), self.queries("eval")
        k = min(self.setting.patch, len(data))

        def patch(indices: Tensor) -> TailPatch:
            rows = self.place.rows
            return tail_patch(self.model, CausalLM(), data, queries, indices, micro_batch=rows, **step)

        def entry(title: str) -> dict[str, Any]:
            found, tops = patched(title, self.learn_scores(title), self.eval_scores(title), patch, k)
            return found if more is None else found | {"own snippet is top-1": more(tops)}

        def random() -> dict[str, Any]:
            return {"k": k, **patch(random_indices(len(data), len(Rows(queries)), k)).as_dict()}

        return self.measure_methods("tail-patch", entry, random=random)


class WikiText(Texts):
    setting: Language

    @cached_property
    def config(self) -> Any:
        from transformers import GPT2Config

        return GPT2Config(**self.setting.config, use_cache=False)

    @cached_property
    def _data(self) -> dict[str, Sequences]:
        s, known = self.setting, self.config.vocab_size
        if len(self._tokenizer) > known:
            raise UndeError(
                f"the tokenizer knows {len(self._tokenizer):,} tokens, the model {known:,}: not GPT-2's"
            )
        counts = {"train": s.train, "learn": s.learn, "eval": s.evaluate}
        return {
            role: self.sequences(role, texts(self.place.data, split, LAYOUT), counts[role])
            for role, split in SPLITS.items()
        }

    def train(self) -> Sequences:
        return self._data["train"]

    def queries(self, role: str) -> Sequences:
        return self._data[role]

    def blank(self) -> nn.Module:
        from transformers import GPT2LMHeadModel

        return initial(lambda: GPT2LMHeadModel(self.config))

    @property
    def methods(self) -> dict[str, Method]:
        s = self.setting
        return {
            "TracIn": TracIn(s.projection),
            "TRAK": LoGRA(s.projection, blocks=s.trak_blocks),  # "full" is TRAK's own matrix
            "LoGRA": LoGRA(s.logra),
            "EKFAC": EKFAC(s.logra),
        }

    def run_patches(self) -> Path:
        """One more step on the top 128 examples of each query."""
        recipe = self.setting.recipe
        step = {"optimizer_state": self.trained[1], "max_grad_norm": recipe.max_grad_norm}
        step |= {"optimizer": partial(optimizer_of, recipe=recipe), "lr": recipe.lr * (recipe.final or 1)}
        return self.tail_patches(step)


class OpenWebText(Texts):
    """ "Assuming that the model was pre-trained on this corpus, without further training" (C.6)."""

    setting: Llama

    def blank(self) -> nn.Module:
        if self.place.model is None:
            raise UndeError(f"no model: give --model FOLDER with {self.setting.pretrained}")
        return load_model(str(self.place.model))

    @cached_property
    def trained(self) -> tuple[nn.Module, dict[str, Any]]:
        return self.blank().to(self.place.device).eval(), {}

    @property
    def methods(self) -> dict[str, Method]:
        return {"TracIn": TracIn(self.setting.projection), "LoGRA": LoGRA(self.setting.projection)}

    @cached_property
    def _train(self) -> Sequences:
        some = texts(self.place.data, "train", OPEN_LAYOUT, self.setting.entries)
        return self.sequences("train", some, self.setting.train)

    def train(self) -> Sequences:
        return self._train

    @cached_property
    def _generated(self) -> dict[str, Tensor]:
        """(Q, length) tokens of each role: a snippet of a training sequence, and what the model makes of it."""
        s, path = self.setting, self.folder / "queries.pt"
        if not path.exists():
            order = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(0))
            if s.learn + s.evaluate > len(order):
                raise UndeError(f"{s.learn + s.evaluate} snippets from {len(order)} sequences: expected more")
            made = {}
            for seed, role in enumerate(("learn", "eval")):
                which = order[: s.learn] if role == "learn" else order[s.learn : s.learn + s.evaluate]
                prompts = self._train.rows(which)[:, : s.snippet]
                made[role] = continued(self.model, prompts, s.length, seed, self.place.rows, role)
                made[f"{role} sources"] = which
            with unfinished(path) as part:
                torch.save(made, part)
        return torch.load(path, weights_only=True)

    def queries(self, role: str) -> dict[str, Tensor]:
        """The generated tokens alone have a loss."""
        rows = self._generated[role]
        labels = rows.clone()
        labels[:, : self.setting.snippet] = IGNORE
        return {"input_ids": rows, "labels": labels}

    def run_patches(self) -> Path:
        """One step of fine-tuning on the top-1 example of each query."""

        def hits(tops: dict[str, Tensor]) -> dict[str, float]:
            sources = self._generated["eval sources"]
            return {kind: float((top[:, 0] == sources).float().mean()) for kind, top in tops.items()}

        step = {"optimizer": partial(torch.optim.AdamW, lr=self.setting.lr), "max_grad_norm": 1.0}
        return self.tail_patches(step, hits)


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
