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
Parts = tuple[
    list[int], list[int], list[int]
]  # what the tokenizer puts before a text, the text, what it puts behind
_SHORTEST = 3  # tokens; with two, a part of one token, with nothing to predict, could not be avoided


class Sequences(Dataset):
    """Consecutive sequences of at most `length` tokens, each an example {"input_ids"} with the id "document:part".

    Parts count from 1; the last ones may be shorter (see `cut`). Only the first part of a document begins with
    what the tokenizer puts at the start of a text; if they are `framed`, every part is begun and ended as a text is,
    with the [CLS] and [SEP] of BERT for example.
    """

    def __init__(
        self,
        source: Texts,
        tokenizer: Any,
        length: int,
        rows: int,
        text_field: str = "text",
        option: str = "--text-field",
        framed: bool = False,
    ) -> None:
        """`rows` is how many tokens the model knows; the rest as in `read_documents`."""
        check_length(length)
        self.length, self.ids = length, list[str]()
        tokens, lengths = [], []
        documents = read_documents(source, text_field, option)
        for document, (before, found, behind) in _tokenized(documents, tokenizer, framed):
            _check(document, found, rows, 1 if framed else 2)
            room = length - len(before) - len(behind)
            if room < 1:
                raise UndeError(
                    f"sequences of {length} tokens have no room beside the {length - room} that begin and end each: "
                    "expected more (--seq-len)"
                )
            start = 0
            for part, size in enumerate(cut(len(found), room), 1):
                whole = [*before, *found[start : start + size], *behind]
                start += size
                tokens.append(np.asarray(whole, dtype=np.int32))
                lengths.append(len(whole))
                self.ids.append(f"{document.name}:{part}")
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


def _tokenized(
    documents: Iterator[Document], tokenizer: Any, framed: bool
) -> Iterator[tuple[Document, Parts]]:
    while some := list(islice(documents, _AT_ONCE)):
        how = {"return_attention_mask": False, "verbose": False}
        texts = [d.text for d in some]
        found = tokenizer(texts, **how)["input_ids"]
        if framed:
            bare = tokenizer(texts, add_special_tokens=False, **how)["input_ids"]
            yield from zip(some, map(_parted, some, found, bare))
        else:
            yield from ((document, ([], tokens, [])) for document, tokens in zip(some, found))


def _parted(document: Document, tokens: list[int], bare: list[int]) -> Parts:
    ahead = next((i for i in range(len(tokens) - len(bare) + 1) if tokens[i : i + len(bare)] == bare), None)
    if ahead is None:
        raise UndeError(
            f"{document.where}: the tokenizer reads the text otherwise when nothing is put around it, so it cannot be "
            "cut into parts"
        )
    return tokens[:ahead], bare, tokens[ahead + len(bare) :]


def _check(document: Document, tokens: list[int], rows: int, least: int) -> None:
    if len(tokens) < least:
        raise UndeError(
            f"{document.where}: {document.text[:20]!r} is {len(tokens)} token long, expected at least {least}: there "
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
