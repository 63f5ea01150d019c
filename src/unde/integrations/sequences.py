"""Documents as sequences of tokens: cut, not truncated, so that every token of every document is somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from unde.errors import UndeError
from unde.integrations.documents import Document, Texts, called, read_documents

_AT_ONCE = 1000  # documents given to the tokenizer together
_SHORTEST = 3  # tokens; with two, a part of one token, with nothing to predict, could not be avoided


class Sequences(Dataset):
    """Consecutive sequences of at most `length` tokens, each an example {"input_ids"} with the id "document:part".

    Parts count from 1; the last ones may be shorter (see `cut`). Only the first part of a document begins with
    what the tokenizer puts at the start of a text.
    """

    def __init__(
        self,
        source: Texts,
        tokenizer: Any,
        length: int,
        rows: int,
        text_field: str = "text",
        option: str = "--text-field",
    ) -> None:
        """`rows` is how many tokens the model knows; the rest as in `read_documents`."""
        check_length(length)
        self.length, self.ids = length, list[str]()
        tokens, lengths = [], []
        for document, found in _tokenized(read_documents(source, text_field, option), tokenizer):
            _check(document, found, rows)
            cuts = cut(len(found), length)
            tokens.append(np.asarray(found, dtype=np.int32))
            lengths += cuts
            self.ids += [f"{document.name}:{part}" for part in range(1, len(cuts) + 1)]
        if not tokens:
            raise UndeError(f"{called(source)} holds no text: expected at least one")
        self.tokens = np.concatenate(tokens)
        self.stops = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start = self.stops[index - 1] if index else 0
        return {"input_ids": torch.from_numpy(self.tokens[start : self.stops[index]].astype(np.int64))}


def cut(count: int, length: int) -> list[int]:
    """How long the parts of a document are: whole ones, then a shorter rest.

    If the rest is less than half of a whole part, the last two parts share evenly. The gradient of a few tokens
    is large and says little, so that rests of a word or two would crowd out everything else.

    >>> cut(5, 8), cut(16, 8), cut(21, 8), cut(17, 8)
    ([5], [8, 8], [8, 8, 5], [8, 5, 4])
    """
    whole, rest = divmod(count, length)
    parts = [length] * whole + [rest] * (rest > 0)
    if whole and 0 < rest < length / 2:
        parts[-2:] = [(length + rest + 1) // 2, (length + rest) // 2]
    return parts


def _tokenized(documents: Iterator[Document], tokenizer: Any) -> Iterator[tuple[Document, list[int]]]:
    while some := list(islice(documents, _AT_ONCE)):
        found = tokenizer([d.text for d in some], return_attention_mask=False, verbose=False)["input_ids"]
        yield from zip(some, found)


def _check(document: Document, tokens: list[int], rows: int) -> None:
    if len(tokens) < 2:
        raise UndeError(
            f"{document.where}: {document.text[:20]!r} is {len(tokens)} token long, expected at least 2: there "
            "is nothing to predict. Leave such texts out"
        )
    check_known(document.where, tokens, rows)


def check_length(length: int) -> None:
    if length < _SHORTEST:
        raise UndeError(f"sequences of {length} tokens: expected at least {_SHORTEST} (--seq-len)")


def check_known(where: str, tokens: list[int], rows: int) -> None:
    """Raises unless a model of so many `rows`, one for each token, knows the tokens of a text."""
    if max(tokens) >= rows:
        raise UndeError(
            f"{where}: the tokenizer gives token {max(tokens)}, the model knows 0 to {rows - 1}. "
            "The tokenizer is not the model's"
        )


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The text of each token; together they are the text. Of a character that several tokens share, the last
    one has it, and the others have none."""

    def text(start: int, stop: int) -> str:
        return tokenizer.decode(tokens[start:stop], clean_up_tokenization_spaces=False)

    out: list[str] = []
    start = read = 0  # decoded from `start`, which is before `read`: a token alone can lose its leading space
    for stop in range(1, len(tokens) + 1):
        known, now = text(start, read), text(start, stop)
        whole = not now.endswith("\ufffd") or stop == len(tokens)  # else more bytes of a character may follow
        out.append(now[len(known) :] if whole else "")
        if whole:
            start, read = read, stop
    return out
