"""Hidden states of examples: the input of a model's head, the output of a named layer, or features of an encoder."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde import console
from unde.data import Collate, Rows, choose_collate, evenly, to_device
from unde.default_device import program_default
from unde.devices import device_of
from unde.errors import UndeError, require_positive, unknown
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.tasks import Task

R = TypeVar("R")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # channels come second
_PROBE_EXAMPLES = 4
_MAX_BATCH = 32
_MAX_OUTPUTS = 2**26  # outputs of the head in one batch: 256 MiB of logits
_SHORT_LIST = 12  # so many module names fit into an error message


class States(NamedTuple):
    """Hidden states (B, d), on the model's device, and losses (B,) of some examples; `hidden` is None where the model
    gives none."""

    hidden: Tensor | None
    loss: Tensor


class _LayerCall(NamedTuple):
    module: nn.Module
    input: Any
    output: Any


class HiddenStates:
    """Reader of hidden states and losses, from one forward pass.

    The head is the output embedding of a Hugging Face model if the loss calls it, else the last linear or
    convolutional layer that the loss calls. Its input is averaged over the tokens that the task's mask keeps, or over
    space. `problem` says why there are no hidden states; it is empty if there are. `rows` are examples to find the head
    and the batch size with.
    """

    def __init__(self, model: nn.Module, task: Task, rows: Rows) -> None:
        self.model, self.task, self.problem = model, task, ""
        self.batch_size, self._head = _MAX_BATCH, None
        get: Any = getattr(model, "get_output_embeddings", lambda: None)
        try:
            output = get()
        except (NotImplementedError, AttributeError):  # models without one
            output = None
        candidates = [m for m in model.modules() if _is_linear(m) or m is output]
        probe = evenly(len(rows), _PROBE_EXAMPLES)
        batch = to_device(rows.batch(probe), placement(model)[0])
        with frozen_eval(model), torch.no_grad(), program_default(), _last_calls(candidates, output) as calls:
            task.loss(model, batch)
        if not calls:
            self.problem = "the loss calls no linear or convolutional layer"
            return
        call = calls.get("output", calls["last"])
        self._head, x = call.module, call.input
        outputs = call.output.numel() if isinstance(call.output, Tensor) else 1
        self.batch_size = max(1, min(_MAX_BATCH, _MAX_OUTPUTS * len(probe) // max(1, outputs)))
        if not isinstance(x, Tensor) or x.dim() < 2 or len(x) != len(probe):
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            self.problem = f"the head {self.layer!r} gets {what} for a batch of {len(probe)} examples"

    @property
    def layer(self) -> str:
        """Name of the head."""
        return next((name for name, m in self.model.named_modules() if m is self._head), "")

    def read(self, rows: Rows, positions: range) -> States:
        """Run these examples of `rows` as one batch."""
        heads = [] if self._head is None else [self._head]
        batch = to_device(rows.batch(positions), placement(self.model)[0])
        with frozen_eval(self.model), torch.no_grad(), program_default(), _last_calls(heads) as calls:
            loss = self.task.loss(self.model, batch).float().cpu()
        if self.problem:
            return States(None, loss)
        x, convolution = calls["last"].input, isinstance(self._head, _CONVOLUTIONS)
        masks = self.task.mask(
            batch
        )  # of real tokens: the one of this shape, of the task or else of the batch
        options: list[Any] = [masks] if isinstance(masks, Tensor) else list(masks or ())
        options += [batch.get("attention_mask")] if isinstance(batch, Mapping) else []
        fits = x.dim() == 3 and not convolution
        mask = next((m for m in options if fits and isinstance(m, Tensor) and m.shape == x.shape[:2]), None)
        return States(_pool(x, mask, convolution), loss)

    def head_input(self, run: Callable[[], R]) -> tuple[R, Tensor]:
        """What `run` returns, and the input of the head in its last call."""
        with (
            frozen_eval(self.model),
            torch.no_grad(),
            program_default(),
            _last_calls([] if self._head is None else [self._head]) as calls,
        ):
            result = run()
        return result, calls["last"].input

    def ranges(self, rows: Rows) -> list[range]:
        """Positions of `rows`, batch by batch."""
        return _ranges(rows, self.batch_size)


def _is_linear(module: nn.Module) -> bool:
    conv1d = type(module).__name__ == "Conv1D"  # the linear layer of GPT-2 in transformers
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or conv1d


@contextmanager
def _last_calls(
    modules: list[nn.Module], output: nn.Module | None = None
) -> Generator[dict[str, _LayerCall]]:
    """Record the last call of the modules as "last", and that of `output`, if it is one of them, as "output"."""
    calls: dict[str, _LayerCall] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        call = _LayerCall(module, x, result)
        calls["last"] = call
        if module is output:
            calls["output"] = call

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# --- similarity of representations ------------------------------------------------------------------------


def representation_similarity(
    model: nn.Module,
    task: Task,
    train_data: Any,
    queries: Any,
    *,
    layer: str,
    batch_size: int = 32,
    metric: str = "cosine",
    collate: Collate | None = None,
) -> Tensor:
    """Compare the hidden states of queries and training examples at a layer.

    Hidden states (B, T, d) are averaged over tokens, those that `attention_mask` keeps if the batch has one;
    (B, C, H, W) over space; (B, d) are taken as they are.

    Args:
        model: The model.
        task: Its task.
        train_data: The training data.
        queries: The queries.
        layer: Name of the module. Of several outputs the first counts, of several calls the last.
        batch_size: Examples in a batch.
        metric: "cosine", or "l2" for the negative Euclidean distance.
        collate: Function that makes a batch; default: that of the data, or else of the task.

    Returns:
        (Q, N) similarities, higher is closer.

    Example:
        >>> from unde.tasks import Classification
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), torch.zeros(3, dtype=torch.long)
        >>> model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
        >>> representation_similarity(model, Classification(), (x, y), (x[:1], y[:1]), layer="0")
        tensor([[1.0000, 0.0000, 0.7071]])
    """
    if metric not in ("cosine", "l2"):
        raise unknown("metric", metric, ("cosine", "l2"))
    modules = dict(model.named_modules())
    if not layer or layer not in modules:
        names = [name for name in modules if name]
        near = difflib.get_close_matches(layer, names, n=_SHORT_LIST, cutoff=0.3)
        raise unknown("layer", layer, names if len(names) <= _SHORT_LIST else near or names[:_SHORT_LIST])

    def features(rows: Rows, r: range) -> Tensor:
        batch = to_device(rows.batch(r), device_of(model))
        with program_default():
            task.loss(model, batch)
        if not calls:
            raise UndeError(
                f"layer {layer!r} takes no part in the loss: expected a module that the model calls"
            )
        return _features(calls.pop("last").output, f"layer {layer!r}", batch, len(r))

    train, query_rows = (
        Rows(data, collate or choose_collate(task.collate, data)) for data in (train_data, queries)
    )
    with frozen_eval(model), torch.no_grad(), _last_calls([modules[layer]]) as calls:
        return _similarities(features, train, query_rows, batch_size, metric)


def representation_distance(
    encoder: Callable[[Any], Any],
    train_data: Any,
    queries: Any,
    *,
    batch_size: int = 32,
    collate: Collate | None = None,
) -> Tensor:
    """Compare queries and training examples in the features of an encoder.

    Args:
        encoder: A module, which runs in eval mode on its device, or a function of a batch. It must resize and scale
            images itself. Features are averaged as in `representation_similarity`.
        train_data: The training data.
        queries: The queries.
        batch_size: Examples in a batch.
        collate: Function that makes a batch.

    Returns:
        (Q, N) negative Euclidean distances.

    Example:
        >>> images = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 3, 8, 8)
        >>> representation_distance(lambda batch: batch.mean((2, 3)), images, images[:1])
        tensor([[-0.0000, -0.8660, -1.7321]])
    """
    if not callable(encoder):
        raise UndeError(
            f"encoder is a {type(encoder).__name__}: expected a module, or a function from a batch to its features"
        )
    module = encoder if isinstance(encoder, nn.Module) else nn.Identity()

    def features(rows: Rows, r: range) -> Tensor:
        batch = to_device(rows.batch(r), device_of(module)) if module is encoder else rows.batch(r)
        return _features(encoder(batch), "the encoder", batch, len(r))

    with frozen_eval(module), torch.no_grad():
        return _similarities(features, Rows(train_data, collate), Rows(queries, collate), batch_size, "l2")


def _similarities(
    features: Callable[[Rows, range], Tensor], train: Rows, queries: Rows, batch_size: int, metric: str
) -> Tensor:
    """(Q, N) similarity of the features (B, d) of queries and training examples, batch by batch."""
    require_positive(batch_size=batch_size)
    query_features = torch.cat([features(queries, r) for r in _ranges(queries, batch_size)])  # (Q, d)
    scores = torch.empty(len(queries), len(train))
    with console.progress("representations", len(train)) as advance:
        for r in _ranges(train, batch_size):
            scores[:, r.start : r.stop] = similarity(query_features, features(train, r), metric).cpu()
            advance(len(r))
    return scores


def similarity(a: Tensor, b: Tensor, metric: str) -> Tensor:
    """(Q, d), (B, d) → (Q, B)."""
    if a.shape[1] != b.shape[1]:
        raise UndeError(
            f"features have {a.shape[1]} numbers for queries and {b.shape[1]} for training examples: "
            "expected as many for both"
        )
    if metric == "cosine":
        return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    # Not by a matrix product, which loses small distances.
    return -torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def _features(x: Any, source: str, batch: Any, examples: int) -> Tensor:
    """(B, d) from the output of `source`."""
    while not isinstance(x, Tensor):
        if isinstance(x, Mapping) and x:  # outputs of transformers, too
            x = next(iter(x.values()))
        elif isinstance(x, (tuple, list)) and x:
            x = x[0]
        else:
            raise UndeError(f"{source} gives a {type(x).__name__}: expected a tensor, alone or first")
    if x.dim() not in (2, 3, 4) or len(x) != examples:
        raise UndeError(
            f"{source} gives shape {tuple(x.shape)} for {examples} examples: expected (B, d), (B, T, d) or "
            "(B, C, H, W), the examples first"
        )
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) and x.dim() == 3 else None
    if mask is not None and mask.shape != x.shape[:2]:
        raise UndeError(
            f"{source} gives shape {tuple(x.shape)}, but attention_mask has shape {tuple(mask.shape)}: "
            f"expected {tuple(x.shape[:2])}, to tell tokens from padding. Take features that see all tokens"
        )
    return _pool(x, mask, channels_second=x.dim() == 4)


def _pool(x: Tensor, mask: Tensor | None, channels_second: bool) -> Tensor:
    """(B, d) mean over space, or over the tokens that `mask` (B, T) marks; None marks all."""
    x = x.float()
    if x.dim() == 2:
        return x
    if channels_second:
        return x.flatten(2).mean(2)
    if mask is None:
        return x.flatten(1, -2).mean(1)
    tokens = (mask != 0).to(x.dtype).unsqueeze(2)  # (B, T, 1)
    return (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)


def _ranges(rows: Rows, step: int) -> list[range]:
    return [range(a, min(a + step, len(rows))) for a in range(0, len(rows), step)]
