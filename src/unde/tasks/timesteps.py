"""Batching of diffusion tasks, where an image is one noisy image for each timestep; timesteps of schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unde.data import digest
from unde.errors import UndeError, require_positive
from unde.tasks.base import Batching, even_slices

ROWS = 80  # noisy images worth having in one forward pass: on CPUs more are slower
KEYS = "digests"  # of images, in a batch
PREPARED = "noisy"  # marks a batch that `passes` prepared


class TimestepBatching(Batching):
    """As many timesteps of as many examples in one pass of a `Diffusion` as `rows` noisy images hold, or as fit."""

    def __init__(self, task: Any, rows: int | None) -> None:
        require_positive(rows=rows)
        self.task, self.timesteps = task, task.timesteps
        self.max_rows = rows  # None until `fit_memory`
        self.most = rows  # examples in one portion
        self.short = False  # two steps of a trajectory instead of all
        self.only: int | None = None  # a single step of trajectories
        self.steps: int | None = None  # steps of trajectories

    @property
    def rows(self) -> int:
        """Noisy images in one pass, if there are as many examples or fewer."""
        return self.max_rows or ROWS

    def prepare(self, batch: Any) -> Any:
        """With the digests of images that no VAE encodes, which seed their noise."""
        images = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 1 else batch
        columns = {"images": images} if isinstance(images, Tensor) else images
        if not isinstance(columns, Mapping) or "trajectory" in columns:
            return batch
        clean = columns.get("latents", None if self.task.inputs.vae else columns.get("images"))
        return {**columns, KEYS: [digest(x) for x in clean]} if isinstance(clean, Tensor) else batch

    def passes(self, batch: Any, ids: Sequence[int] | None) -> Iterator[Any]:
        clean, condition = self.task.inputs(batch)
        if "trajectory" in condition:
            yield from self._follow(clean, condition)
            return
        keys = _keys(batch) or [digest(image) for image in clean.cpu()]
        for cut in even_slices(len(self.timesteps), self.rows // len(clean)):
            yield self._prepare(clean, condition, keys, self.timesteps[cut])

    def portions(self, batch: Any) -> Iterator[tuple[slice, Any]]:
        clean, condition = self.task.inputs(batch)
        for cut in even_slices(len(clean), self.most or len(clean)):
            part = {"latents": clean[cut], **{name: v[cut] for name, v in condition.items()}}
            keys = _keys(batch)
            yield cut, part | {KEYS: keys[cut]} if keys else part

    def fit_memory(self, memory: int, example: Any, peak: Callable[[Any, int], int]) -> TimestepBatching:
        """As many rows as fit: a pass of one row and a pass of two tell what a row takes."""
        if self.max_rows is not None:
            return self
        clean, condition = self.task.inputs(example)
        columns = {"latents": clean, **condition}

        def measure(rows: int) -> int:
            copies = {name: v.expand(rows, *v.shape[1:]) for name, v in columns.items()}
            return peak(next(self._by(rows).passes(copies, None)), rows)

        one, two = measure(1), measure(2)
        return self._by(1 + max(0, memory - one) // max(1, two - one))

    @property
    def examples_per_pass(self) -> int:
        return max(1, self.rows // len(self.timesteps))

    @property
    def row_limit(self) -> int | None:
        return self.most

    def with_rows(self, rows: int) -> TimestepBatching:
        return self if self.max_rows is not None else self._by(rows)

    def reduced(self) -> TimestepBatching:
        """Two timesteps, the least noisy and one in the middle."""
        short = copy.copy(self)
        short.timesteps, short.short = self.timesteps[_two(len(self.timesteps))], True
        return short

    def step(self, c: int, steps: int) -> TimestepBatching:
        """Step c of a DDIM trajectory of `steps`."""
        one = copy.copy(self)
        one.timesteps = [sampler_timesteps(self.task.scheduler, steps)[c]]
        one.only, one.steps = c, steps
        return one

    def _by(self, most: int) -> TimestepBatching:
        """With at most so many rows, and not many more than are useful."""
        sized = copy.copy(self)
        sized.max_rows, sized.most = min(ROWS, most), most
        return sized

    def _prepare(
        self, clean: Tensor, condition: Mapping[str, Tensor], keys: Sequence[str], timesteps: Sequence[int]
    ) -> dict[str, Any]:
        """A batch for one forward pass: noisy images at these timesteps, and what is to be predicted."""
        t = torch.tensor(timesteps).to(clean.device, non_blocking=True).expand(len(clean), -1)
        noise = torch.stack([self.task.noise(key, timesteps, clean.shape[1:]) for key in keys])
        noise = noise.to(clean.device, clean.dtype, non_blocking=True)
        signal, spread = self.task.scales(t, noise)
        noisy = signal * clean.unsqueeze(1) + spread * noise
        target = self.task.target(clean, noise, signal, spread)
        part = {PREPARED: noisy, "target": target, "t": t}
        return part | {"condition": dict(condition), "of": len(self.timesteps)}

    def _follow(self, clean: Tensor, condition: dict[str, Tensor]) -> Iterator[Any]:
        """The passes along trajectories: x_t as the sampler saw it, and the noise in it beside the final image."""
        noisy = condition.pop("trajectory")
        t = self._check_trajectory(clean, noisy, condition.pop("timesteps", None))
        if self.only is not None:
            noisy, t = noisy[:, self.only : self.only + 1], t[:, self.only : self.only + 1]
        elif self.short:
            noisy, t = noisy[:, _two(t.shape[1])], t[:, _two(t.shape[1])]
        signal, spread = self.task.scales(t, noisy)
        noise = (noisy - signal * clean.unsqueeze(1)) / spread
        target = self.task.target(clean, noise, signal, spread)
        for cut in even_slices(t.shape[1], self.rows // len(clean)):
            part = {PREPARED: noisy[:, cut], "target": target[:, cut], "t": t[:, cut]}
            yield part | {"condition": condition, "of": t.shape[1]}

    def _check_trajectory(self, clean: Tensor, noisy: Tensor, t: Tensor | None) -> Tensor:
        """The timesteps of a trajectory, if they are those of the sampler."""
        if t is None or t.shape != noisy.shape[:2] or noisy.shape[2:] != clean.shape[1:]:
            raise UndeError(
                f"a trajectory of shape {tuple(noisy.shape)} with timesteps {None if t is None else tuple(t.shape)}: "
                "expected (B, steps, C, H, W) and (B, steps), as unde.diffusion.sample gives"
            )
        expected = sampler_timesteps(self.task.scheduler, t.shape[1])
        if not bool((t.cpu() == torch.tensor(expected)).all()):
            raise UndeError(
                f"a trajectory with timesteps {t[0, :3].tolist()}… is of another sampler or scheduler: expected "
                f"{expected[:3]}…, those of {t.shape[1]} DDIM steps. Sample with unde.diffusion.sample"
            )
        if self.steps is not None and t.shape[1] != self.steps:
            raise UndeError(
                f"a trajectory of {t.shape[1]} steps for an index of {self.steps}: sample with as many"
            )
        return t


def _keys(batch: Any) -> list[str] | None:
    return batch.get(KEYS) if isinstance(batch, Mapping) else None


def _two(count: int) -> slice:
    """The first and one in the middle."""
    return slice(None, None, max(1, -(-count // 2)))


def config_value(owner: Any, name: str, default: Any = None) -> Any:
    """An entry of the config of a model or a scheduler."""
    config = getattr(owner, "config", None)
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def training_timesteps(scheduler: Any, timesteps: int | Sequence[int]) -> list[int]:
    """K timesteps evenly spaced from 0, or those that are given."""
    total = config_value(scheduler, "num_train_timesteps")
    if total is None or not hasattr(scheduler, "alphas_cumprod"):
        raise UndeError(
            f"{type(scheduler).__name__} has no training timesteps (config.num_train_timesteps and alphas_cumprod): "
            "pass the scheduler that the model was trained with, such as diffusers' DDPMScheduler"
        )
    if isinstance(timesteps, int):
        if not 1 <= timesteps <= total:
            raise UndeError(
                f"timesteps={timesteps}: expected 1 to {total}, the scheduler's training timesteps"
            )
        return [k * total // timesteps for k in range(timesteps)]
    steps = [int(t) for t in timesteps]
    if not steps or not all(0 <= t < total for t in steps):
        raise UndeError(f"timesteps {steps[:5]}: expected at least one, each from 0 to {total - 1}")
    return steps


def sampler_timesteps(scheduler: Any, steps: int) -> list[int]:
    """The timesteps of a DDIM sampler under the schedule of `scheduler`, the noisiest first."""
    from diffusers import DDIMScheduler

    sampler: Any = DDIMScheduler.from_config(scheduler.config)
    sampler.set_timesteps(steps)
    return [int(t) for t in sampler.timesteps]
