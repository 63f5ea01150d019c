"""What schedulers of diffusers say: their config, and the timesteps of training and of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unde.errors import UndeError


def configured(owner: Any, name: str, default: Any = None) -> Any:
    """An entry of the config of a model or a scheduler."""
    config = getattr(owner, "config", None)
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if found is None else found


def training_timesteps(scheduler: Any, timesteps: int | Sequence[int]) -> list[int]:
    """K timesteps evenly spaced from 0, or those that are given."""
    total = configured(scheduler, "num_train_timesteps")
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
    found = [int(t) for t in timesteps]
    if not found or not all(0 <= t < total for t in found):
        raise UndeError(f"timesteps {found[:5]}: expected at least one, each from 0 to {total - 1}")
    return found


def sampler_timesteps(scheduler: Any, steps: int) -> list[int]:
    """The timesteps of a DDIM sampler under the schedule of `scheduler`, the noisiest first."""
    from diffusers import DDIMScheduler

    sampler: Any = DDIMScheduler.from_config(scheduler.config)
    sampler.set_timesteps(steps)
    return [int(t) for t in sampler.timesteps]
