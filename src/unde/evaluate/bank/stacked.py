"""Train several models as one: each parameter is a stack of the models' parameters, and `vmap` runs over them.

Each model has its own examples, order, seed and gradient; steps, schedule and settings are shared. Optimizers that
step each number by itself do to a stack what they would do to each model, so the weights are those of single
trainings up to the rounding of sums. Models that draw random numbers in their forward pass (dropout) are refused.
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop
from torch.overrides import TorchFunctionMode

from unde.data import to_device
from unde.devices import device_of
from unde.evaluate.bank.training_spec import TrainingSpec, isolated_rng

STACK = 32  # models, by default
SMALL = 2**15  # parameters of a model that is stacked by default
# Optimizers that step each number by itself, so that parameters of several models may lie in one tensor.
_ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad, Adadelta)

Assignments = Sequence[tuple[np.ndarray, int]]  # examples and seed of each model


class Unstackable(Exception):
    """Why models cannot be trained as one."""


def default_stack(spec: TrainingSpec, seed: int) -> int:
    """32 for models of at most 32,768 parameters without convolutions, whose steps are mostly overhead; else 1."""
    with isolated_rng(seed):
        parameters = list(spec.initial_model(seed).parameters())
    small = sum(p.numel() for p in parameters) <= SMALL and all(p.ndim <= 2 for p in parameters)
    return STACK if small else 1


def train_stacked(spec: TrainingSpec, assignments: Assignments) -> list[nn.Module]:
    """A model for each assignment, as `spec(indices, seed)` gives it up to rounding."""
    trainer = StackedTrainer(spec, assignments)
    for _ in range(spec.count_steps(len(assignments[0][0]))):
        trainer.backward()
        trainer.step()
    return trainer.finish()


class StackedTrainer:
    """Models in training as one. Frozen parameters are shared if they are equal in all models."""

    def __init__(self, spec: TrainingSpec, assignments: Assignments) -> None:
        self.spec = spec
        if len({len(indices) for indices, _ in assignments}) > 1:
            raise Unstackable("they have different numbers of examples")
        self.models = []
        for _, seed in assignments:
            with isolated_rng(seed):
                self.models.append(spec.initial_model(seed))
        self.batches = stacked_batches(spec, assignments)
        first = self.models[0]
        single = spec.optimizer([p for p in first.parameters() if p.requires_grad])
        if type(single) not in _ELEMENTWISE:
            raise Unstackable(f"{type(single).__name__} is not known to step each number by itself")
        self._stack_tensors(self._written_buffers(assignments[0]))
        names = {id(p): name for name, p in first.named_parameters()}
        groups = [
            {**g, "params": [self.trained[names[id(p)]] for p in g["params"]]} for g in single.param_groups
        ]
        self.optimizer = type(single)(groups)  # ty: ignore[missing-argument]
        self.schedule = spec.make_schedule(self.optimizer, len(assignments[0][0]))
        self._loss = _Loss(spec, first)

    def _written_buffers(self, assignment: tuple[np.ndarray, int]) -> set[str]:
        """Names of buffers that a forward pass writes to, such as running statistics."""
        model = copy.deepcopy(self.models[0])
        before = {name: (b, b.clone()) for name, b in model.named_buffers()}
        with torch.no_grad(), isolated_rng(0):
            self.spec.loss(model, to_device(next(self.spec.batches(*assignment)), device_of(model)))
        after = dict(model.named_buffers())
        for name, (buffer, _) in before.items():
            if after.get(name) is not buffer:
                raise Unstackable(f"the forward pass puts another tensor in place of the buffer {name!r}")
        return {name for name, (buffer, value) in before.items() if not torch.equal(buffer, value)}

    def _stack_tensors(self, written: set[str]) -> None:
        self.trained: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}  # stacked, not trained
        self.shared: dict[str, Tensor] = {}
        by_model = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in self.models]
        for name, tensor in by_model[0].items():
            try:
                tensors = [tensors[name] for tensors in by_model]
                if tensor.requires_grad:
                    self.trained[name] = nn.Parameter(torch.stack([t.detach() for t in tensors]))
                elif name in written or not all(torch.equal(tensor, t) for t in tensors[1:]):
                    self.buffers[name] = torch.stack(tensors)
                else:
                    self.shared[name] = tensor
            except (KeyError, RuntimeError) as e:
                raise Unstackable(f"{name!r} is not alike in all of them ({e})") from e

    def backward(self) -> Tensor:
        """Compute the gradients of the next batches; returns the (S,) losses."""
        try:
            batches = to_device(next(self.batches), device_of(self.models[0]))
            self.optimizer.zero_grad()
            losses = vmap(self.single_loss, in_dims=(0, 0, 0), randomness="error")(
                self.trained, self.buffers, batches
            )
            losses.sum().backward()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as e:
            line = str(e).strip().partition("\n")[0]
            raise Unstackable(f"{type(e).__name__}: {line}") from e
        return losses.detach()

    def single_loss(self, trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Loss of one model, which `vmap` runs over."""
        tensors = {f"model.{name}": t for name, t in {**self.shared, **buffers, **trained}.items()}
        with _Batchable(), sdpa_kernel(SDPBackend.MATH):  # other kernels have no batching rule
            return functional_call(self._loss, tensors, (batch,))

    def step(self) -> None:
        if self.spec.clip is not None:
            clip_each([p.grad for p in self.trained.values() if p.grad is not None], self.spec.clip)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def finish(self) -> list[nn.Module]:
        with torch.no_grad():
            for i, model in enumerate(self.models):
                tensors = dict(model.named_parameters()) | dict(model.named_buffers())
                for name, stack in {**self.trained, **self.buffers}.items():
                    tensors[name].copy_(stack[i])
        return [model.eval() for model in self.models]


def stacked_batches(spec: TrainingSpec, assignments: Assignments) -> Iterator[Any]:
    """The batches of all models, step by step."""
    if spec.prepare is None and spec.has_columns:  # one read for all models
        rows = [spec.rows(indices, torch.Generator().manual_seed(seed)) for indices, seed in assignments]
        yield from (spec.read(_stack(list(at))) for at in zip(*rows, strict=True))
    else:
        by_model = [spec.batches(indices, seed) for indices, seed in assignments]
        yield from (_stack(list(batches)) for batches in zip(*by_model, strict=True))


def clip_each(gradients: Sequence[Tensor], norm: float) -> None:
    """`clip_grad_norm_` for each model of a stack."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)  # (S,)
    factors = (norm / (norms + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factors.to(g.dtype).view(-1, *[1] * (g.ndim - 1)))


def _stack(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        if len({b.shape for b in batches}) > 1:
            raise Unstackable(f"their batches have shapes {sorted({tuple(b.shape) for b in batches})}")
        return torch.stack(batches)
    if isinstance(first, Mapping):
        if any(b.keys() != first.keys() for b in batches):  # such as a mask where texts differ in length
            raise Unstackable("their batches have different columns")
        return {name: _stack([b[name] for b in batches]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stack(list(column)) for column in zip(*batches, strict=True))
    raise Unstackable(f"their batches hold a {type(first).__name__}, which is not a tensor")


class _Loss(nn.Module):
    """The loss as a module, for `functional_call`."""

    def __init__(self, spec: TrainingSpec, model: nn.Module) -> None:
        super().__init__()
        self.spec, self.model = spec, model

    def forward(self, batch: Any) -> Tensor:
        return self.spec.mean_loss(self.model, batch)


class _Batchable(TorchFunctionMode):
    """Replace functions that `vmap` cannot run over: group norm, and dropout with rate 0."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(zip(("input", "p", "training"), args)) | dict(kwargs or {})
        if func is F.dropout and not (named.get("p", 0.5) and named.get("training", True)):
            return named["input"]
        func = group_norm if func in (F.group_norm, torch.group_norm) else func
        return func(*args, **kwargs or {})


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`F.group_norm`."""
    groups = input.reshape(input.shape[0], num_groups, -1)
    centred = groups - groups.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = (centred * scale).reshape(input.shape)
    by_channel = (-1, *[1] * (input.ndim - 2))
    if weight is not None:
        out = out * weight.view(by_channel)
    return out if bias is None else out + bias.view(by_channel)
