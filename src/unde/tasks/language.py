"""Causal language modelling on padded or packed token batches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from unde.errors import UndeError, unknown
from unde.tasks import sampling
from unde.tasks.base import Task
from unde.tasks.perturb import Perturbation, Replace, special_tokens

IGNORE = -100  # a label that carries no loss, as in transformers
_EXPECTED = "a language-modelling {} is a dict with 'input_ids' (and attention_mask, labels)"


class BadExample(UndeError):
    """One example of a batch that has no loss, or that the model cannot read."""

    def __init__(self, row: int, what: str, ids: Sequence[int] | None = None) -> None:
        who = f"example {row} of the batch" if ids is None else f"example {ids[row]} (row {row} of its batch)"
        super().__init__(f"{who} {what}")
        self.row, self.what = row, what


class CausalLM(Task):
    """Next-token loss of each sequence: batches are dicts of input_ids, and optionally attention_mask and labels.

    Labels default to the input ids that the attention mask keeps; −100 marks tokens without loss, such as a
    prompt. The first token of a sequence is predicted from nothing and never counts, padded or not.

    `reduction` is over the tokens of one sequence. "mean": every sequence weighs the same, as in training
    with one sequence in each step. "sum" (its −log p): every token weighs the same, as in the mean over all
    tokens of a step that transformers' Trainer takes; the gradients differ by one factor for each step.

    Padding may be on either side; what is on the left is moved to the right before the model sees it, so that
    positions are counted from the first real token. All entries of a batch but labels go to the model.

    Packed rows (several documents in one, position_ids restarting at 0): a row is one example, and its loss
    is what transformers trains on. Documents see each other unless the batch has no attention_mask
    (transformers then reads the borders off position_ids) or a 4-d one that keeps them apart; the first token
    of a later document counts unless its label is −100. Under a 4-d mask, padding counts unless labels say no.
    """

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ("mean", "sum"))
        self.reduction = reduction

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.token_losses(model, batch).sum(1)

    def token_losses(self, model: nn.Module, batch: Any) -> Tensor:
        """(B, T): what predicting each token adds to the loss of its sequence; 0 where nothing is predicted."""
        logits, target, ahead = self._predictions(model, batch)
        return _rolled(self._per_token(logits, target), -ahead)

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        """The "loss", or that of labels drawn from the model's own predictions: "sampled".

        What is drawn depends on the example's id and the predictions alone. In half precision these move a
        little with the shape of the batch, and now and then a label with them.
        """
        try:
            if name == "loss":
                return self.loss(model, batch)
            if name == "sampled":
                logits, target, _ = self._predictions(model, batch)
                return self._per_token(logits, _resampled(logits, target, ids)).sum(1)
        except BadExample as e:
            raise BadExample(e.row, e.what, ids) from None
        raise unknown(f"measure of {type(self).__name__}", name, ("loss", "sampled"))

    def mask(self, batch: Any) -> Tensor | None:
        """As the model sees them: with padding on the right."""
        real = _real(batch)
        return None if real is None else _rolled(real, _ahead(real))

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Tokens replaced by others of the training data; special ones, padding and prompts stay."""
        return [Replace.of(examples, special_tokens(model))]

    def collate(self, examples: list[Any]) -> Any:
        """Pads on the right; the padding is masked and carries no loss.

        Packed rows (with position_ids) get no mask that they did not bring, but labels: with a mask
        transformers would overlook the borders of documents, and nothing looks at padding on its right.
        """
        for i, e in enumerate(examples):
            if not isinstance(e, Mapping) or "input_ids" not in e:
                raise UndeError(_EXPECTED.format("example"))
            if set(e) != set(examples[0]):
                raise UndeError(
                    f"example {i} of a batch has {sorted(e)}, the first {sorted(examples[0])}: expected the same"
                )
        columns = {k: [_tensor(k, e[k]) for e in examples] for k in examples[0]}
        tokens = columns["input_ids"]
        if len({len(x) for x in tokens}) > 1 and "attention_mask" not in columns:
            if "position_ids" in columns:
                columns.setdefault("labels", tokens)
            else:
                columns["attention_mask"] = [torch.ones_like(x) for x in tokens]
        fill = {"labels": IGNORE}
        return {
            k: pad_sequence(v, batch_first=True, padding_value=fill.get(k, 0))
            if v[0].dim()
            else torch.stack(v)
            for k, v in columns.items()
        }

    def _predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, V) logits, the (B, T) tokens that are predicted (−100 where none is), padding on the right.

        And the (B, 1) places by which that moved them to the left.
        """
        ids, labels, real = _columns(batch)
        ahead = torch.zeros_like(ids[:, :1]) if real is None else _ahead(real)
        target = labels.masked_fill(torch.arange(ids.shape[1], device=ids.device) <= ahead, IGNORE)
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        if _check(model, inputs, target, real, ahead):
            target = _rolled(target, ahead)
            inputs = {k: _rolled(v, ahead) if _like(v, ids) else v for k, v in inputs.items()}
        if "use_cache" in _arguments(model):
            # It is for generation only, and with a cache transformers does not look for packed rows.
            inputs.setdefault("use_cache", False)
        output = model(**inputs)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise UndeError(
                f"the model returned {got} for tokens of shape {tuple(ids.shape)}: expected logits, a tensor of "
                "shape (B, T, vocabulary), or an output with .logits"
            )
        return logits, target, ahead

    def _per_token(self, logits: Tensor, target: Tensor) -> Tensor:
        # Shift the labels, not the logits: no copy of the largest tensor.
        following = F.pad(target[:, 1:], (0, 1), value=IGNORE)
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), following.flatten(), ignore_index=IGNORE, reduction="none"
        )
        losses = F.pad(losses.view(target.shape)[:, :-1], (1, 0))
        return losses if self.reduction == "sum" else losses / (target != IGNORE).sum(1, keepdim=True)


def _resampled(logits: Tensor, target: Tensor, ids: Sequence[int] | None) -> Tensor:
    """The targets replaced by draws. The kth of a sequence gets its kth number, wherever padding puts it."""
    counts = target != IGNORE
    rank = (counts.cumsum(1) - 1).clamp(min=0)
    u = sampling.uniforms(ids, target.shape[1]).to(target.device).gather(1, rank)
    where = counts.flatten().nonzero()[:, 0]
    drawn = sampling.draw(logits.flatten(0, 1), u.flatten()[where], where - 1)  # predicted one place before
    return target.flatten().index_copy(0, where, drawn).view(target.shape)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        x = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UndeError(
            f"column {name!r} of a language-modelling example holds no numbers ({type(value).__name__}), and every "
            "column goes to the model: remove it from the data, or pass collate="
        ) from None
    return x if x.numel() else x.long()  # of an empty list torch cannot tell the type


def _real(batch: Any) -> Tensor | None:
    """(B, T), True at tokens that are no padding; None if no mask says which."""
    mask = batch.get("attention_mask")
    return None if mask is None or mask.dim() != 2 else mask != 0


def _ahead(real: Tensor) -> Tensor:
    """(B, 1): the padding in front of the first real token."""
    return (real.cumsum(1) == 0).sum(1, keepdim=True)


def _rolled(x: Tensor, places: Tensor) -> Tensor:
    """Each row of (B, T) moved to the left by its number of places; what leaves comes in again on the right."""
    length = x.shape[1]
    return x.gather(1, (torch.arange(length, device=x.device) + places) % length)


def _like(x: Any, ids: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == ids.shape


def _columns(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token ids, labels and which tokens are real (None: all), each (B, T)."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise UndeError(_EXPECTED.format("batch"))
    for name in batch.keys() & {"input_ids", "attention_mask", "labels"}:
        if not isinstance(batch[name], Tensor):
            raise UndeError(
                f"{name} of the batch is a {type(batch[name]).__name__}, not a tensor: a DataLoader of lists needs "
                "collate_fn=CausalLM().collate; with a data set of Hugging Face, set_format('torch') does too"
            )
    ids, labels, real = batch["input_ids"], batch.get("labels"), _real(batch)
    if ids.dim() != 2 or ids.is_floating_point():
        raise UndeError(
            f"input_ids of shape {tuple(ids.shape)} and type {ids.dtype}: expected token numbers, (B, T)"
        )
    for name, column in (("labels", labels), ("attention_mask", real)):
        if column is not None and column.shape != ids.shape:
            raise UndeError(
                f"{name} of shape {tuple(column.shape)} for input_ids of shape {tuple(ids.shape)}: "
                "expected the same"
            )
    if labels is None:
        labels = ids if real is None else ids.masked_fill(~real, IGNORE)
    return ids, labels.long(), real


def _arguments(model: nn.Module) -> Mapping[str, Any]:
    """What the model's forward takes by name; for PEFT, that of the model inside."""
    base: Any = getattr(model, "get_base_model", lambda: model)
    return inspect.signature(base().forward).parameters


def _limits(model: nn.Module) -> tuple[int, int]:
    """How many tokens a Hugging Face model knows, and how many it reads at once; no limit where it names none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    found = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    vocabulary, context = (x if isinstance(x, int) and x > 0 else sys.maxsize for x in found)
    return vocabulary, context


def _check(
    model: nn.Module, inputs: Mapping[str, Any], target: Tensor, real: Tensor | None, ahead: Tensor
) -> bool:
    """Refuses examples that have no loss or that the model cannot read; True if some are padded on the left.

    Everything is asked in one go: on a GPU each question waits for the device.
    """
    ids, positions = inputs["input_ids"].long(), inputs.get("position_ids")
    length = ids.shape[1]
    if length == 0:
        raise BadExample(0, "has no token: leave it out")
    vocabulary, context = _limits(model)
    counts = target != IGNORE
    empty = far = torch.zeros_like(ids[:, 0], dtype=torch.bool)
    if real is not None:
        empty = ~real.any(1)
    if positions is not None and positions.dim() == 2:
        far = (positions.amax(1) >= context).expand_as(far)
    elif length > context:
        long = far | True if real is None else real.sum(1) > context
        far = long | ~long.any()  # or all of them, being padded so far
    foreign = (ids < 0) | (ids >= vocabulary) | counts & ((target < 0) | (target >= vocabulary))
    flags = torch.stack([empty, foreign.any(1), far, ~counts.any(1), ahead[:, 0] > 0])
    try:
        *bad, padded_left = flags.any(1).tolist()
    except RuntimeError:  # under torch.func.vmap nothing can be asked: by then the batch was checked outside
        return real is not None
    if not any(bad):
        return padded_left
    fault = bad.index(True)
    row = int(flags[fault].nonzero()[0])
    if fault == 0:
        what = "has no token: its attention mask is 0 everywhere. Leave it out"
    elif fault == 1:
        said = torch.stack([ids[row], target[row]], 1)[foreign[row]][0]  # the token, or else its label
        odd = next(int(x) for x in said if not 0 <= x < vocabulary)
        what = (
            f"holds token {odd}, but the model knows {vocabulary}: a tokenizer that does not fit the model. "
            "Use the model's own; if tokens were added to it, call model.resize_token_embeddings before training"
        )
    elif fault == 2:
        own = length if real is None else int(real[row].sum())
        if positions is not None:
            what = f"holds position {int(positions.max())}, counted from 0"
        else:
            what = f"is {own} tokens long" if own > context else f"is padded to {length} tokens"
        what += (
            f", but the model reads {context} at most (max_position_embeddings of its config): truncate it"
        )
    else:
        what = (
            "has no target, so no loss: every label is -100, or it is a single token, which is predicted from nothing. "
            "Leave it out"
        )
    raise BadExample(row, what)
