"""Base of the tasks on token sequences: padded batches, checks, losses of tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from unde.errors import BadExample, UndeError, explain, unknown
from unde.tasks import sampling
from unde.tasks.base import Batching, Task

IGNORE = -100  # a label that carries no loss, as in transformers
SHORT = 17  # tokens of an example cut short: a prime, so that none of them are taken for a number of examples
_EXPECTED = "a text {} is a dict with 'input_ids' (and attention_mask, labels)"


class Unreadable(BadExample):
    """An example of a batch that has no loss, or that the model cannot read, by its row."""

    def __init__(self, row: int, what: str, ids: Sequence[int] | None = None) -> None:
        who = f"example {row} of the batch" if ids is None else f"example {ids[row]} (row {row} of its batch)"
        super().__init__(f"{who} {what}")
        self.row, self.what = row, what


class Predictions(NamedTuple):
    """(B, T, classes) logits, (B, T) targets with −100 for none; `align` moves a (B, T) tensor to its tokens."""

    logits: Tensor
    target: Tensor
    align: Callable[[Tensor], Tensor]


class Columns(NamedTuple):
    """(B, T) token ids, which of them are no padding (None: all), and the (B, 1) padding in front."""

    ids: Tensor
    real: Tensor | None
    ahead: Tensor


class TokenBatching(Batching):
    """Sequences go through a model whole, and can be cut short for checks."""

    def shorten(self, batch: Any) -> Any | None:
        """A few tokens of each example from its first target on; None if that gains little or is not possible."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2 * SHORT:
            return None
        if not all(isinstance(x, Tensor) and ids.shape[1] not in x.shape[2:] for x in batch.values()):
            return None
        real, labels = real_tokens(batch), batch.get("labels")
        start = torch.zeros_like(ids[:, :1]) if real is None else left_padding(real)
        if same_shape(labels, ids):  # what is predicted, and the token before it
            start = torch.maximum(start, left_padding(labels != IGNORE) - 1)
        where = start.clamp(max=ids.shape[1] - SHORT) + torch.arange(SHORT, device=ids.device)
        each = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        return {k: x[each, where] if x.shape[:2] == ids.shape else x for k, x in batch.items()}


class TokenTask(Task):
    """A cross-entropy for each token, added up or averaged over those of a sequence."""

    batching: Batching = TokenBatching()

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ("mean", "sum"))
        self.reduction = reduction

    def predictions(self, model: nn.Module, batch: Any) -> Predictions:
        raise TypeError(f"{type(self).__name__} defines no predictions(model, batch)")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.token_losses(model, batch).sum(1)

    def token_losses(self, model: nn.Module, batch: Any) -> Tensor:
        """(B, T): what predicting each token adds to the loss of its sequence; 0 where nothing is predicted."""
        logits, target, align = self.predictions(model, batch)
        return align(self._per_token(logits, target))

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
                logits, target, _ = self.predictions(model, batch)
                return self._per_token(logits, _resample(logits, target, ids)).sum(1)
        except Unreadable as e:
            raise Unreadable(e.row, e.what, ids) from None
        raise unknown(f"measure of {type(self).__name__}", name, ("loss", "sampled"))

    def mask(self, batch: Any) -> Any:
        """As the model sees them: with padding on the right."""
        real = real_tokens(batch)
        return None if real is None else roll_left(real, left_padding(real))

    def collate(self, examples: list[Any]) -> Any:
        """Pads on the right; the padding is masked and carries no loss."""
        return pad(examples)

    def _per_token(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="none"
        )
        losses = losses.view(target.shape)
        return losses if self.reduction == "sum" else losses / (target != IGNORE).sum(1, keepdim=True)


def _resample(logits: Tensor, target: Tensor, ids: Sequence[int] | None) -> Tensor:
    """The targets replaced by draws. The kth of a sequence gets its kth number, wherever padding puts it."""
    counts = target != IGNORE
    rank = (counts.cumsum(1) - 1).clamp(min=0)
    u = sampling.uniforms(ids, target.shape[1]).gather(1, rank.cpu())
    where = counts.flatten().nonzero()[:, 0]
    drawn = sampling.draw(logits.flatten(0, 1), u.flatten()[where.cpu()], where)
    return target.flatten().index_copy(0, where, drawn).view(target.shape)


# --- examples to batches ---------------------------------------------------------------------------------


def pad(examples: list[Any], packed: bool = False) -> dict[str, Tensor]:
    """Columns of all examples, padded on the right; the padding is masked, and labels there are −100.

    Columns of texts are left out. Packed rows (with position_ids) get labels and no mask: with a mask, transformers
    ignores the borders of documents.
    """
    for i, e in enumerate(examples):
        if not isinstance(e, Mapping) or "input_ids" not in e:
            raise UndeError(_EXPECTED.format("example"))
        if set(e) != set(examples[0]):
            raise UndeError(
                f"example {i} of a batch has {sorted(e)}, the first {sorted(examples[0])}: expected the same"
            )
    names = [k for k in examples[0] if not _texts(examples[0][k])]
    columns = {k: [_tensor(k, e[k]) for e in examples] for k in names}
    tokens = columns["input_ids"]
    if len({len(x) for x in tokens}) > 1 and "attention_mask" not in columns:
        if packed and "position_ids" in columns:
            columns.setdefault("labels", tokens)
        else:
            columns["attention_mask"] = [torch.ones_like(x) for x in tokens]
    fill = {"labels": IGNORE, "special_tokens_mask": 1}
    return {k: _stack(k, v, fill.get(k, 0)) for k, v in columns.items()}


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and any(map(_texts, value[:1])))


def _stack(name: str, column: list[Tensor], fill: int) -> Tensor:
    if len({x.dim() for x in column}) > 1:
        shapes = sorted({tuple(x.shape) for x in column})
        raise UndeError(
            f"{name} of one batch with shapes {', '.join(map(str, shapes))}: expected a number for each example, or "
            "one for each of its tokens"
        )
    if not column[0].dim():
        return torch.stack(column)
    return pad_sequence(column, batch_first=True, padding_value=fill)


def _tensor(name: str, value: Any) -> Tensor:
    message = (
        f"column {name!r} of an example holds no numbers ({type(value).__name__}), and every column goes to the "
        "model: remove it from the data, or pass collate="
    )
    with explain(message, TypeError, ValueError, RuntimeError):
        x = torch.as_tensor(value)
    return x if x.numel() else x.long()  # of an empty list torch cannot tell the type


# --- what a batch holds ----------------------------------------------------------------------------------


def real_tokens(batch: Any) -> Tensor | None:
    """(B, T), True at tokens that are no padding; None if no mask says which."""
    mask = batch.get("attention_mask")
    return None if mask is None or mask.dim() != 2 else mask != 0


def left_padding(real: Tensor) -> Tensor:
    """(B, 1): the padding in front of the first real token."""
    return (real.cumsum(1) == 0).sum(1, keepdim=True)


def roll_left(x: Tensor, places: Tensor) -> Tensor:
    """Roll each row of (B, T) to the left by its number of places."""
    length = x.shape[1]
    return x.gather(1, (torch.arange(length, device=x.device) + places) % length)


def check_columns(batch: Any, task: str, like: Iterable[str] = ("labels", "attention_mask")) -> Columns:
    """The tokens of a batch, checked; the columns `like` must have their shape."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise UndeError(_EXPECTED.format("batch"))
    for name in batch.keys() & {"input_ids", "attention_mask", "labels"}:
        if not isinstance(batch[name], Tensor):
            raise UndeError(
                f"{name} of the batch is a {type(batch[name]).__name__}, not a tensor: a DataLoader of lists needs "
                f"collate_fn={task}().collate; with a data set of Hugging Face, set_format('torch') does too"
            )
    ids, real = batch["input_ids"], real_tokens(batch)
    if ids.dim() != 2 or ids.is_floating_point():
        raise UndeError(
            f"input_ids of shape {tuple(ids.shape)} and {ids.dtype}: expected token numbers, (B, T)"
        )
    for name in like:
        column = real if name == "attention_mask" else batch.get(name)
        if column is not None and column.shape != ids.shape:
            raise UndeError(
                f"{name} of shape {tuple(column.shape)} for input_ids of shape {tuple(ids.shape)}: expected the same"
            )
    labels = batch.get("labels")
    if labels is not None and labels.is_floating_point():
        raise UndeError(
            f"labels of type {labels.dtype}: expected numbers of tokens or classes, −100 for none"
        )
    return Columns(ids, real, torch.zeros_like(ids[:, :1]) if real is None else left_padding(real))


def same_shape(x: Any, ids: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == ids.shape


def token_logits(output: Any, shape: Sequence[int]) -> Tensor:
    """The (B, T, classes) logits in what a model returned."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tuple(shape):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UndeError(
            f"the model returned {got} for tokens of shape {tuple(shape)}: expected logits, a tensor of "
            "shape (B, T, vocabulary), or an output with .logits"
        )
    return logits


# --- what a model reads ----------------------------------------------------------------------------------


def unwrap_peft(model: nn.Module) -> Any:
    """The model inside adapters of PEFT, or the model itself."""
    base: Any = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def arguments(model: nn.Module) -> Mapping[str, Any]:
    """What the model's forward takes by name; for PEFT, that of the model inside."""
    return inspect.signature(unwrap_peft(model).forward).parameters


def text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def token_limits(model: nn.Module) -> tuple[int, int]:
    """Vocabulary size and context length of a Hugging Face model; sys.maxsize where its config names none."""
    config = text_config(model)
    values = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    vocabulary, context = (x if isinstance(x, int) and x > 0 else sys.maxsize for x in values)
    return vocabulary, context


def run_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the model without a cache, which would hide packed rows from transformers."""
    quiet = {"use_cache": False} if "use_cache" in arguments(model) else {}
    return model(**{**quiet, **inputs})


def pad_right(
    model: nn.Module, inputs: Mapping[str, Any], real: Tensor | None, roll: bool = True
) -> dict[str, Any]:
    """Inputs padded on the right by the model's padding token: positions count from the first real token."""
    inputs = dict(inputs)
    if real is None:
        return inputs
    ids, ahead = inputs["input_ids"], left_padding(real)
    pad = getattr(text_config(model), "pad_token_id", None)
    if isinstance(pad, int) and pad >= 0:
        inputs["input_ids"] = ids.masked_fill(~real, pad)
    return {k: roll_left(v, ahead) if roll and same_shape(v, ids) else v for k, v in inputs.items()}


def check_examples(
    model: nn.Module,
    inputs: Mapping[str, Any],
    target: Tensor,
    tokens: Columns,
    without: str,
    classes: int | None = None,
) -> bool:
    """Raise on examples without a loss or that the model cannot read; True if some are padded on the left.

    `without` says why an example may have no target; `classes` is their number if targets are not tokens.
    """
    ids, real, ahead = tokens
    ids, positions = ids.long(), inputs.get("position_ids")
    length = ids.shape[1]
    if length == 0:
        raise Unreadable(0, "has no token: leave it out")
    vocabulary, context = token_limits(model)
    classes = vocabulary if classes is None else classes
    counts = target != IGNORE
    empty = far = torch.zeros_like(ids[:, 0], dtype=torch.bool)
    if real is not None:
        empty = ~real.any(1)
    if positions is not None and positions.dim() == 2:
        far = (positions.amax(1) >= context).expand_as(far)
    elif length > context:
        long = far | True if real is None else real.sum(1) > context
        far = long | ~long.any()  # or all of them, being padded so far
    foreign = (ids < 0) | (ids >= vocabulary)
    beyond = counts & ((target < 0) | (target >= classes))
    flags = torch.stack([empty, foreign.any(1) | beyond.any(1), far, ~counts.any(1), ahead[:, 0] > 0])
    try:
        *bad, padded_left = flags.any(1).tolist()  # one question: on a GPU each waits for the device
    except RuntimeError:  # under torch.func.vmap nothing can be asked: by then the batch was checked outside
        return real is not None
    if not any(bad):
        return padded_left
    fault = bad.index(True)
    row = int(flags[fault].nonzero()[0])
    odd, label = ids[row][foreign[row]].tolist(), target[row][beyond[row]].tolist()
    if fault == 0:
        what = "has no token: its attention mask is 0 everywhere. Leave it out"
    elif fault == 1 and (odd or classes == vocabulary):
        what = (
            f"holds token {(odd or label)[0]}, but the model knows {vocabulary}: the tokenizer does not fit the model. "
            "If tokens were added to it, call model.resize_token_embeddings before training"
        )
    elif fault == 1:
        what = (
            f"has the label {label[0]}, but the model knows {classes} classes: expected 0 to {classes - 1}, or −100 "
            "for none"
        )
    elif fault == 2:
        count = length if real is None else int(real[row].sum())
        what = f"is {count} tokens long" if count > context else f"is padded to {length} tokens"
        what = what if positions is None else f"holds position {int(positions.max())}, counted from 0"
        what += (
            f", but the model reads {context} at most (max_position_embeddings of its config): truncate it"
        )
    else:
        what = f"has no target, so no loss: {without}. Leave it out"
    raise Unreadable(row, what)
