"""A model, its batches and its projections as shapes alone, for running the real code without any numbers.

torch's fake tensors have a shape, a type and a device, and no content. They are made as tensors of the CPU,
so that torch takes the ways that it takes there (fused attention, channels-last convolutions), whatever
device the model is on, the meta device included.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unde.data import map_tensors
from unde.errors import UndeError
from unde.gradients.collector import Collector, Coverage
from unde.gradients.coverage import EXAMPLES
from unde.gradients.coverage_check import CoverageCheck
from unde.gradients.hooks import FAILURES
from unde.gradients.parameters import Unit, placement
from unde.projection import Projection, Spec, feature_size
from unde.tasks.base import Task
from unde.tasks.batching import recut
from unde.tasks.tokens import arguments

Batches = Callable[[int], Any]  # how many examples → a batch of them


def no_numbers() -> FakeTensorMode:
    """Inside, all new tensors are fake. Real ones that come up, as in a task's tables, count as fake too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_numbers(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors are fake; nothing of the model itself is changed or copied."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    memo: dict[int, Any] = {id(t): _fake(t) for t in tensors}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, ValueError) as e:
        raise UndeError(
            f"the {type(model).__name__} cannot be copied ({e}), which planning needs: plan for one that is built "
            "from its config alone"
        ) from e


def _fake(t: Tensor) -> Tensor:
    made = torch.empty_like(t, device="cpu")
    return nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made


def batches_like(example: Any) -> Batches:
    """Batches of any number of examples, like one that has them along the first axis of its tensors."""
    counts: list[int] = []

    def note(x: Tensor) -> Tensor:
        counts.extend(x.shape[:1])
        return x

    map_tensors(example, note)
    if not counts:
        raise UndeError(
            f"a batch of type {type(example).__name__} without a tensor whose first axis are the examples: expected "
            "a batch as the task gets it, of any number of examples; tensors may be on the meta device"
        )

    def make(n: int) -> Any:
        def resized(x: Tensor) -> Tensor:
            shape = (n, *x.shape[1:]) if x.dim() and x.shape[0] == counts[0] else x.shape
            return torch.empty(shape, dtype=x.dtype)

        return map_tensors(example, resized)

    return make


def tokens(model: nn.Module, length: int) -> dict[str, Any]:
    """A batch of one text, for a language model."""
    batch: dict[str, Any] = {"input_ids": torch.empty(1, length, dtype=torch.long, device="meta")}
    if "transformers" in sys.modules and "past_key_values" in arguments(model):
        from transformers import DynamicCache

        class Empty(DynamicCache):
            """Without a cache transformers looks for packed rows. Among shapes it cannot see that there are none,
            and would make masks that a real pass does not have."""

            def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                return key_states, value_states

        batch["past_key_values"] = Empty()
    return batch


class Undrawn(Projection):
    """The projection of a parameter with matrices of the right shapes that nobody drew."""

    def __init__(self, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__("none", "", shape)
        self.dtype, self.size = dtype, feature_size(spec, shape)
        numel = self.R * self.C
        if self.size == numel:
            return
        if spec.kind in ("kron", "pca") and len(shape) > 1:
            r = spec.size
            self._rows = torch.empty(r, self.R, dtype=dtype) if self.R > r else None
            self._cols = torch.empty(r, self.C, dtype=dtype) if self.C > r else None
        elif spec.kind == "dense":
            self._flat = torch.empty(self.size, numel, dtype=dtype)
        else:  # sparse: a row and a column number for each entry
            self._flat = torch.empty(numel * (16 + dtype.itemsize), dtype=torch.uint8)

    def flat(self, g: Tensor) -> Tensor:
        sparse = self._flat is not None and self._flat.dtype == torch.uint8
        return g.new_empty(g.shape[0], self.size, dtype=self.dtype) if sparse else super().flat(g)


def undrawn_units(model: nn.Module, names: Sequence[str], projection: str) -> list[Unit]:
    """As `make_units`."""
    parameters, spec = dict(model.named_parameters()), Spec.parse(projection)
    _, dtype = placement(model)
    units, start = [], 0
    for name in names:
        p = Undrawn(spec, tuple(parameters[name].shape), dtype)
        units.append(Unit(name, tuple(parameters[name].shape), p, start, start + p.size))
        start += p.size
    return units


def matrices(units: Sequence[Unit]) -> list[Tensor]:
    """All that the projections hold."""
    sides = ((u.projection._rows, u.projection._cols, u.projection._flat) for u in units)
    return [m for three in sides for m in three if m is not None]


def covered(model: nn.Module, task: Task, batches: Batches, units: Sequence[Unit], measure: str) -> Coverage:
    """The way of each parameter, found as a build finds it, except that what runs counts as right."""
    brief, short = recut(task, task.cutting.brief()), _shortened(task, batches)
    if brief is task and short is not None:
        found = ShapePlanner(model, task, short, units, measure).run()
        if not (found.deferred or found.vmapped or found.looped or found.unused):
            ShapePlanner(model, task, batches, units, measure, 2).confirms(found)
            return found
    return ShapePlanner(model, brief, batches, units, measure).run()


def _shortened(task: Task, batches: Batches) -> Batches | None:
    """Of examples cut short, if the task can do that; what else is in a batch stays as it is."""

    def make(n: int) -> Any:
        batch = batches(n)
        if not isinstance(batch, Mapping):
            return None
        cut = task.cutting.shortened({k: x for k, x in batch.items() if isinstance(x, Tensor)})
        return None if cut is None else {**batch, **cut}

    return None if make(1) is None else make


class ShapePlanner(CoverageCheck):
    """On `count` examples, by default as many as cannot be taken for something else."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        batches: Batches,
        units: Sequence[Unit],
        measure: str,
        count: int | None = None,
    ) -> None:
        one = batches(1)
        singles = [one] * (2 if count is None else 1)  # a third would be like the second
        count = count or _unlike(one)
        super().__init__(model, task, units, measure, list(range(count)), batches(count), singles)

    def _autograd(self) -> tuple[Tensor, set[str]]:
        with _Zeros():
            return super()._autograd()

    def _check_independent(self, together: Tensor) -> None:
        pass

    def _disagreeing(
        self, units: Sequence[Unit], alone: bool = False, catch: bool = True
    ) -> list[Unit] | None:
        batch, ids = (self.singles[0], self.ids[:1]) if alone else (self.batch, self.ids)
        try:
            with Collector(self.model, self.task, self.units, self.coverage, self.measure) as collect:
                collect(batch, ids)
        except FAILURES:
            if catch:
                return None
            raise
        self._agreed = self.coverage.describe()
        return []


def _unlike(batch: Any) -> int:
    """How many examples to try: no divisor of a length of tokens, so that none is taken for the number of examples."""
    whole = (t for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_floating_point())
    axes = {n for t in whole for n in t.shape[1:]}
    counts = (EXAMPLES, 5, 7, 11, 13, 17, 19, 23)
    return next((n for n in counts if all(axis % n for axis in axes)), EXAMPLES)


class _Zeros(TorchDispatchMode):
    """Whoever asks a tensor for its number gets 0: for the planner, which asks for the loss."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))
