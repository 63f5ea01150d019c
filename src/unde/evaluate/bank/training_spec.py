"""A training that is described rather than written out: the bank may then run it in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate._optimizers import quickened
from unde.evaluate.bank.products import Products
from unde.evaluate.bank.seeding import isolated_rng
from unde.gradients.activations import quick_activations

Order = Callable[[int, torch.Generator], Iterable[Tensor]]


@dataclass(frozen=True, eq=False)
class Training:
    """How each model of a bank is trained: `Bank.run(path, train=Training(...), utility=…)`.

    `model(seed)` makes the initial weights; python, numpy and torch are seeded before. `data` are the training
    examples, as tensors, a tuple or dict of them, or any data set (`collate` puts its examples into batches); a
    function is called for them once in each process. `loss(model, batch)` gives one loss for all, or one for each
    example, of which the mean is taken; so `task.loss` will do. `optimizer(parameters)` makes an optimizer,
    `schedule(optimizer, steps)` a scheduler of torch that takes a step after each of the optimizer's; `clip` bounds
    the norm of the gradient.

    Examples come in random order, `epochs` times, `batch_size` at once, or in the `order(count, generator)` of your
    own, which gives the positions of each batch. `prepare(batch, generator)` may change a batch before the model sees
    it: whatever it draws (augmentations, noise, timesteps) must come from the generator, which is the model's own.

    It is a function as `Bank.run` takes it: `training(indices, seed)` returns a model. What the bank makes of it, see
    `stacked=` there.

    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> training = Training(
    ...     model=lambda seed: nn.Linear(1, 1), data=(x, 3 * x + 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3), epochs=30, batch_size=5,
    ... )
    >>> round(training(np.arange(20), seed=0).weight.item(), 2)
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

    def __post_init__(self) -> None:
        for what, value in (("epochs", self.epochs), ("batch_size", self.batch_size)):
            if value < 1:
                raise UndeError(f"{what} is {value}: expected at least 1")
        if self.clip is not None and not self.clip > 0:
            raise UndeError(
                f"clip is {self.clip}: expected a positive norm, or None for gradients as they are"
            )

    def __call__(self, indices: np.ndarray, seed: int) -> nn.Module:
        return self.one(indices, seed)

    def one(
        self, indices: np.ndarray, seed: int, channels_last: bool = False, onednn: bool = False
    ) -> nn.Module:
        """A model, trained by itself."""
        with isolated_rng(seed):
            learner = Learner(self, indices, seed, channels_last, onednn)
            for batch in learner.batches:
                learner.backward(batch)
                learner.advance()
        return learner.finished()

    def initial(self, seed: int) -> nn.Module:
        model = self.model(seed)
        if not isinstance(model, nn.Module):
            raise UndeError(f"model(seed) gave a {type(model).__name__}: expected a torch module")
        if not any(p.requires_grad for p in model.parameters()):
            raise UndeError(
                "model(seed) has no parameter that requires a gradient: there is nothing to train"
            )
        return model.train()

    def steps(self, count: int) -> list[Tensor]:
        """Which of `count` examples each step takes, for a model whose draws do not matter."""
        return list(self.positions(count, torch.Generator().manual_seed(0)))

    def positions(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        if self.order is not None:
            yield from self.order(count, generator)
            return
        for _ in range(self.epochs):
            yield from torch.randperm(count, generator=generator).split(self.batch_size)

    def rows(self, indices: np.ndarray, generator: torch.Generator) -> Iterator[Tensor]:
        """Which examples each step takes."""
        rows = torch.as_tensor(np.asarray(indices))
        yield from (rows[at] for at in self.positions(len(rows), generator))

    def batches(self, indices: np.ndarray, seed: int) -> Iterator[Any]:
        """What the model of this seed sees, step after step."""
        generator = torch.Generator().manual_seed(seed)
        for rows in self.rows(indices, generator):
            batch = self.read(rows)
            yield batch if self.prepare is None else self.prepare(batch, generator)

    def mean_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim > 1:
            told = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UndeError(
                f"loss(model, batch) gave {told}: expected a scalar, or one loss for each example"
            )
        return loss.mean()

    @cached_property
    def _data(self) -> Any:
        return self.data() if callable(self.data) and not hasattr(self.data, "__len__") else self.data

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self._data, self.collate)

    @cached_property
    def columns(self) -> bool:
        """Whether data are tensors, a tuple or a dict of them."""
        data = self._data
        held = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else [data]
        return self.collate is None and all(isinstance(v, Tensor) for v in held)

    def read(self, rows: Tensor) -> Any:
        """Columns at once, whatever the shape of `rows`; other data example by example."""
        data = self._data
        if not self.columns:
            return self._rows.batch(rows.tolist())
        if isinstance(data, Mapping):
            return {name: v[rows] for name, v in data.items()}
        return tuple(v[rows] for v in data) if isinstance(data, tuple) else data[rows]

    def settings(self) -> dict[str, Any]:
        """What tells it from others: all but its data, as far as it is given."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "data"}
        return {name: value for name, value in given.items() if value is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Without what was made here, which another process makes for itself."""
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}


class Learner:
    """One model while it is trained, convolutions with channels last or products by oneDNN if it is said so."""

    def __init__(
        self,
        training: Training,
        indices: np.ndarray,
        seed: int,
        channels_last: bool = False,
        onednn: bool = False,
    ) -> None:
        self.training, self.channels_last, self.onednn = training, channels_last, onednn
        self.model = training.initial(seed)
        if channels_last:
            self.model = laid_out(self.model, torch.channels_last)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = quickened(training.optimizer(list(self.parameters)))
        self.schedule = scheduled(training, self.optimizer, len(indices))
        self.batches = training.batches(indices, seed)

    def backward(self, batch: Any) -> Tensor:
        """The loss; its gradients are then those of the parameters."""
        self.optimizer.zero_grad()
        if self.channels_last:
            batch = _channels_last(batch)
        with ExitStack() as quick:
            if self.onednn:
                quick.enter_context(quick_activations(self.model))
                quick.enter_context(Products())
            loss = self.training.mean_loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def advance(self) -> None:
        if self.training.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.training.clip)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def finished(self) -> nn.Module:
        self.optimizer.zero_grad()
        model = laid_out(self.model, torch.contiguous_format) if self.channels_last else self.model
        return model.eval()


def scheduled(training: Training, optimizer: Optimizer, count: int) -> LRScheduler | None:
    if training.schedule is None:
        return None
    made = training.schedule(optimizer, len(training.steps(count)))
    if not isinstance(made, LRScheduler):
        raise UndeError(
            f"schedule(optimizer, steps) gave a {type(made).__name__}: expected a scheduler of torch.optim"
        )
    return made


def laid_out(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    return model.to(memory_format=layout)  # ty: ignore[no-matching-overload]


def _channels_last(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    if isinstance(batch, Mapping):
        return {name: _channels_last(v) for name, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(_channels_last, batch))
    return batch
