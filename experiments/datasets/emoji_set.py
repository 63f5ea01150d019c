"""Emoji of nine icon sets on ten backgrounds, from a file."""

from __future__ import annotations

import os

import numpy as np

from experiments.datasets.attributes import Attributes


def emoji(path: str | os.PathLike[str]) -> Attributes:
    """900 images, one of each combination of 10 subjects, 9 styles (5 train, 4 validation) and 10 backgrounds.

    `path` is an .npz file with images `x` (N, H, W, 3); for each a `caption` and the numbers of its `subject`, `style`
    and `background`; the names of these in `subject_names`, `style_names`, `background_names`; and, for the licence
    notice, `style_license`. Each image shows a category of every attribute, so queries must be kept out of training:
    see `hold_out`.
    """
    with np.load(path, allow_pickle=False) as file:
        data = dict(file)
    labels = {a: data[a].astype(np.int64) for a in ("subject", "style", "background")}
    categories = {
        "subject": [f"a {name.replace('-', ' ')}" for name in data["subject_names"].tolist()],
        "style": [f"in {name} style" for name in data["style_names"].tolist()],
        "background": [f"on a {name} background" for name in data["background_names"].tolist()],
    }
    licence = "Emoji of these icon sets, drawn on new backgrounds:\n" + "\n".join(
        f"- {name}: {term}"
        for name, term in zip(data["style_names"].tolist(), data["style_license"].tolist())
    )
    glue = {"subject": "", "style": " ", "background": " "}
    return Attributes(data["x"], data["caption"].tolist(), labels, categories, licence, glue)
