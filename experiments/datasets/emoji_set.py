"""Emoji of nine icon sets on ten backgrounds, from a file."""

from __future__ import annotations

import os
import zipfile

import numpy as np

from experiments.datasets.attributes import Attributes
from unde.errors import UndeError

ARRAYS = (
    "x",
    "subject",
    "style",
    "background",
    "caption",
    "subject_names",
    "style_names",
    "background_names",
    "style_license",
)


def emoji(path: str | os.PathLike[str]) -> Attributes:
    """900 images, one of each combination of 10 subjects, 9 styles (5 train, 4 validation) and 10 backgrounds.

    `path` is an .npz file with images `x` (N, H, W, 3); for each a `caption` and the numbers of its `subject`, `style`
    and `background`; the names of these in `subject_names`, `style_names`, `background_names`; and, for the licence
    notice, `style_license`. Each image shows a category of every attribute, so queries must be kept out of training:
    see `hold_out`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UndeError(
            f"cannot read emoji from {os.fspath(path)!r}: expected an .npz file ({error})"
        ) from None
    missing = [name for name in ARRAYS if name not in data]
    if missing:
        raise UndeError(
            f"{os.fspath(path)!r} has no {', '.join(missing)}: expected the arrays {', '.join(ARRAYS)}"
        )
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
