"""Cross-entropy classification, for plain modules and Hugging Face models alike: one class, several, or one a token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks import model_checks, sampling
from unde.tasks.perturb import Perturbation
from unde.tasks.prediction import Prediction, first_flagged, label_tensor
from unde.tasks.replace import ReplaceInputs, special_tokens
from unde.tasks.tokens import (
    Predictions,
    TokenTask,
    Unreadable,
    check_columns,
    check_examples,
    pad_right,
    roll_left,
    run_model,
    token_logits,
)

LEFT_OUT = -100  # a label that cross-entropy leaves out


class Classification(Prediction):
    """One class for each example. Batches are (inputs, labels), or a dict with "labels" whose other entries are the
    model's arguments, as of Hugging Face; texts are padded and masked.

    >>> import torch
    >>> Classification().loss(nn.Linear(3, 2), (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))).shape
    torch.Size([5])
    """

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = self.logits(model, batch), self.split(batch)[1]
        labels = label_tensor(labels, f"class numbers, from 0 to {logits.shape[-1] - 1}")
        if labels.is_floating_point():
            raise UndeError(
                f"labels of type {labels.dtype}: expected class numbers. For several classes at once use "
                "unde.tasks.MultiLabel, for real numbers unde.tasks.Regression, for others subclass Task"
            )
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            per_token = logits.dim() == 3 and labels.shape == logits.shape[:2]
            raise UndeError(
                f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}: "
                "expected (B, classes) and (B,)"
                + (". For a class for each token use unde.tasks.TokenClassification" if per_token else "")
            )
        row = first_flagged(((labels < 0) & (labels != LEFT_OUT)) | (labels >= logits.shape[1]))
        if row is not None:
            raise Unreadable(
                row, f"has the label {int(labels[row])}: expected a class number, 0 to {logits.shape[1] - 1}"
            )
        return logits, labels.long()

    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    def sample_labels(self, logits: Tensor, ids: Sequence[int] | None) -> Tensor:
        return sampling.draw(logits, sampling.uniforms(ids, 1)[:, 0])

    def fisher_term(self, logits: Tensor, labels: Tensor, label: int) -> Tensor:
        """The loss of a label times √p; 0 for examples that the loss leaves out."""
        share = logits.detach().softmax(1)[:, label].sqrt() * (labels != LEFT_OUT)
        return self.compare(logits, torch.full_like(labels, label)) * share


class MultiLabel(Prediction):
    """Any number of classes for each example: labels are (B, classes) of 0 and 1, losses the mean over classes.

    As `problem_type="multi_label_classification"` of transformers. Batches are those of `Classification`.
    """

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = self.logits(model, batch), self.split(batch)[1]
        labels = label_tensor(labels, "0 or 1 for each class", len(logits))
        if labels.shape != logits.shape or logits.dim() != 2:
            raise UndeError(
                f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}: expected (B, "
                "classes) for both, 0 or 1 for each class. For one class of each example use unde.tasks.Classification"
            )
        row = first_flagged(((labels < 0) | (labels > 1) | labels.isnan()).any(1))
        if row is not None:
            raise Unreadable(row, f"has the labels {labels[row].tolist()}: expected numbers from 0 to 1")
        return logits, labels.to(logits.dtype)

    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)

    def sample_labels(self, logits: Tensor, ids: Sequence[int] | None) -> Tensor:
        u = sampling.uniforms(ids, logits.shape[1]).to(logits.device)
        return (u < logits.double().sigmoid()).to(logits.dtype)

    def fisher_term(self, logits: Tensor, labels: Tensor, label: int) -> Tensor:
        """Labels are independent: an output times the standard deviation of its label."""
        p = logits.detach()[:, label].sigmoid()
        return logits[:, label] * (p * (1 - p)).sqrt() / logits.shape[1]


class TokenClassification(TokenTask):
    """A class for each token, as in named entity recognition; the loss is over the tokens of a sequence that have one.

    Batches are dicts of input_ids, labels (B, T), −100 where there is none, and optionally attention_mask, as
    transformers' collator for token classification makes them. `reduction` is as in `CausalLM`.
    """

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Tokens replaced by others of the training data; their classes stay, and so do tokens that have none."""
        return [ReplaceInputs.of(examples, special_tokens(model))]

    def check(self, model: nn.Module, batch: Any) -> None:
        """Refuse language models, which give a number to every token that they know."""
        model_checks.check_classes(self, model, self.predictions(model, batch).logits)

    def predictions(self, model: nn.Module, batch: Any) -> Predictions:
        ids, real, ahead = tokens = check_columns(batch, "TokenClassification")
        if "labels" not in batch:
            raise UndeError(f"a batch of TokenClassification needs 'labels': this one has {sorted(batch)}")
        target = batch["labels"].long()
        inputs = {k: v for k, v in batch.items() if k not in ("labels", "special_tokens_mask")}
        why = "every label is -100"
        left = check_examples(model, inputs, target, tokens, why, sys.maxsize)
        logits = token_logits(run_model(model, pad_right(model, inputs, real, left)), ids.shape)
        check_examples(model, inputs, target, tokens, why, logits.shape[-1])
        return Predictions(logits, roll_left(target, ahead), lambda x: roll_left(x, -ahead))
