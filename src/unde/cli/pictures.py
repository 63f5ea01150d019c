"""The file of an image as an example like those of the training data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.data import Rows, evenly
from unde.errors import UndeError
from unde.tasks import Classification
from unde.tasks.base import Task

LOOKED_AT = 64  # training examples that tell what numbers images are made of
PIXELS = 50_000_000  # of an image, at most: a small file can unfold into gigabytes
_KEYS = ("pixel_values", "images", "image", "latents")


def opened(path: Path) -> Any:
    """An image of Pillow, upright, in RGB or grey."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise UndeError(f"{path} is read by Pillow: pip install pillow") from None
    try:
        with Image.open(path) as found:
            if found.size[0] * found.size[1] > PIXELS:
                raise UndeError(f"{path} has more than {PIXELS // 10**6} million pixels: make it smaller")
            upright = ImageOps.exif_transpose(found)
            return upright.convert("L" if upright.mode in ("1", "L") else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        raise UndeError(f"{path} is no image that can be read ({e}): expected a PNG or JPEG file") from None


def like_training(image: Any, path: Path, task: Task, train: Rows) -> Any:
    """An example with this image: resized, its numbers scaled as those of training images are, and of class 0 where
    there are classes."""
    example = train[0]
    key = _place(example)
    own = example if key is None else example[key] if key is not _NOWHERE else None
    if not isinstance(own, Tensor) or own.dim() != 3 or own.shape[0] not in (1, 3):
        raise UndeError(
            f"--query {path}: training examples are not images of 1 or 3 channels first (and a label), so it is not "
            "known how to read one. Put the image into the eval_queries of the setup, and ask by its number"
        )
    some = [train[i] if key is None else train[i][key] for i in evenly(len(train), LOOKED_AT)]
    low, high = min(float(x.min()) for x in some), max(float(x.max()) for x in some)
    channels, height, width = own.shape
    resized = image.convert("L" if channels == 1 else "RGB").resize((width, height), resample=1)  # Lanczos
    pixels = torch.from_numpy(np.array(resized).reshape(height, width, channels)).permute(2, 0, 1)
    if not own.is_floating_point() or (low >= 0 and 1 < high <= 255):
        made = pixels
    elif low >= 0 and high <= 1:
        made = pixels / 255
    elif low >= -1 and high <= 1:
        made = pixels / 127.5 - 1
    else:
        raise UndeError(
            f"--query {path}: training images reach from {low:.3g} to {high:.3g}, normalised in a way that is not "
            "known here. Put the image into the eval_queries of the setup, and ask by its number"
        )
    return _put(example, key, made.to(own.dtype).contiguous(), isinstance(task, Classification))


_NOWHERE = object()


def _place(example: Any) -> Any:
    """Where in an example its image is; None: it is the image."""
    if isinstance(example, Tensor):
        return None
    if isinstance(example, (tuple, list)) and len(example) in (1, 2):
        return 0
    if isinstance(example, Mapping):
        arrays = [k for k, v in example.items() if isinstance(v, Tensor) and v.dim() > 0]
        if len(arrays) == 1 and arrays[0] in _KEYS:
            return arrays[0]
    return _NOWHERE


def _put(example: Any, key: Any, value: Tensor, labelled: bool) -> Any:
    if key is None:
        return value
    made = {**example, key: value} if isinstance(example, Mapping) else [value, *example[1:]]
    made = made if isinstance(made, dict) else tuple(made)
    return relabelled(made, 0) if labelled else made


def relabelled(example: Any, label: int) -> Any:
    """The example with another class."""
    if isinstance(example, Mapping):
        key = next(k for k in ("labels", "label") if k in example)
        return {**example, key: _as(example[key], label)}
    return (example[0], _as(example[1], label))


def _as(old: Any, label: int) -> Any:
    return torch.full_like(old, label) if isinstance(old, Tensor) else type(old)(label)
