"""A contact sheet of `robots`: python -m experiments.datasets.sheet docs/robots.png"""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image, ImageDraw

from experiments.datasets.robot_sets import EACH, robot_queries, robots

CELL, NAME, TITLE = 66, 150, 22


def sheet(path: str) -> None:
    """Four training images of each category, two at 32 and two at 64 pixels, and some combinations."""
    small, large = robots(32), robots(64)
    width = 3 * (NAME + 4 * CELL)
    page = Image.new("RGB", (width, 2 * TITLE + 14 * CELL), "white")
    pen = ImageDraw.Draw(page)
    for block, (attribute, names) in enumerate(small.categories.items()):
        left = block * (NAME + 4 * CELL)
        pen.text((left + 6, 6), f"{attribute}: the first five train, the others validation", fill="black")
        for row, name in enumerate(names):
            top = TITLE + row * CELL
            pen.text((left + 6, top + CELL // 2 - 6), name, fill="black")
            first = (block * len(names) + row) * EACH
            for i, data in enumerate((small, small, large, large)):
                _paste(page, data.images[first + i], left + NAME + i * CELL, top)
    top = TITLE + 10 * CELL
    pen.text(
        (6, top + 6), "combinations of validation categories, 32 pixels above and 64 below", fill="black"
    )
    for row, size in enumerate((32, 32, 64, 64)):
        combined = robot_queries(repeats=1, size=size)
        for i in range(width // CELL):
            image = combined.images[(i * 2 + row % 2) * 3 % len(combined)]
            _paste(page, image, i * CELL, top + TITLE + row * CELL)
    page.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def _paste(page: Image.Image, image: np.ndarray, left: int, top: int) -> None:
    times = 64 // len(image)
    page.paste(Image.fromarray(image.repeat(times, axis=0).repeat(times, axis=1)), (left, top))


if __name__ == "__main__":
    sheet(sys.argv[1])
