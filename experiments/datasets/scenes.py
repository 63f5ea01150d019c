"""Subjects and backgrounds from the art of the `robohash` package, put together into one picture.

Pillow only decodes the PNG files; everything after that is the arithmetic of `styles`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.random import RandomState

from experiments.datasets.styles import Style, blur
from unde.errors import UndeError

LICENCE = """\
The pictures are made from the art of the robohash package (https://github.com/e1ven/Robohash), changed in size,
composition and style:
- robots (set1) and backgrounds by Zikri Kader, CC-BY-3.0 or CC-BY-4.0
- monsters (set2) by Hrvoje Novakovic, CC-BY-3.0
- robot heads (set3) by Julian Peter Arias, CC-BY-3.0
- cats (set4) by David Revoy, CC-BY-4.0, https://www.peppercarrot.com/extras/html/2016_cat-generator/
- people (set5) by Pablo Stanley, https://avataaars.com/, free for personal and commercial use
Robots lovingly delivered by Robohash.org."""


T = TypeVar("T")
Background = str | tuple[float, float, float]  # a file of the art, or a plain colour


class Subject(NamedTuple):
    """Parts from back to front, one file of each pattern drawn at random, and the square of the art to show."""

    parts: tuple[str, ...]
    window: tuple[float, float, float]  # left, top, side, as shares of the art's width


def robot(colour: str, face: int, body: int, accessory: int) -> Subject:
    parts = f"01Body/*-{body:02}", f"02Face/*-{face:02}", f"Accessory/*-{accessory:02}", "Eyes/*", "Mouth/*"
    return Subject(tuple(f"set1/{colour}/*#{part}.png" for part in parts), (0.1, 0.1, 0.8))


def monster(face: int, skin: int, clothes: int) -> Subject:
    parts = f"01FaceColors/*final{skin}", f"02BodyColors/*final{clothes}", f"03Faces/*final{face}"
    parts += "04Body/*final[1279]", "Eyes/*", "Mouth/*", "Nose/*final[1-4]"
    return Subject(tuple(f"set2/*#{part}.png" for part in parts), (0.12, 0.1, 0.76))


def droid(face: int, antenna: int) -> Subject:
    parts = (
        f"01BaseFace/*Design{face}",
        f"03Antenna/*Design{antenna}",
        "04Eyes/*Design[1-5]",
        "07Mouth/*Design[1-5]",
    )
    return Subject(tuple(f"set3/*#{part}.png" for part in parts), (0.05, 0.0, 0.9))


def cat(body: int, accessory: int) -> Subject:
    parts = (
        f"00body/*body{body}",
        "02eyes/*eyes[0-3]",
        "03mouth/*mouth[0-3]",
        f"04accessories/*accessory{accessory}",
    )
    return Subject(tuple(f"set4/*#{part}.png" for part in parts), (0.0, 0.0, 1.0))


def person(top: str, clothes: str) -> Subject:
    parts = "Body/[BLPT]*", "Eye/S*", "Mouth/S*", f"Cloth/{clothes}", f"Top/{top}"
    return Subject(tuple(f"set5/*#{part}.png" for part in parts), (0.0, 0.0, 1.0))


SUBJECTS: dict[str, Subject] = {
    "a tin-can robot": robot("blue", face=5, body=9, accessory=7),
    "an orange cat": cat(14, accessory=7),
    "a horned monster": monster(3, skin=3, clothes=4),
    "a spike-headed droid": droid(63, antenna=8),
    "a person in a wide hat": person("Hat", "BlazerSweater"),
    "a bulb-headed robot": robot("pink", face=6, body=7, accessory=8),
    "an alien with eyestalks": monster(12, skin=5, clothes=10),
    "a dome-headed droid": droid(45, antenna=3),
    "a bucket-headed guard": monster(6, skin=2, clothes=7),
    "a person with big pink hair": person("LongHairFro-PastelPink", "Overall-White"),
}

OTHER_SUBJECTS: dict[str, Subject] = {
    "a red round robot": robot("red", face=2, body=1, accessory=4),
    "a green egg robot": robot("green", face=4, body=10, accessory=3),
    "a yellow box robot": robot("yellow", face=10, body=4, accessory=5),
    "a white hooked robot": robot("white", face=8, body=5, accessory=10),
    "a brown bell robot": robot("brown", face=3, body=2, accessory=1),
    "a purple wedge robot": robot("purple", face=7, body=8, accessory=6),
    "a grey pebble robot": robot("grey", face=9, body=6, accessory=2),
    "an orange egg robot": robot("orange", face=4, body=3, accessory=9),
    "a unicorn monster": monster(2, skin=9, clothes=8),
    "a helmeted monster": monster(5, skin=4, clothes=2),
    "a propeller monster": monster(7, skin=8, clothes=5),
    "a siren monster": monster(8, skin=1, clothes=9),
    "a cyclops monster": monster(10, skin=7, clothes=6),
    "a bald monster": monster(14, skin=6, clothes=1),
    "a green box droid": droid(13, antenna=1),
    "a purple notched droid": droid(1, antenna=2),
    "an orange winged droid": droid(23, antenna=4),
    "a blue wedge droid": droid(29, antenna=5),
    "a pink shell droid": droid(80, antenna=6),
    "a grey toothed droid": droid(85, antenna=7),
    "a person in a winter hat": person("WinterHat2-PastelGreen", "Hoodie-Gray02"),
    "a person with a bun": person("LongHairBun-Black", "ShirtCrewNeck-PastelBlue"),
    "a person with short hair": person("ShortHairShortFlat-Brown", "GraphicShirt--Deer"),
    "a person in a turban": person("Turban-Blue02", "CollarSweater-PastelOrange"),
}

BACKGROUNDS: dict[str, Background] = {
    "in front of a skyline": "bg1/*final3",
    "in a dark forest": "bg1/*final2",
    "on a sandy beach": "bg1/*final1",
    "on a desert dune": "bg1/*final10",
    "under the stars": "bg1/*BG-11",
    "below a snowy peak": "bg1/*final7",
    "by a palm island": "bg1/*final4",
    "in a field at sunrise": "bg1/*final6",
    "before a sunburst": "bg2/*BG-02",
    "inside a computer": "bg1/*BG-10",
}

OTHER_BACKGROUNDS: dict[str, Background] = {
    "on green hills": "bg1/*final5",
    "under a full moon": "bg1/*final9",
    "in a cloudy sky": "bg1/*final8",
    "on red honeycomb": "bg2/*BG-06",
    "on blue honeycomb": "bg2/*BG-08",
    "on green honeycomb": "bg2/*BG-07",
    "above the clouds": "bg1/*BG-12",
    "on plain grey": (0.62, 0.62, 0.62),
    "on plain white": (0.97, 0.97, 0.97),
    "on plain pink": (0.95, 0.70, 0.78),
    "on plain teal": (0.25, 0.62, 0.60),
    "on plain lilac": (0.70, 0.62, 0.88),
    "on plain brown": (0.52, 0.38, 0.28),
}


def random_state(key: str) -> RandomState:
    """A stream of its own for each key, so that no image depends on those drawn before it."""
    return RandomState(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big"))


def pick(among: Sequence[T], random: RandomState) -> T:
    return among[int(random.random_sample() * len(among))]


def render(subject: Subject, style: Style, background: Background, size: int, key: str) -> np.ndarray:
    """One image (size, size, 3) of uint8, a pure function of its arguments."""
    random = random_state(key)
    grid = 2 * size
    picture = _backdrop(background, grid, random)
    figure, alpha = _figure(subject, grid, random)
    rim = np.minimum(1.0, 3.0 * blur(alpha, grid // 64)) * 0.8
    picture = rim + (1.0 - rim) * picture
    picture = style(figure + (1.0 - alpha) * picture, random)
    total = picture[::2, ::2] + picture[1::2, ::2] + picture[::2, 1::2] + picture[1::2, 1::2]
    return np.floor(np.minimum(1.0, np.maximum(0.0, total / 4)) * 255 + 0.5).astype(np.uint8)


def _backdrop(background: Background, grid: int, random: RandomState) -> np.ndarray:
    side = 0.75 + 0.25 * random.random_sample()
    left, top = (1.0 - side) * random.random_sample(2)
    light = 0.92 + 0.16 * random.random_sample()
    flip = random.random_sample() < 0.5
    if isinstance(background, tuple):
        shade = 1.0 - 0.3 * (top + side * np.arange(grid) / grid)  # lighter above, like a studio backdrop
        picture = np.array(background) * np.broadcast_to(shade[:, None, None], (grid, grid, 1))
    else:
        art = _load(f"backgrounds/{background}.png", grid, random)
        picture = _sample(art[..., :3], left, top, side, grid)
    return np.minimum(1.0, (picture[:, ::-1] if flip else picture) * light)


def _figure(subject: Subject, grid: int, random: RandomState) -> tuple[np.ndarray, np.ndarray]:
    """The colour times alpha (G, G, 3) and the alpha (G, G, 1) of a subject, a little moved and scaled."""
    first, *others = (_load(f"sets/{pattern}", grid, random) for pattern in subject.parts)
    art = first
    for part in others:
        art = part + (1.0 - part[..., 3:]) * art
    left, top, side = subject.window
    scale = 1.0 + 0.16 * random.random_sample()
    across, down = random.random_sample(2)
    left += side * ((1.0 - scale) / 2 + 0.12 * (across - 0.5))
    top += side * (1.0 - scale - 0.06 * down)  # the lower end of a figure stays out of sight
    placed = _sample(art, left, top, side * scale, grid)
    return placed[..., :3], placed[..., 3:]


def _sample(art: np.ndarray, left: float, top: float, side: float, grid: int) -> np.ndarray:
    """A square of the art, bilinearly on (grid, grid) points; nothing (zero) outside of it."""
    n = len(art)
    at = (np.arange(grid) + 0.5) / grid * side * n - 0.5
    for axis, start in ((0, top * n), (1, left * n)):
        where = at + start
        low = np.floor(where).astype(int)
        part = where - low
        inside = ((where > -1) & (where < n)).astype(float)
        below, above = np.clip(low, 0, n - 1), np.clip(low + 1, 0, n - 1)
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        near, far = ((1.0 - part) * inside).reshape(shape), (part * inside).reshape(shape)
        art = np.take(art, below, axis) * near + np.take(art, above, axis) * far
    return art


def _load(pattern: str, grid: int, random: RandomState) -> np.ndarray:
    return _read(pick(_matches(pattern), random), grid)


@cache
def _matches(pattern: str) -> list[Path]:
    spec = find_spec("robohash")
    if spec is None or not spec.submodule_search_locations:
        raise UndeError("the pictures come with robohash: pip install 'unde[examples]'")
    root = Path(spec.submodule_search_locations[0])
    found = sorted(root.glob(pattern), key=lambda path: path.name)
    if not found:
        raise UndeError(
            f"robohash has no file {pattern}: expected the art of robohash 2; pip install 'robohash>=2'"
        )
    return found


@lru_cache(maxsize=512)
def _read(path: Path, grid: int) -> np.ndarray:
    """The art (n, n, 4), colours times alpha in [0, 1], reduced by a whole number to at least `grid` pixels."""
    try:
        from PIL import Image
    except ImportError:
        raise UndeError("the pictures are read with Pillow: pip install 'unde[examples]'") from None
    with Image.open(path) as file:
        picture = file.convert("RGBA")
    by = max(1, picture.width // grid)
    n = picture.width // by
    out = np.zeros((n, n, 4), np.float32)
    box = picture.getchannel("A").getbbox()
    if box is None:
        return out
    left, top, right, bottom = box[0] // by, box[1] // by, min(n, -(-box[2] // by)), min(n, -(-box[3] // by))
    art = np.asarray(picture.crop((left * by, top * by, right * by, bottom * by))).astype(np.uint32)
    art[..., :3] *= art[..., 3:]
    art[..., 3] *= 255
    total = art.reshape(bottom - top, by, -1, 4).sum(axis=1)  # whole numbers: exact in any order
    total = total.reshape(bottom - top, right - left, by, 4).sum(axis=2)
    out[top:bottom, left:right] = total / (255 * 255 * by * by)
    return out
