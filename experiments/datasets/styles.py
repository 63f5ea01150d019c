"""Picture styles in plain arithmetic, so that a rendering is the same bytes on every machine.

A style takes the picture (G, G, 3) in [0, 1], drawn at twice the final size, and a random state, and gives a
picture of the same shape. Lengths are in units of G / 64: half a pixel of a 32 × 32 image. Only + − × ÷,
comparisons and square roots of single elements are used: these round alike everywhere, unlike sums by
reduction, powers and exponentials.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import RandomState  # its streams are frozen; those of Generator may change with NumPy

Picture = np.ndarray
Style = Callable[[Picture, RandomState], Picture]


def drawing(picture: Picture, random: RandomState) -> Picture:
    """The art as it was drawn."""
    return picture


# The ten of the data set. Train: the first five.


def pencil(picture: Picture, random: RandomState) -> Picture:
    u, tone = _unit(picture), _stretch(_luma(picture))
    down, right = _grid(picture)
    grain = 0.85 + 0.3 * random.random_sample(tone.shape)
    hatching = ((right + down) // u % 6 < 2) & (tone < 0.55)
    dense = ((right + down) // u % 3 < 1) & (tone < 0.25)
    grey = 1.0 - 0.22 * hatching - 0.2 * dense - 0.85 * np.minimum(1.0, _edges(tone, u) * 2.2) * grain
    return _ink(grey, (0.22, 0.22, 0.25), (0.97, 0.97, 0.96))


def halftone(picture: Picture, random: RandomState) -> Picture:
    u, tone = _unit(picture), _stretch(_luma(picture))
    period = 6 * u
    down, right = _grid(picture)
    a, b = (right + down) % period, (right - down) % period  # a screen at 45°
    centre = (period - 1) / 2
    distance = ((a - centre) ** 2 + (b - centre) ** 2) / (
        centre * centre
    )  # 0 at a dot's centre, 2 at corners
    return _ink(distance > 2.1 * (1.0 - tone), (0.85, 0.10, 0.42), (0.99, 0.95, 0.80))


def cyanotype(picture: Picture, random: RandomState) -> Picture:
    return _ink(_stretch(_luma(picture)), (0.02, 0.13, 0.38), (0.90, 0.96, 1.0))


def pointillism(picture: Picture, random: RandomState) -> Picture:
    u, size = _unit(picture), len(picture)
    cell = 4 * u
    down, right = _grid(picture)
    row = down // cell
    right = right + row % 2 * (cell // 2)  # every other row of dots is moved by half a cell
    column = right // cell
    y, x = down % cell - (cell - 1) / 2, right % cell - (cell - 1) / 2
    middle = np.minimum(column * cell + cell // 2 - row % 2 * (cell // 2), size - 1)
    colours = _saturate(blur(picture, u), 1.7)[row * cell + cell // 2, middle]
    colours = colours + (random.random_sample((size // cell, size // cell + 1, 3))[row, column] - 0.5) * 0.3
    dot = (x * x + y * y <= 3.6 * u * u)[..., None]
    return _clip(np.where(dot, colours, np.array((0.96, 0.94, 0.88))))


def woodcut(picture: Picture, random: RandomState) -> Picture:
    u, tone = _unit(picture), _stretch(_luma(picture))
    local = tone - 0.6 * (
        blur(blur(tone, 6 * u), 6 * u) - 0.5
    )  # or a dark figure on a dark ground is one blot
    down, _ = _grid(picture)
    grooves = (down // u % 6 < 3) * 0.36 - 0.18
    return _ink(local + grooves > 0.5, (0.07, 0.05, 0.05), (0.98, 0.98, 0.96))


# Validation: the other five.


def sepia(picture: Picture, random: RandomState) -> Picture:
    size = len(picture)
    down, right = _grid(picture)
    away = ((down * 2 + 1 - size) ** 2 + (right * 2 + 1 - size) ** 2) / (size * size)  # 0 to 2
    tone = 0.12 + 0.8 * _stretch(_luma(blur(picture, _unit(picture))))
    return _ink(tone * (1.0 - 0.38 * away), (0.16, 0.08, 0.02), (1.0, 0.88, 0.66))


def watercolour(picture: Picture, random: RandomState) -> Picture:
    u, size = _unit(picture), len(picture)
    wash = blur(blur(_saturate(picture, 1.3), 2 * u), u)
    wash = np.floor(wash * 5 + 0.5) / 5
    rim = _edges(_luma(wash), u)[..., None]  # pigment gathers where a wash ends
    wash = 0.42 + 0.58 * wash - 0.35 * np.minimum(1.0, rim)
    wash = wash + (_noise(random, size, 4 * u)[..., None] - 0.5) * 0.16
    down, right = _grid(picture)
    border = np.minimum(np.minimum(down, size - 1 - down), np.minimum(right, size - 1 - right))
    paper = border < (2.5 + 5.0 * _noise(random, size, 6 * u)) * u
    return _clip(np.where(paper[..., None], 0.99, wash))


def neon(picture: Picture, random: RandomState) -> Picture:
    u, size = _unit(picture), len(picture)
    tube = np.minimum(1.0, _edges(_luma(picture), u) * 2.5)[..., None]
    down, right = _grid(picture)
    along = ((right + down) / (2 * size - 2))[..., None]
    light = along * np.array((1.0, 0.15, 0.75)) + (1.0 - along) * np.array((0.1, 1.0, 0.9))
    light = 0.6 * light + 0.4 * _saturate(picture, 3.0)
    glow = blur(blur(tube * light, 2 * u), 2 * u)
    return _clip(np.array((0.02, 0.0, 0.06)) + 0.9 * glow + tube * light * 1.1)


def chalk(picture: Picture, random: RandomState) -> Picture:
    u, tone = _unit(picture), _stretch(_luma(picture))
    dust = _noise(random, len(picture), 2 * u)
    line = np.minimum(1.0, _edges(tone, u) * 2.0)
    rubbed = 0.3 * tone * (0.5 + dust)
    return _ink(np.maximum(line * (0.6 + 0.6 * dust), rubbed), (0.08, 0.24, 0.18), (0.95, 0.97, 0.90))


def mosaic(picture: Picture, random: RandomState) -> Picture:
    u, size = _unit(picture), len(picture)
    tile = 6 * u
    count = -(-size // tile)
    inside = np.minimum(np.arange(count * tile), size - 1)
    padded = _saturate(picture, 1.35)[inside][:, inside]
    total = np.zeros((count, count, 3))
    for y in range(tile):
        for x in range(tile):
            total = total + padded[y::tile, x::tile]
    colours = total / (tile * tile) + (random.random_sample((count, count, 1)) - 0.5) * 0.16
    down, right = _grid(picture)
    grout = ((down % tile < u) | (right % tile < u))[..., None]
    return _clip(np.where(grout, np.array((0.16, 0.14, 0.13)), colours[down // tile, right // tile]))


# Other styles, for pretraining and for what the prompt leaves open.


def grey(picture: Picture, random: RandomState) -> Picture:
    return _ink(_luma(picture), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def negative(picture: Picture, random: RandomState) -> Picture:
    return 1.0 - picture


def poster(picture: Picture, random: RandomState) -> Picture:
    return np.floor(_clip(_saturate(picture, 1.8)) * 2 + 0.5) / 2


def blurred(picture: Picture, random: RandomState) -> Picture:
    u = _unit(picture)
    return blur(blur(blur(picture, 3 * u), 3 * u), 2 * u)


def red_wash(picture: Picture, random: RandomState) -> Picture:
    return _ink(_stretch(_luma(picture)), (0.45, 0.0, 0.02), (1.0, 0.78, 0.74))


def thermal(picture: Picture, random: RandomState) -> Picture:
    heat = _stretch(_luma(picture))[..., None] * 3
    return _clip(np.concatenate([heat - 0.4, heat - 1.6, np.abs(heat - 1.3) * 1.2 - 0.7], axis=2))


def television(picture: Picture, random: RandomState) -> Picture:
    u = _unit(picture)
    down, _ = _grid(picture)
    beam = np.where(down // (2 * u) % 2 == 0, 1.15, 0.4)[..., None]
    ghost = np.stack(
        [np.roll(picture[..., 0], 2 * u, 1), picture[..., 1], np.roll(picture[..., 2], -2 * u, 1)], 2
    )
    return _clip(ghost * beam)


def faded(picture: Picture, random: RandomState) -> Picture:
    return 0.62 + 0.3 * _saturate(picture, 0.6)


def night_vision(picture: Picture, random: RandomState) -> Picture:
    tone = _luma(picture) * (0.75 + 0.5 * random.random_sample(picture.shape[:2]))
    return _ink(tone, (0.0, 0.08, 0.02), (0.45, 1.0, 0.35))


STYLES: dict[str, Style] = {
    "a pencil sketch": pencil,
    "a halftone print": halftone,
    "a cyanotype": cyanotype,
    "a pointillist painting": pointillism,
    "a woodcut": woodcut,
    "a sepia photograph": sepia,
    "a watercolour": watercolour,
    "a neon sign": neon,
    "a chalk drawing": chalk,
    "a mosaic": mosaic,
}

OTHER_STYLES: dict[str, Style] = {
    "a drawing": drawing,
    "a black and white photograph": grey,
    "a photographic negative": negative,
    "a poster": poster,
    "a blurred photograph": blurred,
    "a red wash painting": red_wash,
    "a thermal image": thermal,
    "a television picture": television,
    "a faded print": faded,
    "a night vision picture": night_vision,
}


def _unit(picture: Picture) -> int:
    return len(picture) // 64


def _grid(picture: Picture) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (G, 1) and column numbers (1, G)."""
    n = np.arange(len(picture))
    return n[:, None], n[None, :]


def _luma(picture: Picture) -> np.ndarray:
    return 0.299 * picture[..., 0] + 0.587 * picture[..., 1] + 0.114 * picture[..., 2]


def _clip(picture: Picture) -> Picture:
    return np.minimum(1.0, np.maximum(0.0, picture))


def _stretch(tone: np.ndarray) -> np.ndarray:
    """Tones spread so that the darkest and lightest twentieths of the picture become black and white."""
    order = np.sort(tone, axis=None)
    low, high = order[len(order) // 20], order[-1 - len(order) // 20]
    return _clip((tone - low) / max(high - low, 0.2))


def _ink(tone: np.ndarray, dark: tuple[float, ...], light: tuple[float, ...]) -> Picture:
    tone = _clip(np.asarray(tone, dtype=float))[..., None]
    return tone * np.array(light) + (1.0 - tone) * np.array(dark)


def _saturate(picture: Picture, strength: float) -> Picture:
    tone = _luma(picture)[..., None]
    return _clip(tone + strength * (picture - tone))


def _shifted(picture: Picture, by: int, axis: int) -> Picture:
    """The picture moved by some pixels, its border repeated."""
    n = np.minimum(np.maximum(np.arange(picture.shape[axis]) - by, 0), picture.shape[axis] - 1)
    return np.take(picture, n, axis=axis)


def blur(picture: Picture, radius: int) -> Picture:
    for axis in (0, 1):
        total = picture
        for by in range(1, radius + 1):
            total = total + _shifted(picture, by, axis) + _shifted(picture, -by, axis)
        picture = total / (2 * radius + 1)
    return picture


def _edges(tone: np.ndarray, reach: int) -> np.ndarray:
    """How much the tone changes across `reach` pixels."""
    down = _shifted(tone, reach, 0) - _shifted(tone, -reach, 0)
    right = _shifted(tone, reach, 1) - _shifted(tone, -reach, 1)
    return np.sqrt(down * down + right * right)


def _noise(random: RandomState, size: int, cell: int) -> np.ndarray:
    """Smooth noise in [0, 1], with features of about `cell` pixels."""
    count = size // cell + 2
    coarse = random.random_sample((count, count))
    at = np.arange(size) / cell
    low = at.astype(int)
    part = (at - low)[:, None]
    rows = coarse[low] * (1 - part) + coarse[low + 1] * part
    return rows[:, low] * (1 - part.T) + rows[:, low + 1] * part.T
