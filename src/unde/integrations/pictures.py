"""Uploaded pictures: decoded by Pillow, and brought to the size and range of the training pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.data import Rows, evenly, to_numpy
from unde.errors import UndeError, explain

PIXELS = 50_000_000  # of a picture, at most: a small file can unfold into gigabytes
SAMPLED = 64  # training examples that tell what pictures are like
KEYS = ("pixel_values", "images", "image", "latents")


def decode_picture(content: bytes) -> Any:
    """An image of Pillow in RGB, or a grey one, upright, on white where it was transparent."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise UndeError("pictures are read by Pillow: pip install pillow") from None
    if not content:
        raise UndeError("the file is empty: expected a PNG or JPEG picture")
    damaged = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    with (
        explain("this picture cannot be read ({e}): save it again as PNG or JPEG", *damaged),
        explain("this file is no PNG or JPEG picture: convert it, or choose another", UnidentifiedImageError),
    ):
        image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG"))
    width, height = image.size
    if width * height > PIXELS:
        raise UndeError(f"a picture of {width} × {height}: expected at most {PIXELS // 10**6} million pixels")
    with explain("this picture is damaged ({e}): save it again as PNG or JPEG", *damaged):
        image.load()
        image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode.startswith("I"):  # 16 bits of grey
        array = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((array / (257 if array.max() > 255 else 1)).astype(np.uint8))
    return image if image.mode == "L" else image.convert("RGB")


@dataclass(frozen=True)
class ImageFormat:
    """What the pictures of the training data are like, so that another can be made alike."""

    example: Any  # one of them, whose place the new picture takes
    key: Any  # where in it: None (it is the picture), 0 or the name of a column
    shape: tuple[int, ...] | None  # of all, if they have one
    first: bool  # channels first
    low: np.ndarray  # (C,): the range of each channel
    high: np.ndarray

    @classmethod
    def of(cls, rows: Rows) -> ImageFormat | None:
        """None where examples hold no picture, or more than a picture and a label."""
        example = rows[0]
        key = _place(example)
        some = [] if key is _NOWHERE else [_at(rows[i], key) for i in evenly(len(rows), SAMPLED)]
        if not some or any(_channels(one) is None for one in some):
            return None
        shapes = {tuple(one.shape) for one in some}
        first = _channels(some[0]) == "first"
        flat = [_last(to_numpy(one), first).reshape(-1, _depth(some[0], first)) for one in some]
        low, high = np.min([f.min(0) for f in flat], 0), np.max([f.max(0) for f in flat], 0)
        return cls(example, key, shapes.pop() if len(shapes) == 1 else None, first, low, high)

    @property
    def sides(self) -> tuple[int, int] | None:
        """(width, height) of all training pictures."""
        if self.shape is None:
            return None
        height, width = self.shape[-2:] if self.first or len(self.shape) == 2 else self.shape[:2]
        return width, height

    def fit(self, image: Any) -> tuple[Any, list[str]]:
        """An example with the picture in it, and what was done to the picture."""
        old, notes = _at(self.example, self.key), []
        image = image.convert("L" if _depth(old, self.first) == 1 else "RGB")
        if self.sides is not None and image.size != self.sides:
            notes.append(
                f"The picture was resized from {image.size[0]} × {image.size[1]} to {self.sides[0]} × "
                f"{self.sides[1]}, the size of the training pictures."
            )
            image = image.resize(self.sides, resample=1)  # Lanczos
        array = np.asarray(image, dtype=np.float64) / 255
        array, more = self._scale(array[..., None] if array.ndim == 2 else array)
        array = array[..., 0] if old.ndim == 2 else np.moveaxis(array, 2, 0) if self.first else array
        array = np.ascontiguousarray(array)
        new = torch.from_numpy(array).to(old.dtype) if isinstance(old, Tensor) else array.astype(old.dtype)
        return _put(self.example, self.key, new), notes + more

    def _scale(self, array: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """From [0, 1] to the range of the training pictures."""
        low, high = float(self.low.min()), float(self.high.max())
        old = _at(self.example, self.key)
        floating = old.is_floating_point() if isinstance(old, Tensor) else old.dtype.kind == "f"
        if not floating or (low >= 0 and 1 < high <= 255):
            return np.rint(array * 255), []
        if low >= 0 and high <= 1:
            return array, []
        if low >= -1 and high <= 1:
            return 2 * array - 1, []
        # Normalised channel by channel: black and white are where the darkest and the brightest pixels are.
        spread = self.low + array * (self.high - self.low)
        return spread, [
            f"Its values were brought to the range of the training pictures, {low:.3g} to {high:.3g}."
        ]


def with_label(example: Any, label: int, read: Callable[[Any], int | None] = lambda example: None) -> Any:
    """The same example, asked about under another label. `read` tells the label of an example.

    >>> with_label({"x": 2.5, "y": 1, "id": 7}, 3, lambda example: example["y"])
    {'x': 2.5, 'y': 3, 'id': 7}
    """
    mapping = isinstance(example, Mapping)
    usual = [k for k in ("labels", "label") if k in example] if mapping else []
    if isinstance(example, (tuple, list)) and len(example) == 2:
        usual = [1]
    if usual:
        return _relabel(example, usual[0], label)
    keys = list(example) if mapping else range(len(example)) if isinstance(example, (tuple, list)) else []
    for key in keys:  # the label is where another number is another label
        if _is_number(example[key]):
            number = int(example[key]) + 1
            if read(_relabel(example, key, number)) == number:
                return _relabel(example, key, label)
    raise UndeError(
        "this example has no label that could be another one: expected (inputs, label), or a dict with an entry that "
        "the task reads as the label"
    )


def _relabel(example: Any, key: Any, label: int) -> Any:
    old = example[key]
    new = torch.full_like(old, label) if isinstance(old, Tensor) else label
    new = (
        type(old)(label)
        if isinstance(old, np.generic)
        else np.full_like(old, label)
        if isinstance(old, np.ndarray)
        else new
    )
    if isinstance(example, Mapping):
        return {**example, key: new}
    return type(example)([*example[:key], new, *example[key + 1 :]])


def _is_number(x: Any) -> bool:
    """Whether a value is one whole number."""
    if isinstance(x, Tensor):
        return x.numel() == 1 and not x.is_floating_point() and x.dtype != torch.bool
    if isinstance(x, (np.ndarray, np.generic)):
        return x.size == 1 and x.dtype.kind in "iu"
    return isinstance(x, int) and not isinstance(x, bool)


_NOWHERE = object()


def _place(example: Any) -> Any:
    if isinstance(example, (Tensor, np.ndarray)):
        return None
    if isinstance(example, (tuple, list)) and len(example) in (1, 2):
        return 0
    if isinstance(example, Mapping):
        arrays = [k for k, v in example.items() if isinstance(v, (Tensor, np.ndarray)) and v.ndim > 0]
        if len(arrays) == 1 and arrays[0] in KEYS:
            return arrays[0]
    return _NOWHERE


def _at(example: Any, key: Any) -> Any:
    return example if key is None else example[key]


def _put(example: Any, key: Any, value: Any) -> Any:
    if key is None:
        return value
    if isinstance(example, Mapping):
        return {**example, key: value}
    return type(example)([value, *example[1:]])


def _channels(x: Any) -> str | None:
    """Where channels are, as the report reads pictures; None if it is no picture."""
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim not in (2, 3):
        return None
    if x.ndim == 2:
        return "none"
    first, last = x.shape[0] in (1, 3), x.shape[-1] in (1, 3)
    return "first" if first and (isinstance(x, Tensor) or not last) else "last" if last else None


def _depth(x: Any, first: bool) -> int:
    return 1 if x.ndim == 2 else x.shape[0] if first else x.shape[-1]


def _last(array: np.ndarray, first: bool) -> np.ndarray:
    return array[..., None] if array.ndim == 2 else np.moveaxis(array, 0, 2) if first else array
