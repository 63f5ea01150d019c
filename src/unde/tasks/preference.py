"""Pairs of a chosen and a rejected answer: direct preference optimization (DPO) and reward models.

Both minimize −log σ(m) of a margin m between the two answers, a classification with the logits (m, 0) and the label 0.
Examples have the columns that TRL's DPOTrainer and RewardTrainer make: `prompt_ids`, `chosen_ids`, `rejected_ids`,
and `ref_chosen_logps`, `ref_rejected_logps` or `margin`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks import model_checks
from unde.tasks.language import CausalLM
from unde.tasks.perturb import Perturbation
from unde.tasks.prediction import Classification, Prediction
from unde.tasks.replace import Replace, special_tokens
from unde.tasks.tokens import IGNORE, pad

CHOSEN, REJECTED = "chosen", "rejected"
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
_TEXT = CausalLM("sum")


class PairTask(Prediction):
    """Loss −log σ(margin) of pairs; a batch holds the texts "chosen" and "rejected", each as `CausalLM` takes them."""

    needed: Sequence[str] = ("chosen_ids", "rejected_ids")
    numbers: Sequence[str] = ()

    @abstractmethod
    def margin(self, model: nn.Module, batch: Any) -> Tensor:
        """(B,): how much better the chosen answer is than the rejected one."""

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        margin = self.margin(model, batch)
        logits = torch.stack([margin, torch.zeros_like(margin)], 1)
        return logits, torch.zeros_like(margin, dtype=torch.long)

    compare = Classification.compare
    sample_labels = Classification.sample_labels
    fisher_term = Classification.fisher_term

    def collate(self, examples: list[Any]) -> Any:
        """Prompt and answer in one sequence, with labels on the answer; padded on the right."""
        for i, e in enumerate(examples):
            missing = [k for k in self.needed if k not in e] if isinstance(e, Mapping) else self.needed
            if missing:
                there = sorted(e) if isinstance(e, Mapping) else type(e).__name__
                raise UndeError(
                    f"example {i} of a batch has no {missing[0]!r}, there is {there}: expected the columns "
                    f"{', '.join(self.needed)} of TRL, as in trainer.train_dataset"
                )
        batch: dict[str, Any] = {
            side: pad([join_answer(e, side) for e in examples]) for side in (CHOSEN, REJECTED)
        }
        names = [n for n in self.numbers if n in examples[0]]
        return batch | {n: torch.tensor([float(e[n]) for e in examples]) for n in names}

    def mask(self, batch: Any) -> Any:
        """Of both answers; where they are equally long, what is real in either."""
        masks = [
            batch[side].get("attention_mask", torch.ones_like(batch[side]["input_ids"])) != 0
            for side in (CHOSEN, REJECTED)
        ]
        same = masks[0].shape == masks[1].shape
        return [masks[0] | masks[1]] if same else masks

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Tokens replaced in the prompt and in both answers."""
        columns = [k for k in _IDS if k in examples[0]]
        texts = [{"input_ids": e[k]} for e in examples for k in columns]
        return [ReplacePairs(Replace.of(texts, special_tokens(model)))]


def join_answer(example: Mapping[str, Any], side: str) -> dict[str, Tensor]:
    """A prompt with one of its answers as an example of `CausalLM`, with labels on the answer."""
    prompt, answer = (torch.as_tensor(example.get(k, ())).long() for k in ("prompt_ids", f"{side}_ids"))
    return {
        "input_ids": torch.cat([prompt, answer]),
        "labels": torch.cat([torch.full_like(prompt, IGNORE), answer]),
    }


@dataclass(frozen=True)
class ReplacePairs:
    """Replaces tokens in the prompt and in both answers of a pair."""

    replace: Replace
    name: str = Replace.name
    least: float = Replace.least
    most: float = Replace.most

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        columns = {k: {"input_ids": example[k]} for k in _IDS if k in example}
        changed = {k: self.replace(v, strength, random)["input_ids"] for k, v in columns.items()}
        return {**example, **changed}


class Preference(PairTask):
    """The loss of direct preference optimization (DPO), −log σ(β(Δ − Δ_ref)), of each pair of answers.

    Δ is log p(chosen | prompt) − log p(rejected | prompt) under the model, Δ_ref the same under the reference model,
    stored with the data as `ref_chosen_logps` and `ref_rejected_logps`. TRL's DPOTrainer adds them with
    `precompute_ref_log_probs=True`; `unde.integrations.transformers.add_reference` adds them from a frozen model.

    A query may be a pair, or a text as `CausalLM` takes it, {"input_ids": …, "labels": …}: then its loss is −log p of
    the text, and scores say which pairs made the model say it.

    Args:
        beta: β of the training; TRL's default is 0.1.

    >>> task = Preference(beta=0.1)
    >>> pair = {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}
    >>> batch = task.collate([pair | {"ref_chosen_logps": -4.0, "ref_rejected_logps": -3.0}])
    >>> batch["chosen"]["labels"], batch["ref_chosen_logps"]
    (tensor([[-100, -100,    3,    4]]), tensor([-4.]))
    """

    needed = (*_IDS, *REFERENCE)
    numbers = REFERENCE

    def __init__(self, beta: float = 0.1) -> None:
        if not 0 < beta < math.inf:
            raise UndeError(f"beta is {beta}: expected a number above 0, such as 0.1, the β of the training")
        self.beta = beta

    def margin(self, model: nn.Module, batch: Any) -> Tensor:
        return self._margin(batch, *self._sides(model, batch))

    def _sides(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """(B, T) −log p of the tokens of the chosen answer, and of the rejected one."""
        return _TEXT.token_losses(model, batch[CHOSEN]), _TEXT.token_losses(model, batch[REJECTED])

    def _margin(self, batch: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
        reference = (batch[REFERENCE[0]] - batch[REFERENCE[1]]).to(chosen)
        return self.beta * (rejected.sum(1) - chosen.sum(1) - reference)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return _TEXT.loss(model, batch) if _is_text(batch) else super().loss(model, batch)

    def token_losses(self, model: nn.Module, batch: Any) -> Tensor:
        """(B, T): terms whose gradients add up to that of the loss, of each token of the chosen answer with its prompt,
        then of the rejected one; their values do not add up to the loss."""
        if _is_text(batch):
            return _TEXT.token_losses(model, batch)
        chosen, rejected = self._sides(model, batch)
        share = self.beta * torch.sigmoid(-self._margin(batch, chosen, rejected)).detach().unsqueeze(1)
        return share * torch.cat([chosen, -rejected], 1)

    def collate(self, examples: list[Any]) -> Any:
        """Pairs as they are stored, or texts."""
        if examples and _is_text(examples[0]):
            return _TEXT.collate(examples)
        absent = [k for k in REFERENCE if isinstance(examples[0], Mapping) and k not in examples[0]]
        if absent and all(k in examples[0] for k in _IDS):
            raise UndeError(
                f"pairs without {absent[0]!r}, the log-probability under the reference model: train with "
                "DPOConfig(precompute_ref_log_probs=True), or add them with "
                "unde.integrations.transformers.add_reference(pairs, reference_model)"
            )
        return super().collate(examples)

    def mask(self, batch: Any) -> Any:
        return _TEXT.mask(batch) if _is_text(batch) else super().mask(batch)

    def check(self, model: nn.Module, batch: Any) -> None:
        """Refuse models that are no causal language models."""
        _TEXT.check(model, batch if _is_text(batch) else batch[CHOSEN])


def _is_text(batch: Any) -> bool:
    return isinstance(batch, Mapping) and "input_ids" in batch


class Reward(PairTask):
    """The loss of a reward model, −log σ(r(chosen) − r(rejected) − margin), of each pair of answers.

    The model gives one number for a text, as `AutoModelForSequenceClassification` with `num_labels=1` does. A column
    `margin` is optional. Examples are those of TRL's RewardTrainer: `chosen_ids` and `rejected_ids`, whole texts.

    >>> batch = Reward().collate([{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}])
    >>> batch["rejected"]["input_ids"]
    tensor([[1, 4]])
    """

    numbers = ("margin",)

    def margin(self, model: nn.Module, batch: Any) -> Tensor:
        rewards = [self._reward(model, batch[side]) for side in (CHOSEN, REJECTED)]
        margin = rewards[0] - rewards[1]
        return margin - batch["margin"].to(margin) if "margin" in batch else margin

    def _reward(self, model: nn.Module, texts: Any) -> Tensor:
        reward = self.logits(model, texts)  # without the labels
        if reward.dim() != 2 or reward.shape[1] != 1:
            raise UndeError(
                f"the model returned {tuple(reward.shape)} for {len(texts['input_ids'])} texts: expected one number "
                "for each, (B, 1), as of a model for sequence classification with num_labels=1"
            )
        return reward[:, 0]

    def check(self, model: nn.Module, batch: Any) -> None:
        """Refuse models that do not give one number for a text."""
        model_checks.check_no_decoder(_TEXT, model)
        self._reward(model, batch[CHOSEN])
