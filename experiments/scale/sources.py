"""Where the data of a setting comes from: a local folder, or a data set of the `datasets` library if one is named.

Nothing is downloaded unless a name is passed. Folders may hold

    train/CLASS/name.png, validation/CLASS/name.png     images by class; without splits: CLASS/name.png
    metadata.jsonl and the images it names              {"file_name": …, "text": the caption} on each line
    train*.parquet (.jsonl, .json, .arrow), …           tables, in the folder, in data/ or in train/
    what `save_to_disk` of the datasets library wrote
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unde.errors import UndeError

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}
ALSO = {"validation": ("validation", "valid", "val", "dev"), "train": ("train",), "test": ("test",)}
IMAGE_COLUMNS, LABEL_COLUMNS, TEXT_COLUMNS = ("image", "img"), ("label", "labels"), ("text", "caption")


@dataclass(frozen=True)
class Source:
    """A folder, or the name of a data set ("name" or "name:config"); exactly one of the two."""

    folder: Path | None = None
    dataset: str | None = None

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None else f"data set {self.dataset}"


@dataclass(frozen=True)
class Pictures:
    """Images that are read when asked for, with a class or a caption each."""

    names: list[str]
    classes: list[str]  # of all; empty where images have captions
    labels: np.ndarray  # (N,), −1 without classes
    texts: list[str]  # captions; empty where images have classes
    open: Callable[[int], Any]  # Pillow's

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, i: int, side: int) -> np.ndarray:
        """(3, side, side) uint8: the middle square, resized."""
        from PIL import Image, ImageOps

        with self.open(i) as image:
            square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
        return np.asarray(square).transpose(2, 0, 1)

    def take(self, positions: Sequence[int] | np.ndarray) -> Pictures:
        chosen = [int(i) for i in positions]
        return Pictures(
            [self.names[i] for i in chosen],
            self.classes,
            self.labels[chosen],
            [self.texts[i] for i in chosen] if self.texts else [],
            lambda i: self.open(chosen[i]),
        )


def alike(name: str) -> str:
    """A class name however it is written.

    >>> alike("Ukiyo_E"), alike("in a misty marsh")
    ('ukiyo-e', 'in-a-misty-marsh')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# --- images -----------------------------------------------------------------------------------------------


def pictures(source: Source, split: str, layout: str) -> Pictures:
    """The images of a split; `layout` says in the error message what the setting wants."""
    _check(source, layout)
    folder = source.folder
    if folder is not None:
        inside = next((folder / s for s in ALSO[split] if (folder / s).is_dir()), None)
        for place in filter(None, (inside, folder if split == "train" else None)):
            if (place / "metadata.jsonl").exists():
                return _captioned(place)
            found = sorted(p for p in place.glob("*/*") if p.suffix.lower() in IMAGES)
            if found:
                return _classified(place, found)
    return _tabled(table(source, split, layout), source, layout)


def _classified(folder: Path, files: list[Path]) -> Pictures:
    classes = sorted({p.parent.name for p in files})
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[p.parent.name] for p in files])
    names = [str(p.relative_to(folder)) for p in files]
    return Pictures(names, classes, labels, [], lambda i: _opened(files[i]))


def _captioned(folder: Path) -> Pictures:
    path, names, texts = folder / "metadata.jsonl", [], []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        missing = [key for key in ("file_name", "text") if key not in row]
        if missing:
            raise UndeError(f"{path}, line {number}: no {missing[0]!r}, only {', '.join(row)}")
        names.append(row["file_name"])
        texts.append(row["text"])
    return Pictures(names, [], np.full(len(names), -1), texts, lambda i: _opened(folder / names[i]))


def _tabled(rows: Any, source: Source, layout: str) -> Pictures:
    features = rows.features
    image = _column(features, IMAGE_COLUMNS, source, layout)
    names = [str(i) for i in range(len(rows))]

    def opened(i: int) -> Any:
        found = rows[i][image]
        return _opened(found) if isinstance(found, dict) else found

    text = next((c for c in TEXT_COLUMNS if c in features), None)
    label = next((c for c in LABEL_COLUMNS if c in features), None)
    if label is None:
        text = text or _column(features, TEXT_COLUMNS, source, layout)
        return Pictures(names, [], np.full(len(rows), -1), list(rows[text]), opened)
    labels = list(rows[label])
    classes = getattr(features[label], "names", None)
    if classes is None:  # numbers or words without a list of names
        classes = sorted({str(v) for v in labels})
        labels = [classes.index(str(v)) for v in labels]
    return Pictures(names, list(classes), np.array(labels), [], opened)


def _opened(file: Path | dict[str, Any]) -> Any:
    from PIL import Image, UnidentifiedImageError

    content = file if isinstance(file, Path) else file.get("bytes")
    try:
        return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content or file["path"])
    except (OSError, UnidentifiedImageError) as e:
        raise UndeError(f"cannot read an image ({e}): expected {', '.join(IMAGES)}") from e


def of_classes(found: Pictures, classes: Sequence[str], count: int, fewer: bool, layout: str) -> Pictures:
    """Equally many images of each class, `count` in all, chosen at random; class numbers are those of `classes`."""
    there = {alike(name): i for i, name in enumerate(found.classes)}
    missing = [name for name in classes if alike(name) not in there]
    if missing:
        raise UndeError(
            f"no images of class {missing[0]!r}, there are {', '.join(found.classes[:5]) or 'no classes'}: "
            f"expected {layout}"
        )
    rng, chosen, labels = np.random.default_rng(0), [], []
    for number, name in enumerate(classes):
        rows = np.flatnonzero(found.labels == there[alike(name)])
        each = enough(len(rows), count // len(classes), f"images of class {name!r}", fewer)
        chosen.append(np.sort(rng.permutation(rows)[:each]))
        labels += [number] * each
    taken = found.take(np.concatenate(chosen))
    return Pictures(taken.names, list(classes), np.array(labels), [], taken.open)


# --- tables and texts -------------------------------------------------------------------------------------


def table(source: Source, split: str, layout: str) -> Any:
    """A `datasets.Dataset`."""
    import datasets

    _check(source, layout)
    try:
        if source.folder is None:
            name, _, config = str(source.dataset).partition(":")
            return datasets.load_dataset(name, config or None, split=split)
        return _split_of(source.folder, split, datasets)
    except UndeError as e:
        raise UndeError(f"{e}: expected {layout}") from None
    except Exception as e:  # whatever a foreign file or a missing network leads to
        why = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
        raise UndeError(
            f"cannot read the {split} split of {source} ({type(e).__name__}: {why}): expected {layout}"
        ) from e


def _split_of(folder: Path, split: str, datasets: Any) -> Any:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        found = datasets.load_from_disk(str(folder))
        if not isinstance(found, dict):
            return found
        name = next((s for s in ALSO[split] if s in found), None)
        if name is None:
            raise UndeError(f"{folder} has no {split} split, only {', '.join(found)}")
        return found[name]
    for place in (folder, folder / "data", *(folder / s for s in ALSO[split])):
        inside = place.name in ALSO[split]  # all files of a folder that is named as the split
        for suffix, kind in TABLES.items():
            files = sorted(
                str(p)
                for p in place.glob(f"*{suffix}")
                if inside or re.match(rf"({'|'.join(ALSO[split])})\b", p.name.replace("_", "-"))
            )
            if files:
                return datasets.load_dataset(kind, data_files={"train": files}, split="train")
    there = sorted(p.name for p in folder.iterdir())
    raise UndeError(
        f"{folder} has no {split} split: there is {', '.join(there[:5]) or 'nothing'}{', …' if there[5:] else ''}"
    )


def texts(source: Source, split: str, layout: str, batch: int = 1000) -> Iterator[list[str]]:
    """The texts of a split in their order, some at a time, empty ones included."""
    rows = table(source, split, layout)
    column = _column(rows.features, TEXT_COLUMNS, source, layout)
    for start in range(0, len(rows), batch):
        yield list(rows[start : start + batch][column])


def enough(there: int, wanted: int, what: str, fewer: bool) -> int:
    """How many to take; fewer than wanted only if asked for, since results then belong to another setting."""
    if there >= wanted:
        return wanted
    if not fewer or there < 1:
        raise UndeError(f"{there:,} {what}, the setting has {wanted:,}: give more, or --fewer to take these")
    return there


def _column(features: Any, names: Sequence[str], source: Source, layout: str) -> str:
    name = next((c for c in names if c in features), None)
    if name is None:
        raise UndeError(f"{source} has no column {names[0]!r}, only {', '.join(features)}: expected {layout}")
    return name


def _check(source: Source, layout: str) -> None:
    if source.folder is None and source.dataset is None:
        raise UndeError(f"nothing to read: give --data FOLDER (or --dataset NAME) with {layout}")
    if source.folder is not None and not source.folder.is_dir():
        raise UndeError(f"no folder {source.folder}: expected {layout}")
