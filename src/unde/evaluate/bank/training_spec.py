"""A training described by its parts (model, data, loss, optimizer), so that a bank can train several models at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unde.data import Rows, map_tensors, to_device
from unde.devices import device_of
from unde.errors import UndeError, require_positive

Order = Callable[[int, torch.Generator], Iterable[Tensor]]
NOT_IN_NAME = ("data", "channels_last")  # fields that do not tell one training from another


@dataclass(frozen=True, eq=False)
class TrainingSpec:
    """How each model of a bank is trained. Call it as `spec(indices, seed)` to train one model.

    Args:
        model: Function of a seed that returns the initial model. Python, numpy and torch are seeded before.
        data: Training examples: a tensor, a tuple or dict of tensors, or a data set; or a function that returns them,
            called once in each process.
        loss: Function of (model, batch) that returns a scalar, or one loss for each example, such as `task.loss`.
        optimizer: Function that makes an optimizer from a list of parameters.
        epochs: Passes over the examples, in random order.
        batch_size: Examples in a step.
        schedule: Function of (optimizer, number of steps) that returns a scheduler of torch, stepped after each step.
        clip: Largest norm of the gradient; None for no clipping.
        prepare: Function of (batch, generator) that changes a batch before the model sees it. It must draw all random
            numbers (augmentations, noise, timesteps) from the generator.
        order: Function of (number of examples, generator) that returns the positions of each batch, in place of
            `epochs` and `batch_size`.
        collate: Function that makes a batch of examples.
        channels_last: Train in the channels-last memory format: about 1.4 times as fast for ResNets on a CPU. The
            model must not call `view` on the output of a convolution. Stacked models ignore it.

    Raises:
        UndeError: `epochs`, `batch_size` or `clip` is not positive.

    Example:
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> spec = TrainingSpec(
        ...     model=lambda seed: nn.Linear(1, 1), data=(x, 3 * x + 1),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3), epochs=30, batch_size=5,
        ... )
        >>> round(spec(np.arange(20), seed=0).weight.item(), 2)
        3.0
    """

    model: Callable[[int], nn.Module]
    data: Any
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    epochs: int = 1
    batch_size: int = 64
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    clip: float | None = None
    prepare: Callable[[Any, torch.Generator], Any] | None = None
    order: Order | None = None
    collate: Callable[[list[Any]], Any] | None = None
    channels_last: bool = False

    def __post_init__(self) -> None:
        require_positive(epochs=self.epochs, batch_size=self.batch_size)
        if self.clip is not None and not self.clip > 0:
            raise UndeError(f"clip is {self.clip}: expected a positive norm, or None for no clipping")

    def __call__(self, indices: np.ndarray, seed: int) -> nn.Module:
        """Train one model on the examples `indices`."""
        with isolated_rng(seed):
            trainer = SingleTrainer(self, indices, seed)
            for batch in trainer.batches:
                trainer.backward(batch)
                trainer.step()
        return trainer.finish()

    def initial_model(self, seed: int) -> nn.Module:
        model = self.model(seed)
        if not isinstance(model, nn.Module):
            raise UndeError(f"model(seed) gave a {type(model).__name__}: expected a torch module")
        if not any(p.requires_grad for p in model.parameters()):
            raise UndeError(
                "model(seed) has no parameter that requires a gradient: there is nothing to train"
            )
        return model.train()

    def count_steps(self, count: int) -> int:
        """Number of steps of a training on `count` examples."""
        return sum(1 for _ in self.positions(count, torch.Generator().manual_seed(0)))

    def positions(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        if self.order is not None:
            yield from self.order(count, generator)
            return
        for _ in range(self.epochs):
            yield from torch.randperm(count, generator=generator).split(self.batch_size)

    def rows(self, indices: np.ndarray, generator: torch.Generator) -> Iterator[Tensor]:
        """The examples of each step."""
        rows = torch.as_tensor(np.asarray(indices))
        yield from (rows[at] for at in self.positions(len(rows), generator))

    def batches(self, indices: np.ndarray, seed: int) -> Iterator[Any]:
        """The batch of each step of the model with this seed."""
        generator = torch.Generator().manual_seed(seed)
        for rows in self.rows(indices, generator):
            batch = self.read(rows)
            yield batch if self.prepare is None else self.prepare(batch, generator)

    def mean_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim > 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UndeError(
                f"loss(model, batch) gave {what}: expected a scalar, or one loss for each example"
            )
        return loss.mean()

    def make_schedule(self, optimizer: Optimizer, count: int) -> LRScheduler | None:
        if self.schedule is None:
            return None
        schedule = self.schedule(optimizer, self.count_steps(count))
        if not isinstance(schedule, LRScheduler):
            raise UndeError(
                f"schedule(optimizer, steps) gave a {type(schedule).__name__}: expected a scheduler of torch.optim"
            )
        return schedule

    @cached_property
    def _data(self) -> Any:
        return self.data() if callable(self.data) and not hasattr(self.data, "__len__") else self.data

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self._data, self.collate)

    @cached_property
    def has_columns(self) -> bool:
        """Whether the data are a tensor, or a tuple or dict of tensors."""
        data = self._data
        columns = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else [data]
        return self.collate is None and all(isinstance(column, Tensor) for column in columns)

    def read(self, rows: Tensor) -> Any:
        """A batch of these examples. Columns may be indexed by `rows` of any shape."""
        data = self._data
        if not self.has_columns:
            return self._rows.batch(rows.tolist())
        if isinstance(data, Mapping):
            return {name: column[rows] for name, column in data.items()}
        return tuple(column[rows] for column in data) if isinstance(data, tuple) else data[rows]

    def settings(self) -> dict[str, Any]:
        """The fields that tell this training from others."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in NOT_IN_NAME}
        return {name: value for name, value in fields.items() if value is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Only the fields: another process reads the data by itself."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class SingleTrainer:
    """One model in training."""

    def __init__(self, spec: TrainingSpec, indices: np.ndarray, seed: int) -> None:
        self.spec, self.model = spec, spec.initial_model(seed)
        self._set_format(torch.channels_last)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = spec.optimizer(list(self.parameters))
        self.schedule = spec.make_schedule(self.optimizer, len(indices))
        self.batches = spec.batches(indices, seed)

    def backward(self, batch: Any) -> Tensor:
        """Compute the gradients of a batch; returns its loss."""
        self.optimizer.zero_grad()
        batch = to_device(batch, device_of(self.model))
        if self.spec.channels_last:
            batch = map_tensors(batch, _channels_last)
        loss = self.spec.mean_loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        if self.spec.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.spec.clip)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def finish(self) -> nn.Module:
        self.optimizer.zero_grad()
        self._set_format(torch.contiguous_format)
        return self.model.eval()

    def _set_format(self, memory_format: torch.memory_format) -> None:
        if self.spec.channels_last:
            self.model = self.model.to(memory_format=memory_format)  # ty: ignore[no-matching-overload]


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


@contextmanager
def isolated_rng(seed: int | None = None) -> Generator[None]:
    """Seed python, numpy and torch inside the block; restore the caller's generators afterwards."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
