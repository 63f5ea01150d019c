"""Seeded random changes of images that leave what they show, for `objective="supervised"`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unde.tasks.perturb import (
    DRAWS,
    brightness,
    contrast,
    crop_box,
    resized_crop,
    saturation,
    turn_hue,
)


def augment(
    images: Tensor,
    keys: Sequence[int] | None = None,
    *,
    seed: int = 0,
    flip: bool = True,
    crop: float = 0.5,
    jitter: float = 0.2,
    hue: float = 0.05,
) -> Tensor:
    """Change images (B, 3, H, W) in [−1, 1].

    keys: a number for each image that, with `seed`, decides its change; by default its position in `images`.
    flip: every other image is mirrored, left to right.
    crop: the least share of an image's area that is kept; what is kept is resized to the whole. 1 keeps all.
    jitter: brightness, contrast and saturation are each multiplied by a factor from 1 − jitter to 1 + jitter.
    hue: colours are turned by up to this share of the colour circle, either way.
    """
    changed = []
    for image, key in zip(images, range(len(images)) if keys is None else keys):
        u = uniform(seed, int(key))
        x = image.float() / 2 + 0.5
        if flip and u[0] < 0.5:
            x = x.flip(2)
        x = resized_crop(x, *crop_box(x.shape[1], x.shape[2], crop, u[1:5]))
        bright, contrasting, colourful = 1 + jitter * (2 * u[5:8] - 1)
        x = saturation(contrast(brightness(x, bright), contrasting), colourful)
        changed.append(turn_hue(x, hue * (2 * u[8] - 1)))
    return (torch.stack(changed) * 2 - 1).to(images.dtype)


def uniform(seed: int, key: int) -> np.ndarray:
    """(DRAWS,) in [0, 1), from raw bits: they are the same in every release of NumPy."""
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(key,))).random_raw(DRAWS)
    return (bits >> np.uint64(11)) * 2.0**-53
