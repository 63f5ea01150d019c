"""Texts joined and cut into sequences of one length, as language models are pretrained on, kept as a file of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.scale.sources import enough
from experiments.shared.paths import unfinished
from unde import console
from unde.errors import UndeError

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
        """(n, length) of several positions."""
        return torch.from_numpy(np.asarray(self.tokens[np.asarray(which)], dtype=np.int64))


def tokenizer_in(folder: Path | None, what: str) -> Any:
    """The tokenizer of a local folder."""
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
