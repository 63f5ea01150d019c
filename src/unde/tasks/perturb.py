"""Perturbed copies of training examples, the queries of self-retrieval, and augmented images.

Each kind has a strength, and the random numbers do not depend on it: a stronger copy goes further in the same direction
(more of the same noise, the same tokens and more), so that a search over strengths compares like with like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unde.errors import UndeError

RATIO = 4 / 3  # a crop is at most so much wider or taller, for its image's shape
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601: what grey a colour is
DRAWS = 9  # as many for every image, so that an option that is off leaves the others as they were


# --- the operations, on one image (3, H, W) in [0, 1] -----------------------------------------------------


def resized_crop(x: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A box of the image, resized to the size of the whole."""
    box = x[:, top : top + height, left : left + width]
    return F.interpolate(box[None], size=x.shape[1:], mode="bilinear", align_corners=False)[0]


def brightness(x: Tensor, factor: float) -> Tensor:
    return (factor * x).clamp(0, 1)


def contrast(x: Tensor, factor: float) -> Tensor:
    """Away from the mean grey of the image, or towards it."""
    return (factor * x + (1 - factor) * _grey(x).mean()).clamp(0, 1)


def saturation(x: Tensor, factor: float) -> Tensor:
    """Away from the grey of each pixel, or towards it."""
    return (factor * x + (1 - factor) * _grey(x)).clamp(0, 1)


def turn_hue(x: Tensor, turn: float) -> Tensor:
    """The same saturation and value (of HSV) with the hue a share of the colour circle further."""
    red, green, blue = x
    value = x.amax(0)
    chroma = value - x.amin(0)
    some = torch.where(chroma > 0, chroma, 1)  # grey has no hue, and any will do
    sixths = torch.where(
        value == red,
        (green - blue) / some,
        torch.where(value == green, 2 + (blue - red) / some, 4 + (red - green) / some),
    )
    from_each = [(start + sixths + 6 * turn) % 6 for start in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in from_each])


def _grey(x: Tensor) -> Tensor:
    """(1, H, W)"""
    return torch.einsum("c,chw->hw", torch.tensor(LUMA, dtype=x.dtype, device=x.device), x)[None]


def crop_box(height: int, width: int, least: float, u: np.ndarray) -> tuple[int, int, int, int]:
    """(top, left, height, width): a random share of the area, in a random shape that fits, at a random place."""
    area = least + (1 - least) * u[0]
    widest = min(RATIO, 1 / area)  # any wider or taller would not fit
    shape = math.exp((2 * u[1] - 1) * math.log(widest))
    tall, wide = (
        min(max(round(side * math.sqrt(area * factor)), 1), side)
        for side, factor in ((height, 1 / shape), (width, shape))
    )
    return int(u[2] * (height - tall + 1)), int(u[3] * (width - wide + 1)), tall, wide


TARGETS = ("labels", "label", "targets", "target", "y")  # entries of a dict that are not inputs
CORPUS = 256  # training examples whose tokens are drawn from


@runtime_checkable
class Perturbation(Protocol):
    """A way to change one example, and the strengths between which it makes sense."""

    @property
    def name(self) -> str: ...
    @property
    def least(self) -> float: ...
    @property
    def most(self) -> float: ...

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any: ...


@dataclass(frozen=True)
class InputNoise:
    """x + strength · s · N(0, 1) on every floating input, s the standard deviation of its own entries.

    Inputs are the first entry of a tuple, or the entries of a dict that are not called labels or targets.

    >>> noisy = InputNoise()((torch.tensor([0.0, 2.0]), 1), 0.5, np.random.default_rng(0))
    >>> noisy[1], noisy[0].dtype
    (1, torch.float32)
    """

    name: str = "noise"
    least: float = 0.05
    most: float = 2.0

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        return _change_inputs(example, lambda x: _add_noise(x, strength, random))


@dataclass(frozen=True, eq=False)
class Augment:
    """Images as a diffusion model is trained on, flipped, cropped and, if they have three channels, recoloured.

    At strength 1 a crop keeps at least a quarter of the area, colours change by up to 0.4, and half of the images are
    mirrored. `decode` and `encode` lead from latents to images and back where there is a VAE; without one, latents
    are cropped and mirrored as they are.
    """

    decode: Callable[[Tensor], Tensor] | None = None
    encode: Callable[[Tensor], Tensor] | None = None
    name: str = "augmented"
    least: float = 0.05
    most: float = 1.0

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        u = random.random(DRAWS)
        return self._change(example, strength, u)

    def _change(self, example: Any, strength: float, u: np.ndarray) -> Any:
        if isinstance(example, (Tensor, np.ndarray)):
            return _map_image(example, lambda x: self._image(x, strength, u))
        if isinstance(example, (tuple, list)) and len(example) == 1:
            return type(example)([self._change(example[0], strength, u)])
        what = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        if "images" in what:
            return {**example, "images": self._change(example["images"], strength, u)}
        if "latents" not in what:
            raise UndeError(f"an example of a diffusion model has 'images' or 'latents': this one has {what}")
        decode, encode = self.decode, self.encode

        def change(x: Tensor) -> Tensor:
            if decode is None or encode is None:
                return self._crop(x, strength, u)
            return encode(self._image(decode(x[None])[0], strength, u)[None])[0]

        return {**example, "latents": _map_image(example["latents"], change)}

    def _image(self, x: Tensor, strength: float, u: np.ndarray) -> Tensor:
        """Cropped, and recoloured where there are colours."""
        y = self._crop(x, strength, u)
        if len(y) != 3:
            return y
        bright, contrasting, colourful = 1 + 0.4 * strength * (2 * u[5:8] - 1)
        y = saturation(contrast(brightness(y / 2 + 0.5, bright), contrasting), colourful)
        return turn_hue(y, 0.1 * strength * (2 * u[8] - 1)) * 2 - 1

    def _crop(self, x: Tensor, strength: float, u: np.ndarray) -> Tensor:
        """The same draws for every strength; the image is mirrored from the strength on that its draw says."""
        y = x.float().flip(-1) if u[0] < strength / 2 else x.float()
        return resized_crop(y, *crop_box(y.shape[-2], y.shape[-1], 1 - 0.75 * strength, u[1:5]))


def _map_image(x: Tensor | np.ndarray, change: Callable[[Tensor], Tensor]) -> Tensor | np.ndarray:
    """`x` changed, an array or a tensor as it was."""
    if isinstance(x, np.ndarray):
        return change(torch.from_numpy(x)).numpy().astype(x.dtype)
    return change(x).to(x.dtype)


def _change_inputs(example: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The example with its floating inputs changed; an error if it has none."""
    changed = []

    def visit(value: Any) -> Any:
        floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        if floating or (isinstance(value, Tensor) and value.is_floating_point()):
            changed.append(value)
            return _map_image(value, change)
        if isinstance(value, Mapping):
            return type(value)({k: v if k in TARGETS else visit(v) for k, v in value.items()})
        return value

    if isinstance(example, (tuple, list)) and not hasattr(example, "_fields") and example:
        out = type(example)([visit(example[0]), *example[1:]])
    else:
        out = visit(example)
    if not changed:
        raise UndeError(
            f"nobody knows how to perturb an example of type {type(example).__name__}: it has no floating inputs. Pass "
            "perturb=, a function (example, strength, random) -> example, or perturb='weights'"
        )
    return out


def _add_noise(x: Tensor, strength: float, random: np.random.Generator) -> Tensor:
    """Of the standard deviation of the entries; of their size where they are all the same."""
    z = torch.from_numpy(random.standard_normal(tuple(x.shape), dtype=np.float32)).to(x)
    wide = x if x.dtype == torch.float64 else x.float()
    spread = wide.std(correction=0) if x.numel() > 1 else wide.new_zeros(())
    return x + strength * torch.where(spread > 0, spread, wide.abs().mean()).to(x.dtype) * z
