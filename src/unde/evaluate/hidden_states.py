"""Hidden states of examples, the input of a model's head, and the loss of each example, from one forward pass."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, to_device
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.tasks import Task

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # channels come second
_PROBE_EXAMPLES = 4
_MAX_BATCH = 32
_MAX_OUTPUTS = 2**26  # outputs of the head in one batch: 256 MiB of logits


@dataclass(frozen=True)
class States:
    """Hidden states (B, d) and losses (B,) of some examples; `hidden` is None where the model gives none."""

    hidden: Tensor | None
    loss: Tensor


@dataclass(frozen=True)
class _Call:
    """One call of a module."""

    module: nn.Module
    input: Any
    outputs: int  # number of values in the output


class HiddenStates:
    """Reader of hidden states and losses.

    The head is the output embedding of a Hugging Face model if the loss calls it, else the last linear or
    convolutional layer that the loss calls. Its input is averaged over the tokens that the task's mask keeps, or over
    space. `problem` says why there are no hidden states; it is empty if there are.

    Args:
        model: The model.
        task: The task, whose loss runs the model.
        rows: Examples to find the head and the batch size with.
    """

    def __init__(self, model: nn.Module, task: Task, rows: Rows) -> None:
        self.model, self.task, self.problem = model, task, ""
        self.batch_size, self._head = _MAX_BATCH, None
        output = _output_embedding(model)
        candidates = [m for m in model.modules() if _is_linear(m) or m is output]
        probe = evenly(len(rows), _PROBE_EXAMPLES)
        with frozen_eval(model), torch.no_grad(), _last_calls(candidates, output) as calls:
            task.loss(model, to_device(rows.batch(probe), placement(model)[0]))
        if not calls:
            self.problem = "the loss calls no linear or convolutional layer"
            return
        call = calls.get("output", calls["last"])
        self._head, x = call.module, call.input
        self.batch_size = max(1, min(_MAX_BATCH, _MAX_OUTPUTS * len(probe) // max(1, call.outputs)))
        if not isinstance(x, Tensor) or x.dim() < 2 or len(x) != len(probe):
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            self.problem = f"the head {self.layer!r} gets {what} for a batch of {len(probe)} examples"

    @property
    def layer(self) -> str:
        """Name of the head."""
        return next((name for name, m in self.model.named_modules() if m is self._head), "")

    def read(self, rows: Rows, which: range) -> States:
        """Run the examples `which` of `rows` as one batch."""
        heads = [] if self._head is None else [self._head]
        with frozen_eval(self.model), torch.no_grad(), _last_calls(heads) as calls:
            batch = to_device(rows.batch(which), placement(self.model)[0])
            loss = self.task.loss(self.model, batch).float().cpu()
            hidden = None if self.problem else self._pool(calls["last"].input, batch).cpu()
        return States(hidden, loss)

    def ranges(self, rows: Rows) -> list[range]:
        """Positions of `rows`, batch by batch."""
        step = self.batch_size
        return [range(a, min(a + step, len(rows))) for a in range(0, len(rows), step)]

    def _pool(self, x: Tensor, batch: Any) -> Tensor:
        """(B, d) from the input of the head."""
        x = x.float()
        if isinstance(self._head, _CONVOLUTIONS):
            return x.flatten(2).mean(2)
        if x.dim() == 2:
            return x
        mask = self._mask(batch, x.shape[:2]) if x.dim() == 3 else None
        if mask is None:
            return x.flatten(1, -2).mean(1)
        kept = mask.to(x.dtype).unsqueeze(2)  # (B, T, 1)
        return (x * kept).sum(1) / kept.sum(1).clamp(min=1)

    def _mask(self, batch: Any, shape: tuple[int, ...]) -> Tensor | None:
        """(B, T), True at real tokens: the mask of this shape, of the task or else of the batch."""
        masks = self.task.mask(batch)
        options: list[Any] = [masks] if isinstance(masks, Tensor) else list(masks or ())
        if isinstance(batch, Mapping):
            options.append(batch.get("attention_mask"))
        mask = next((m for m in options if isinstance(m, Tensor) and tuple(m.shape) == tuple(shape)), None)
        return None if mask is None else mask != 0


def _is_linear(module: nn.Module) -> bool:
    conv1d = type(module).__name__ == "Conv1D"  # the linear layer of GPT-2 in transformers
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or conv1d


def _output_embedding(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except (NotImplementedError, AttributeError):  # models without one
        return None


@contextmanager
def _last_calls(modules: list[nn.Module], output: nn.Module | None = None) -> Generator[dict[str, _Call]]:
    """Record the last call of the modules as "last", and that of `output`, if it is one of them, as "output"."""
    calls: dict[str, _Call] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        call = _Call(module, given, result.numel() if isinstance(result, Tensor) else 0)
        calls["last"] = call
        if module is output:
            calls["output"] = call

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
