"""Tasks with labels: classes of examples and of tokens, several classes, real numbers."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.devices import double_device
from unde.errors import UndeError, unknown
from unde.tasks import model_checks, sampling
from unde.tasks.base import Task
from unde.tasks.perturb import InputNoise, Perturbation
from unde.tasks.replace import Replace, special_tokens
from unde.tasks.tokens import (
    Predictions,
    TokenTask,
    Unreadable,
    arguments,
    check_columns,
    check_examples,
    left_padding,
    pad,
    pad_right,
    real_tokens,
    roll_left,
    run_model,
    text_config,
    token_logits,
)

TRUE = "true "  # measures of single labels: "true 0", "true 1", …


class Prediction(Task):
    """Batches are (inputs, labels), or a dict with "labels" whose other entries are the model's arguments.

    Texts of different lengths, dicts with "input_ids", are padded and masked; padding may be on either side.
    """

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, _ = self.split(batch)
        if isinstance(inputs, Mapping) and isinstance(inputs.get("input_ids"), Tensor):
            inputs = _pad_right(model, inputs)
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise UndeError(
                f"the model returned a {type(logits).__name__}: expected logits (B, classes), or an output with "
                f".logits. Override {type(self).__name__}.logits to pick them out"
            )
        return logits

    def split(self, batch: Any) -> tuple[Any, Tensor]:
        what = f"a batch of {type(self).__name__}"
        if isinstance(batch, Mapping):
            label = next((k for k in ("labels", "label") if k in batch), None)
            if label is None:
                raise UndeError(f"{what} needs 'labels': this one has {sorted(batch)}")
            return {k: v for k, v in batch.items() if k != label}, batch[label]
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise UndeError(
            f"{what} is (inputs, labels) or a dict with 'labels', got {type(batch).__name__}{length}"
        )

    def collate(self, examples: list[Any]) -> Any:
        """Texts are padded on the right, and the padding masked."""
        if examples and isinstance(examples[0], Mapping) and "input_ids" in examples[0]:
            return pad(examples)
        return super().collate(examples)

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Noise on floating inputs; tokens replaced where the inputs are texts."""
        if examples and isinstance(examples[0], Mapping) and "input_ids" in examples[0]:
            return [Replace.of(examples, special_tokens(model), "classes")]
        return [InputNoise()]

    def mask(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("attention_mask"), Tensor):
            return None
        real = real_tokens(batch)
        return real if real is None or "input_ids" not in batch else roll_left(real, left_padding(real))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.compare(*self.predict(model, batch))

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        """The "loss", or that of labels drawn from the model's own predictions: "sampled".

        What is drawn depends on the example's id and the predictions alone. "true 3" is the term of label 3 in the
        expectation over such labels: the sum over labels of its squared gradients is the Fisher information.
        """
        try:
            if name == "loss":
                return self.loss(model, batch)
            if name == "sampled":
                logits, _ = self.predict(model, batch)
                return self.compare(logits, self.sample_labels(logits.detach(), ids))
            if name.startswith(TRUE):
                return self.fisher_term(*self.predict(model, batch), int(name.removeprefix(TRUE)))
        except Unreadable as e:
            raise Unreadable(e.row, e.what, ids) from None
        raise unknown(f"measure of {type(self).__name__}", name, ("loss", "sampled"))

    def outputs(self, model: nn.Module, batch: Any) -> int | None:
        return self.predict(model, batch)[0].shape[1]

    @abstractmethod
    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits and labels, checked."""

    @abstractmethod
    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(B,) losses."""

    @abstractmethod
    def sample_labels(self, logits: Tensor, ids: Sequence[int] | None) -> Tensor:
        """Labels drawn from predictions."""

    @abstractmethod
    def fisher_term(self, logits: Tensor, labels: Tensor, label: int) -> Tensor:
        """(B,) values v with Σ_label ∇v ∇vᵀ = E ∇loss ∇lossᵀ over labels as `sample_labels` draws them."""


def _pad_right(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    ids, real = inputs["input_ids"], real_tokens(inputs)
    if ids.dim() != 2 or (real is not None and real.shape != ids.shape):
        mask = None if real is None else tuple(real.shape)
        raise UndeError(
            f"input_ids of shape {tuple(ids.shape)} with an attention_mask of shape {mask}: expected token numbers and "
            "their mask, (B, T) both"
        )
    config = text_config(model)
    finds_the_end = "past_key_values" in arguments(model) and hasattr(config, "pad_token_id")
    if finds_the_end and config.pad_token_id is None and len(ids) > 1:
        raise UndeError(
            f"{type(model).__name__} predicts from the last token of a text, and its config names no padding token: "
            "set model.config.pad_token_id to that of the tokenizer or, if it has none, to its eos_token_id"
        )
    return pad_right(model, {k: v for k, v in inputs.items() if k != "special_tokens_mask"}, real)


def label_tensor(labels: Any, expected: str, count: int | None = None) -> Tensor:
    """Check that labels are a tensor, with one row for each of `count` examples."""
    if not isinstance(labels, Tensor):
        some = next(iter(labels), None) if isinstance(labels, (list, tuple)) else labels
        raise UndeError(f"labels such as {some!r}: expected {expected}")
    if count is not None and (labels.dim() == 0 or len(labels) != count):
        shape = tuple(labels.shape)
        raise UndeError(
            f"labels of shape {shape} for {count} examples: expected {expected}, for each of them"
        )
    return labels


def first_flagged(wrong: Tensor) -> int | None:
    """The first example that is flagged in a (B,) tensor; None if there is none, or under torch.func.vmap."""
    try:
        return int(wrong.nonzero()[0]) if bool(wrong.any()) else None
    except RuntimeError:
        return None


class Regression(Prediction):
    """Real numbers: labels are (B,) or (B, outputs), losses the mean of squared errors over the outputs.

    Batches are those of `Classification`. As `problem_type="regression"` of transformers.

    >>> import torch
    >>> Regression().loss(nn.Identity(), (torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 5.0])))
    tensor([0., 9.])
    """

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        output, labels = self.logits(model, batch), self.split(batch)[1]
        labels = label_tensor(labels, "real numbers", len(output))
        values, target = output.reshape(len(output), -1), labels.reshape(len(labels), -1)
        if values.shape != target.shape:
            shapes = f"predictions of shape {tuple(output.shape)} for labels of shape {tuple(labels.shape)}"
            raise UndeError(f"{shapes}: expected as many numbers in each")
        row = first_flagged(~torch.isfinite(target).all(1))
        if row is not None:
            raise Unreadable(row, f"has the label {target[row].tolist()}: expected finite numbers")
        return values, target.to(values.dtype)

    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits - labels).square().mean(1)

    def sample_labels(self, logits: Tensor, ids: Sequence[int] | None) -> Tensor:
        """A squared error is the −log p of a normal distribution with variance 1/2."""
        u = sampling.uniforms(ids, logits.shape[1]).clamp(min=2.0**-54)
        return logits + (torch.special.ndtri(u) / 2**0.5).to(logits)

    def fisher_term(self, logits: Tensor, labels: Tensor, label: int) -> Tensor:
        """Errors are independent with variance 1/2: an output times √2, over their number."""
        return logits[:, label] * (2**0.5 / logits.shape[1])


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
        place = double_device(logits.device)
        u = sampling.uniforms(ids, logits.shape[1]).to(place)
        return (u < logits.to(place).double().sigmoid()).to(logits)

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
        return [Replace.of(examples, special_tokens(model), "classes")]

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
