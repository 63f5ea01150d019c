"""Per-example gradients of parameters that no layer rule covers: three general ways, each dearer than the last.

expanded    the parameter is replaced by one copy for each example (class tokens, position embeddings)
vmap        torch.func over the examples
loop        one backward pass for each example
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from unde.data import map_tensors, tensors
from unde.tasks.base import Task


class Measured(nn.Module):
    """The task's measure as a module, so that torch.func can swap parameters of the user's model in it."""

    def __init__(self, model: nn.Module, task: Task, measure: str, beside: Sequence[str] = ()) -> None:
        super().__init__()
        self.training = model.training  # registering a child must not be followed by a mode change
        self.model = model
        self.task, self.measure, self.beside = task, measure, beside

    def forward(self, batch: Any, ids: Sequence[int], both: bool = False) -> Any:
        if not both:
            return self.task.measure(self.model, batch, name=self.measure, ids=ids)
        found = measures(self.task, self.model, batch, [self.measure, *self.beside], ids)
        return found[self.measure], torch.stack([found[name].detach() for name in self.beside], 1)

    def values(self, swapped: Mapping[str, Tensor], batch: Any, ids: Sequence[int]) -> Tensor:
        return self._with(swapped, batch, ids, False)

    def values_and_beside(
        self, swapped: Mapping[str, Tensor], batch: Any, ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The measure, and those that are kept beside it, (B, ·)."""
        return self._with(swapped, batch, ids, True)

    def _with(self, swapped: Mapping[str, Tensor], *given: Any) -> Any:
        if not swapped:
            return self(*given)
        return functional_call(self, {f"model.{n}": t for n, t in swapped.items()}, given)


def measures(
    task: Any, model: nn.Module, batch: Any, names: Sequence[str], ids: Sequence[int]
) -> dict[str, Tensor]:
    """Several measures; from one forward pass if the task knows how, as diffusion does."""
    if hasattr(task, "measures"):
        return task.measures(model, batch, names, ids)
    return {name: task.measure(model, batch, name=name, ids=ids) for name in names}


def expanded_copies(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], batch: int) -> dict[str, Tensor]:
    """Leaves of shape (B, *shape) for the named parameters, where `shape` is how one copy is laid out."""
    parameters = dict(model.named_parameters()) if shapes else {}
    return {
        n: parameters[n].detach().reshape(shape).expand(batch, *shape).clone().requires_grad_()
        for n, shape in shapes.items()
    }


def expansions(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Layouts worth trying for one example's copy: broadcasting decides which, if any, is right."""
    tries = [tuple(shape[1:])] if shape and shape[0] == 1 else []
    return [*tries, tuple(shape), (1, *shape)]


class FirstAxisWatch(TorchFunctionMode):
    """Notices a cut along the first axis of expanded copies of these shapes, as in `positions[:length]`.

    It cuts examples, not positions; on a batch shorter than the cut it does nothing, so no gradient shows it.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.cut = shapes, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x: Any = args[0] if args else None
        if func is Tensor.__getitem__ and x.is_leaf and x.requires_grad and x.shape in self.shapes:
            first = args[1][0] if isinstance(args[1], tuple) else args[1]
            self.cut |= isinstance(first, slice) and first != slice(None)
        return func(*args, **(kwargs or {}))


def by_vmap(measured: Measured, names: list[str], batch: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """(B, *shape) gradients by vmap over the examples of a batch."""
    held = tensors(batch)
    if not all(x.dim() > 0 and x.shape[0] == len(ids) for x in held):
        raise ValueError("a tensor of the batch has no example axis")

    def value(parameters: dict[str, Tensor], *examples: Tensor) -> Tensor:
        given = iter(examples)
        example = map_tensors(batch, lambda _: next(given).unsqueeze(0))
        return measured.values(parameters, example, [-1]).sum()

    parameters = {n: p.detach() for n, p in measured.model.named_parameters() if n in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "performance drop: no batching rule" is expected here
        per_example = vmap(grad(value), in_dims=(None, *[0] * len(held)))
        return {n: g.detach() for n, g in per_example(parameters, *held).items()}


def by_loop(measured: Measured, names: list[str], batch: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """(B, *shape) gradients, one backward pass for each example."""
    parameters = {n: p for n, p in measured.model.named_parameters() if n in names}
    rows: dict[str, list[Tensor]] = {n: [] for n in names}
    try:
        for p in parameters.values():
            p.requires_grad_(True)
        for b in range(len(ids)):
            with torch.backends.cudnn.flags(
                enabled=False
            ):  # cuDNN's recurrent layers refuse backward in eval mode
                value = measured(single(batch, b, len(ids)), [ids[b]]).sum()
                grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for (n, p), g in zip(parameters.items(), grads):
                rows[n].append(torch.zeros_like(p) if g is None else g.to_dense())
    finally:
        for p in parameters.values():
            p.requires_grad_(False)
    return {n: torch.stack(r) for n, r in rows.items()}


def single(batch: Any, b: int, size: int) -> Any:
    """Example b of a collated batch, as a batch of one."""
    return map_tensors(batch, lambda x: x[b : b + 1] if x.dim() and x.shape[0] == size else x)
