"""Several models trained as one: their parameters lie in one tensor each, and `vmap` runs over them.

Each model has its own examples, order, luck and gradient; steps, schedule and settings are shared. Optimizers that
step each number by itself do to a stack what they would do to each of its models, so weights are those of one model
after the other, up to the rounding of sums. What draws inside the forward pass (dropout) cannot be the same, and is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from unde.evaluate._optimizers import elementwise, of_others, quickened
from unde.evaluate.bank.seeding import isolated_rng
from unde.evaluate.bank.training_spec import Training, scheduled
from unde.evaluate.bank.vmap_ops import attention, group_norm


class Unstackable(Exception):
    """Why models cannot be trained as one."""


class Stack:
    """Models while they are trained as one. Parameters that are not trained are shared if they are all alike."""

    def __init__(self, training: Training, which: Sequence[tuple[np.ndarray, int]]) -> None:
        self.training = training
        if len({len(indices) for indices, _ in which}) > 1:
            raise Unstackable("they have different numbers of examples")
        self.models = []
        for _, seed in which:
            with isolated_rng(seed):
                self.models.append(training.initial(seed))
        self.batches = stacked_batches(training, which)
        first = self.models[0]
        one = training.optimizer([p for p in first.parameters() if p.requires_grad])
        if not elementwise(one):
            raise Unstackable(f"{type(one).__name__} is not known to step each number by itself")
        self._lay_out(first, self._changed_buffers(which[0]))
        names = {id(p): name for name, p in first.named_parameters()}
        self.optimizer = quickened(of_others(one, lambda p: self.trained[names[id(p)]]))
        self.schedule = scheduled(training, self.optimizer, len(which[0][0]))
        self._whole = _Loss(training, first)

    def _changed_buffers(self, which: tuple[np.ndarray, int]) -> set[str]:
        """Those that a forward pass writes to, such as running statistics."""
        model = copy.deepcopy(self.models[0])
        before = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
        with torch.no_grad(), isolated_rng(0):
            self.training.loss(model, next(self.training.batches(*which)))
        after = dict(model.named_buffers())
        for name, (buffer, _, _) in before.items():
            if after.get(name) is not buffer:
                raise Unstackable(f"the forward pass puts another tensor in place of the buffer {name!r}")
        return {
            name
            for name, (buffer, version, value) in before.items()
            if buffer._version != version or not torch.equal(buffer, value)
        }

    def _lay_out(self, first: nn.Module, changed: set[str]) -> None:
        self.trained: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}  # of each model, not trained
        self.shared: dict[str, Tensor] = {}
        all_of = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in self.models]
        for name, tensor in all_of[0].items():
            try:
                same = [tensors[name] for tensors in all_of]
                if tensor.requires_grad:
                    self.trained[name] = nn.Parameter(torch.stack([t.detach() for t in same]))
                elif name in changed or not all(torch.equal(tensor, t) for t in same[1:]):
                    self.buffers[name] = torch.stack(same)
                else:
                    self.shared[name] = tensor
            except (KeyError, RuntimeError) as e:
                raise Unstackable(f"{name!r} is not alike in all of them ({e})") from e

    def backward(self) -> Tensor:
        """(S,) losses of the next batches; gradients are then those of the stacked parameters."""
        try:
            batches = next(self.batches)
            self.optimizer.zero_grad()
            losses = vmap(self._one, in_dims=(0, 0, 0), randomness="error")(
                self.trained, self.buffers, batches
            )
            losses.sum().backward()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as e:
            raise Unstackable(_first_line(e)) from e
        return losses.detach()

    def _one(self, trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any) -> Tensor:
        tensors = {f"model.{name}": t for name, t in {**self.shared, **buffers, **trained}.items()}
        with _Batchable():
            return functional_call(self._whole, tensors, (batch,))

    def advance(self) -> None:
        if self.training.clip is not None:
            clip_each([p.grad for p in self.trained.values() if p.grad is not None], self.training.clip)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def finished(self) -> list[nn.Module]:
        with torch.no_grad():
            for i, model in enumerate(self.models):
                tensors = dict(model.named_parameters()) | dict(model.named_buffers())
                for name, stacked in {**self.trained, **self.buffers}.items():
                    tensors[name].copy_(stacked[i])
        return [model.eval() for model in self.models]


def train_stacked(training: Training, which: Sequence[tuple[np.ndarray, int]]) -> list[nn.Module]:
    """A model for each pair of examples and seed, as `training(indices, seed)` gives it up to rounding."""
    stack = Stack(training, which)
    for _ in training.steps(len(which[0][0])):
        stack.backward()
        stack.advance()
    return stack.finished()


def stacked_batches(training: Training, which: Sequence[tuple[np.ndarray, int]]) -> Iterator[Any]:
    """The batches of all models, step after step."""
    if training.prepare is None and training.columns:  # read at once
        rows = [training.rows(indices, torch.Generator().manual_seed(seed)) for indices, seed in which]
        yield from (training.read(_stacked(list(at))) for at in zip(*rows, strict=True))
    else:
        of_each = [training.batches(indices, seed) for indices, seed in which]
        yield from (_stacked(list(batches)) for batches in zip(*of_each, strict=True))


def clip_each(gradients: Sequence[Tensor], norm: float) -> None:
    """`clip_grad_norm_` for each model of a stack."""
    if not gradients:
        return
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)  # (S,)
    factors = (norm / (norms + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factors.to(g.dtype).view(-1, *[1] * (g.ndim - 1)))


class _Loss(nn.Module):
    def __init__(self, training: Training, model: nn.Module) -> None:
        super().__init__()
        self.training_, self.model = training, model

    def forward(self, batch: Any) -> Tensor:
        return self.training_.mean_loss(self.model, batch)


class _Batchable(TorchFunctionMode):
    """Functions that `vmap` cannot run over, or only one after the other, by others that it can."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            func = attention
        elif func in (F.group_norm, torch.group_norm):
            func = group_norm
        elif func is F.dropout and _dropout_rate(*args, **kwargs or {}) == 0:
            return args[0]
        return func(*args, **kwargs or {})


def _dropout_rate(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
    return p if training else 0.0


def _stacked(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        if len({b.shape for b in batches}) > 1:
            raise Unstackable(f"their batches have shapes {sorted({tuple(b.shape) for b in batches})}")
        return torch.stack(batches)
    if isinstance(first, Mapping):
        return {name: _stacked([b[name] for b in batches]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stacked(list(column)) for column in zip(*batches, strict=True))
    raise Unstackable(f"their batches hold a {type(first).__name__}, which is not a tensor")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
