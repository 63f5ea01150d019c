"""Where the data of a setting comes from: a local folder, or a data set of the `datasets` library if one is named.

Nothing is downloaded unless a name is passed, as hf:NAME or hf:NAME:CONFIG. Folders are read by the same library, which
also finds the splits:

    train/CLASS/name.png, validation/CLASS/name.png     images by class; without splits: CLASS/name.png
    metadata.jsonl and the images it names              {"file_name": …, "text": the caption} on each line
    train*.parquet (.jsonl, .json, .arrow), …           tables, in the folder, in data/ or in train/
    what `save_to_disk` of the datasets library wrote
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.shared.paths import unfinished
from unde import console
from unde.errors import UndeError, explain

HUB = "hf:"
TOKENIZER = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
IMAGE_COLUMNS, LABEL_COLUMNS, TEXT_COLUMNS = ("image", "img"), ("label", "labels"), ("text", "caption")


def table(source: str, split: str, layout: str) -> Any:
    """A split of a folder or data set; `layout` says in error messages what the setting wants."""
    import datasets

    folder = Path(source)
    if not source:
        raise UndeError(f"nothing to read: give --data FOLDER (or {HUB}NAME) with {layout}")
    if not source.startswith(HUB) and not folder.is_dir():
        raise UndeError(f"no folder {folder}: expected {layout}")
    # whatever a foreign file or a missing network leads to
    with explain(
        f"cannot read the {split} split of {source} ({{kind}}: {{e}}): expected {layout}", Exception
    ):
        if source.startswith(HUB):
            name, _, config = source.removeprefix(HUB).partition(":")
            return datasets.load_dataset(name, config or None, split=split)
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            found = datasets.load_from_disk(source)
            return found[split] if isinstance(found, dict) else found
        return datasets.load_dataset(source, split=split)


def _column(rows: Any, names: Sequence[str], source: str, layout: str) -> str:
    name = next((c for c in names if c in rows.features), None)
    if name is None:
        there = ", ".join(rows.features)
        raise UndeError(f"{source} has no column {names[0]!r}, only {there}: expected {layout}")
    return name


def enough(there: int, wanted: int, what: str) -> int:
    """How many to take; that they are fewer than the paper's is said."""
    if there < 1:
        raise UndeError(f"no {what}: the setting has {wanted:,}")
    if there < wanted:
        console.note(f"{there:,} {what}, the setting has {wanted:,}: results belong to a smaller one")
    return min(there, wanted)


# --- images -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """Images that are read when asked for, with a class or a caption each."""

    files: Any  # for each {"bytes", "path"}, one of them None
    classes: list[str]  # of all; empty where images have captions
    labels: np.ndarray  # (N,), −1 without classes
    texts: list[str]  # captions; empty where images have classes
    rows: np.ndarray  # (N,) of `files`

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> list[str]:
        """CLASS/name.png, or the number of the row."""
        paths = [(self.files[int(i)]["path"], i) for i in self.rows]
        return ["/".join(Path(path).parts[-2:]) if path else str(i) for path, i in paths]

    def pixels(self, i: int, side: int) -> np.ndarray:
        """(3, side, side) uint8: the middle square, resized."""
        from PIL import Image, ImageOps

        file = self.files[int(self.rows[i])]
        read = io.BytesIO(file["bytes"]) if file["bytes"] else file["path"]
        with explain("cannot read an image ({e})", OSError), Image.open(read) as image:
            square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
        return np.asarray(square).transpose(2, 0, 1)

    def take(self, positions: Sequence[int] | np.ndarray) -> Pictures:
        chosen = np.asarray(positions, dtype=int)
        texts = [self.texts[i] for i in chosen] if self.texts else []
        return replace(self, labels=self.labels[chosen], texts=texts, rows=self.rows[chosen])


def alike(name: str) -> str:
    """A class name however it is written.

    >>> alike("Ukiyo_E"), alike("in a misty marsh")
    ('ukiyo-e', 'in-a-misty-marsh')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def pictures(source: str, split: str, layout: str) -> Pictures:
    """The images of a split."""
    import datasets

    rows = table(source, split, layout)
    image = _column(rows, IMAGE_COLUMNS, source, layout)
    files = rows.cast_column(image, datasets.Image(decode=False))[image]
    label = next((c for c in LABEL_COLUMNS if c in rows.features), None)
    if label is None:
        text = _column(rows, TEXT_COLUMNS, source, layout)
        return Pictures(files, [], np.full(len(rows), -1), list(rows[text]), np.arange(len(rows)))
    labels = list(rows[label])
    classes = getattr(rows.features[label], "names", None)
    if classes is None:  # numbers or words without a list of names
        classes = sorted({str(v) for v in labels})
        labels = [classes.index(str(v)) for v in labels]
    return Pictures(files, list(classes), np.array(labels), [], np.arange(len(rows)))


def of_classes(found: Pictures, classes: Sequence[str], count: int, layout: str) -> Pictures:
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
        each = enough(len(rows), count // len(classes), f"images of class {name!r}")
        chosen.append(np.sort(rng.permutation(rows)[:each]))
        labels += [number] * each
    return replace(found.take(np.concatenate(chosen)), classes=list(classes), labels=np.array(labels))


# --- texts as sequences of tokens --------------------------------------------------------------------------


class Sequences(Dataset):
    """Rows of a file of tokens, each an example {"input_ids"}."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens  # (N, length) int32, on disk

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows([i])[0]}

    def rows(self, which: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self.tokens[np.asarray(which)], dtype=np.int64))


def texts(source: str, split: str, layout: str, stop: int | None = None, batch: int = 1000) -> Iterator[list]:
    """The texts of a split in their order, some at a time, empty ones included; at most `stop`."""
    rows = table(source, split, layout)
    column = _column(rows, TEXT_COLUMNS, source, layout)
    count = min(len(rows), stop or len(rows))
    for start in range(0, count, batch):
        yield list(rows[start : min(start + batch, count)][column])


def tokenizer_in(folder: Path | None, what: str) -> Any:
    import transformers

    if folder is None or not any((folder / name).exists() for name in TOKENIZER):
        raise UndeError(f"no tokenizer in {folder}: give --model FOLDER with {what}")
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def sequences(
    path: Path, texts: Iterable[list[str]], tokenizer: Any, length: int, count: int, what: str
) -> Sequences:
    """The first `count` sequences of the texts joined in their order; what is left over at the end is dropped."""
    if not path.exists():
        rest, made = np.empty(0, dtype=np.int32), 0
        with unfinished(path) as part:
            with part.open("wb") as file, console.progress(f"reading {what}", count) as advance:
                for some in texts:
                    full = [text for text in some if text]
                    found = tokenizer(full, verbose=False)["input_ids"] if full else []
                    rest = np.concatenate([rest, *(np.asarray(ids, dtype=np.int32) for ids in found)])
                    whole = min(len(rest) // length, count - made)
                    file.write(rest[: whole * length].tobytes())
                    rest, made = rest[whole * length :], made + whole
                    advance(whole)
                    if made == count:
                        break
            enough(made, count, f"sequences of {length} tokens in {what}")
    return Sequences(np.memmap(path, np.int32, "r").reshape(-1, length))
