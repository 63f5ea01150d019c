"""Where the data of a setting comes from: a local folder, or a data set of the `datasets` library if one is named.

Nothing is downloaded unless a name is passed. Folders are read by the same library, which also finds the splits:

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
from unde.errors import UndeError

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
        try:
            with Image.open(io.BytesIO(file["bytes"]) if file["bytes"] else file["path"]) as image:
                square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
        except OSError as e:
            raise UndeError(f"cannot read an image ({e})") from e
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


# --- images -----------------------------------------------------------------------------------------------


def pictures(source: Source, split: str, layout: str) -> Pictures:
    """The images of a split; `layout` says in the error message what the setting wants."""
    import datasets

    rows = table(source, split, layout)
    image = _column(rows.features, IMAGE_COLUMNS, source, layout)
    files = rows.cast_column(image, datasets.Image(decode=False))[image]
    label = next((c for c in LABEL_COLUMNS if c in rows.features), None)
    if label is None:
        text = _column(rows.features, TEXT_COLUMNS, source, layout)
        return Pictures(files, [], np.full(len(rows), -1), list(rows[text]), np.arange(len(rows)))
    labels = list(rows[label])
    classes = getattr(rows.features[label], "names", None)
    if classes is None:  # numbers or words without a list of names
        classes = sorted({str(v) for v in labels})
        labels = [classes.index(str(v)) for v in labels]
    return Pictures(files, list(classes), np.array(labels), [], np.arange(len(rows)))


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
    return replace(taken, classes=list(classes), labels=np.array(labels))


# --- tables and texts -------------------------------------------------------------------------------------


def table(source: Source, split: str, layout: str) -> Any:
    import datasets

    folder = source.folder
    if folder is None and source.dataset is None:
        raise UndeError(f"nothing to read: give --data FOLDER (or --dataset NAME) with {layout}")
    if folder is not None and not folder.is_dir():
        raise UndeError(f"no folder {folder}: expected {layout}")
    try:
        if folder is None:
            name, _, config = str(source.dataset).partition(":")
            return datasets.load_dataset(name, config or None, split=split)
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            found = datasets.load_from_disk(str(folder))
            return found[split] if isinstance(found, dict) else found
        return datasets.load_dataset(str(folder), split=split)
    except Exception as e:  # whatever a foreign file or a missing network leads to
        why = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
        raise UndeError(
            f"cannot read the {split} split of {source} ({type(e).__name__}: {why}): expected {layout}"
        ) from e


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


# --- texts as sequences of tokens --------------------------------------------------------------------------

TOKENIZER = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")


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


def tokenizer_in(folder: Path | None, what: str) -> Any:
    import transformers

    if folder is None:
        raise UndeError(f"no tokenizer: give --model FOLDER, {what}")
    if not folder.is_dir() or not any((folder / name).exists() for name in TOKENIZER):
        raise UndeError(f"{folder} holds no tokenizer ({' or '.join(TOKENIZER[:2])}): expected {what}")
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def sequences(
    path: Path, texts: Iterable[list[str]], tokenizer: Any, length: int, count: int, fewer: bool, what: str
) -> Sequences:
    """The first `count` sequences of the texts joined in their order; what is left over at the end is dropped."""
    if not path.exists():
        made = 0
        with unfinished(path) as part:
            with part.open("wb") as file, console.progress(f"reading {what}", count) as advance:
                for block in _blocks(texts, tokenizer, length):
                    block = block[: count - made]
                    file.write(block.tobytes())
                    made += len(block)
                    advance(len(block))
                    if made == count:
                        break
            enough(made, count, f"sequences of {length} tokens in {what}", fewer)
    tokens = np.memmap(path, np.int32, "r")
    if len(tokens) % length or len(tokens) // length > count:
        raise UndeError(f"{path} was made for sequences of another length or number: delete it")
    enough(len(tokens) // length, count, f"sequences of {length} tokens in {path}", fewer)
    return Sequences(tokens.reshape(-1, length))


def _blocks(texts: Iterable[list[str]], tokenizer: Any, length: int) -> Iterator[np.ndarray]:
    """(n, length) int32, with what is left over going into the next block."""
    rest = np.empty(0, dtype=np.int32)
    for some in texts:
        full = [text for text in some if text]
        if not full:
            continue
        found = tokenizer(full, return_attention_mask=False, verbose=False)["input_ids"]
        line = np.concatenate([rest, *(np.asarray(ids, dtype=np.int32) for ids in found)])
        whole = len(line) // length
        yield line[: whole * length].reshape(whole, length)
        rest = line[whole * length :]
