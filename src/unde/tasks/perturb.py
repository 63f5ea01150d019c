"""Perturbed copies of training examples: what self-retrieval asks to find its original.

Each kind has a strength. What is drawn does not depend on it: with the same random numbers a stronger copy is the
weaker one taken further (more noise of the same sign, the same tokens and more), so that a search over strengths
compares like with like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unde.errors import NotRetrievable, UndeError
from unde.tasks.augment import DRAWS, brightness, contrast, crop_box, resized_crop, saturation, turned

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
class Noise:
    """x + strength · s · N(0, 1) on every floating input, s the standard deviation of its own entries.

    Inputs are the first entry of a tuple, or the entries of a dict that are not called labels or targets.

    >>> noisy = Noise()((torch.tensor([0.0, 2.0]), 1), 0.5, np.random.default_rng(0))
    >>> noisy[1], noisy[0].dtype
    (1, torch.float32)
    """

    name: str = "noise"
    least: float = 0.05
    most: float = 2.0

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        return _on_inputs(example, lambda x: _noisy(x, strength, random))


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
        if isinstance(example, (Tensor, np.ndarray)):
            return _through(example, lambda x: self._image(x, strength, u))
        if isinstance(example, (tuple, list)) and len(example) == 1:
            return type(example)([_through(example[0], lambda x: self._image(x, strength, u))])
        keys = [k for k in ("images", "latents") if isinstance(example, Mapping) and k in example]
        if not keys:
            found = (
                f"has {sorted(example)}" if isinstance(example, Mapping) else f"is a {type(example).__name__}"
            )
            raise UndeError(f"an example of a diffusion model has 'images' or 'latents': this one {found}")
        decode, encode = self.decode, self.encode

        def changed(x: Tensor) -> Tensor:
            if keys[0] == "images":
                return self._image(x, strength, u)
            if decode is None or encode is None:
                return self._cropped(x, strength, u)
            return encode(self._image(decode(x[None])[0], strength, u)[None])[0]

        return {**example, keys[0]: _through(example[keys[0]], changed)}

    def _image(self, x: Tensor, strength: float, u: np.ndarray) -> Tensor:
        """Cropped, and recoloured where there are colours."""
        y = self._cropped(x, strength, u)
        if len(y) != 3:
            return y
        bright, contrasting, colourful = 1 + 0.4 * strength * (2 * u[5:8] - 1)
        y = saturation(contrast(brightness(y / 2 + 0.5, bright), contrasting), colourful)
        return turned(y, 0.1 * strength * (2 * u[8] - 1)) * 2 - 1

    def _cropped(self, x: Tensor, strength: float, u: np.ndarray) -> Tensor:
        """The same draws for every strength; the image is mirrored from the strength on that its draw says."""
        y = x.float().flip(-1) if u[0] < strength / 2 else x.float()
        return resized_crop(y, *crop_box(y.shape[-2], y.shape[-1], 1 - 0.75 * strength, u[1:5]))


def _through(x: Tensor | np.ndarray, change: Callable[[Tensor], Tensor]) -> Tensor | np.ndarray:
    """`x` changed, an array or a tensor as it was."""
    if isinstance(x, np.ndarray):
        return change(torch.from_numpy(x)).numpy().astype(x.dtype)
    return change(x).to(x.dtype)


def _on_inputs(example: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The example with its floating inputs changed; an error if it has none."""
    found = False

    def visit(value: Any) -> Any:
        nonlocal found
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            found = True
            return change(torch.from_numpy(value)).numpy()
        if isinstance(value, Tensor) and value.is_floating_point():
            found = True
            return change(value)
        if isinstance(value, Mapping):
            return type(value)({k: v if k in TARGETS else visit(v) for k, v in value.items()})
        return value

    if isinstance(example, (tuple, list)) and not hasattr(example, "_fields") and example:
        made = type(example)([visit(example[0]), *example[1:]])
    else:
        made = visit(example)
    if not found:
        raise NotRetrievable(
            f"nobody knows how to perturb an example of type {type(example).__name__}: it has no floating inputs. Pass "
            "perturb=, a function (example, strength, random) -> example, or perturb='weights'"
        )
    return made


def _noisy(x: Tensor, strength: float, random: np.random.Generator) -> Tensor:
    z = torch.from_numpy(random.standard_normal(tuple(x.shape), dtype=np.float32)).to(x)
    return x + strength * _spread(x) * z


def _spread(x: Tensor) -> Tensor:
    """The standard deviation of the entries; their size where they are all the same."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    spread = wide.std(correction=0) if x.numel() > 1 else torch.zeros((), device=x.device)
    return torch.where(spread > 0, spread, wide.abs().mean()).to(x.dtype)
