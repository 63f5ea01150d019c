"""In which way the models of a described training are trained: settled by a trial of a few steps.

A way is taken if it gives the gradients of one model after the other, up to rounding, in clearly less time. Stacks
pay where a step is mostly the overhead of many small operations; where it is mostly arithmetic they do not.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from unde.evaluate.bank.products import is_plain
from unde.evaluate.bank.seeding import isolated_rng
from unde.evaluate.bank.stacked import Stack, Unstackable
from unde.evaluate.bank.training_spec import Learner, Training
from unde.onednn import available

Which = Sequence[tuple[np.ndarray, int]]
SIZES = (8, 32, 128)  # of stacks that are tried, the next if the one before has won
STEPS = 6  # of a trial, the first of which is not timed
WORTH = 20  # a trial may take one part in so many of all steps
CLEARLY = 0.9  # of the time of the best way so far
SAME = 1e-3  # relative error of losses and gradients: rounding is well below, another batch or model above
LOST = 600.0  # seconds of work that a stack may lose when it is killed
ROOM = 2**31  # bytes that all stacks may take


@dataclass(frozen=True)
class Way:
    """One model after the other, or as many as `stacked` as one."""

    stacked: int = 1
    channels_last: bool = False
    onednn: bool = False  # products with weights; also short attention and GELU in quicker ways

    def __str__(self) -> str:
        if self.stacked > 1:
            return f"stacks of {self.stacked}"
        last, products = ", channels last" * self.channels_last, ", products by oneDNN" * self.onednn
        return f"one by one{last}{products}"

    def as_json(self) -> dict[str, int | bool]:
        return asdict(self)


def recorded(environment: str) -> Way | None:
    """The way that a model was trained in, if it was one of these."""
    told = json.loads(environment)
    size, last = told.get("stacked"), told.get("channels_last")
    onednn = told.get("onednn", False)  # releases that did not say had no such way
    if type(size) is not int or size < 1 or type(last) is not bool or type(onednn) is not bool:
        return None
    return Way(size, last, onednn)


def settled(training: Training, which: Which, models: int, workers: int = 1) -> Way:
    """The quickest way to train `models`, of which `which` are the first, by so many workers."""
    steps = len(training.steps(len(which[0][0])))
    each = math.ceil(models / workers)
    if len(which) < 2 or steps < STEPS or models * steps < WORTH * STEPS * (4 + min(SIZES[0], each)):
        return Way()
    own = _Own(training, which[:2])
    best, seconds = Way(), own.seconds
    for change in ({"channels_last": True}, {"onednn": True}):
        way = replace(best, **change)
        found = own.compare(way) if own.may(way) else None
        if found is not None and found < CLEARLY * seconds:
            best, seconds = way, found
    for size in SIZES:
        size = min(size, each)
        if (
            size <= best.stacked
            or size * own.bytes * workers > min(ROOM, _free() // 2)
            or size * steps * seconds > LOST
            or (size > SIZES[0] and models * steps < WORTH * STEPS * size)
        ):
            break
        found = own.compare_stack(which[:size])
        if found is None or found >= CLEARLY * seconds:
            break
        best, seconds = Way(stacked=size), found
    return best


class _Own:
    """Two models trained by themselves for a few steps: what other ways are compared with."""

    def __init__(self, training: Training, which: Which) -> None:
        self.training, self.which = training, which
        self.losses, self.gradients, times = [], [], []
        for indices, seed in which:
            with isolated_rng(seed):
                learner = Learner(training, indices, seed)
                if not times:
                    self.bytes, self.convolves = _bytes(learner, indices, seed), _convolves(learner.model)
                    self.multiplies = available() and any(
                        p.ndim == 2 and is_plain(p) for p in learner.model.parameters()
                    )
                losses, gradient, taken = _tried(learner)
            self.losses.append(losses)
            self.gradients.append(gradient)
            times.append(taken)
        self.seconds = min(times)

    def may(self, way: Way) -> bool:
        """Whether the way could be any different from one that is simpler."""
        return self.multiplies if way.onednn else self.convolves

    def compare(self, way: Way) -> float | None:
        """Seconds of a step, or None if the way cannot be taken."""
        (indices, seed), *_ = self.which
        try:
            with isolated_rng(seed):
                learner = Learner(self.training, indices, seed, way.channels_last, way.onednn)
                losses, gradient, taken = _tried(learner)
        except RuntimeError:  # some view that is none in this layout
            return None
        return taken if self._same(0, losses, gradient) else None

    def compare_stack(self, which: Which) -> float | None:
        """Seconds of a step of each model, or None if they cannot be trained as one."""
        try:
            stack, losses, gradient, times = Stack(self.training, which), [], [], []
            for step in range(STEPS):
                start = time.perf_counter()
                losses.append(stack.backward())
                if step == 0:
                    gradient = [p.grad.clone() for p in stack.trained.values() if p.grad is not None]
                stack.advance()
                times.append(time.perf_counter() - start)
        except Unstackable:
            return None
        for i in range(min(len(self.which), len(which))):
            if not self._same(i, [float(loss[i]) for loss in losses], [g[i] for g in gradient]):
                return None
        return min(times[1:]) / len(which)

    def _same(self, i: int, losses: list[float], gradient: list[Tensor]) -> bool:
        own = self.gradients[i]
        if len(own) != len(gradient):
            return False
        error = sum(float((a - b).square().sum()) for a, b in zip(own, gradient)) ** 0.5
        size = sum(float(a.square().sum()) for a in own) ** 0.5
        # Two steps: later ones may differ by what rounding has grown to.
        close = all(abs(a - b) <= SAME * max(abs(a), 1e-3) for a, b in zip(self.losses[i][:2], losses[:2]))
        return close and error <= SAME * size


def _tried(learner: Learner) -> tuple[list[float], list[Tensor], float]:
    losses, gradient, times = [], [], []
    for step in range(STEPS):
        start = time.perf_counter()
        losses.append(learner.backward(next(learner.batches)))
        if step == 0:
            gradient = [p.grad.clone() for p in learner.parameters if p.grad is not None]
        learner.advance()
        times.append(time.perf_counter() - start)
    return [float(loss) for loss in losses], gradient, min(times[1:])


def _bytes(learner: Learner, indices: np.ndarray, seed: int) -> int:
    """That a model adds to a stack: its parameters, their gradient and the optimizer's state, and what is kept for
    the backward pass, with as much again while it runs."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = next(learner.training.batches(indices, seed))
    state = {name: b.clone() for name, b in learner.model.named_buffers()}
    with isolated_rng(), saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = learner.training.mean_loss(learner.model, batch)
    del loss
    with torch.no_grad():
        for name, buffer in learner.model.named_buffers():
            buffer.copy_(state[name])
    return 4 * sum(p.nbytes for p in learner.parameters) + 2 * sum(kept.values())


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def _free() -> int:
    """Bytes of memory that nobody uses."""
    told = Path("/proc/meminfo")
    if told.exists():
        lines = told.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 2 * ROOM
