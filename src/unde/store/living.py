"""What became of an index since it was built: examples were appended, removed, or came from several indexes.

Files of shards stay what they are. A change writes new ones under numbers that nothing has, and the manifest says which
files, in which order, are the index: the moment in which it is replaced is the moment of the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unde.store.manifest_schema import SHARDS

APPEND, REMOVE, MERGE, REPACK = "append", "remove", "merge", "repack"
_PAST = ((APPEND, "appended"), (REMOVE, "removed"))
_NUMBERS = 10**9  # of files: as many as their names have room for


@dataclass(frozen=True)
class Piece:
    """Neighbouring shards that were written together, their files numbered one after the other."""

    owner: str  # whose the files are
    first: int  # the number of the first file
    rows: list[int]  # how many examples each has
    drawn: list[int]  # under which numbers they were measured, as runs: first, count, first, count, …


@dataclass(frozen=True)
class Living:
    """`origin` is the id that the index was built under: what was measured as it measures belongs to that."""

    origin: str
    built: int  # how many examples it was built on; pca directions are theirs
    generation: (
        int  # how often it was changed: files that belong to one state of it have the number in their name
    )
    pieces: list[Piece]
    history: list[dict[str, Any]]  # what was done, and when
    fisher: dict[str, Any] | None = field(
        default=None, repr=False
    )  # the manifest of the gradients with sampled labels
    true: dict[str, Any] | None = field(default=None, repr=False)  # the same of those with every label

    @classmethod
    def parsed(cls, found: Mapping[str, Any]) -> Living:
        fields: dict[str, Any] = {**found, "pieces": [Piece(**piece) for piece in found["pieces"]]}
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        out = {**vars(self), "pieces": [dict(vars(piece)) for piece in self.pieces]}
        return {k: v for k, v in out.items() if k != "true" or v is not None}

    @property
    def fishers(self) -> dict[str, dict[str, Any]]:
        """The manifests of gradients with other labels, by their kind."""
        found = {"sampled": self.fisher, "true": self.true}
        return {kind: manifest for kind, manifest in found.items() if manifest is not None}

    @property
    def cuts(self) -> list[slice]:
        """The rows of each shard."""
        out, start = [], 0
        for piece in self.pieces:
            for count in piece.rows:
                out.append(slice(start, start + count))
                start += count
        return out

    @property
    def files(self) -> list[tuple[int, str]]:
        """The number and the owner of the file of each shard."""
        return [(p.first + i, p.owner) for p in self.pieces for i in range(len(p.rows))]

    @property
    def drawn(self) -> Tensor:
        """(N,) the number under which each example was measured."""
        runs = (run for piece in self.pieces for run in pairs(piece.drawn))
        return torch.cat([torch.arange(first, first + count) for first, count in runs])

    @property
    def brief(self) -> str:
        """How many came and went."""
        merges = [f"merged from {_sources(entry)}" for entry in self.history if entry["what"] == MERGE]
        merges += [f"repacked from {entry['dtype']}" for entry in self.history if entry["what"] == REPACK]
        sums = ((word, sum(e["examples"] for e in self.history if e["what"] == what)) for what, word in _PAST)
        return ", ".join([*merges, *(f"{word} {count}" for word, count in sums if count)])

    @property
    def told(self) -> str:
        """The history in a line."""
        return "; ".join(told(entry) for entry in self.history)

    def check(self, examples: int, most: int, terms: int) -> None:
        """A ValueError if it cannot be that of an index of so many examples in shards of at most `most`."""
        if not self.pieces or not self.history or not _count(self.generation) or not _count(self.built):
            raise ValueError("it was changed, and it does not say how")
        counts = [n for piece in self.pieces for n in piece.rows]
        if not all(_count(n) and n <= most for n in counts) or sum(counts) != examples:
            raise ValueError(f"shards of {sum(n for n in counts if _count(n))} examples for {examples}")
        if len(counts) * terms > SHARDS:
            raise ValueError(f"{len(counts):,} shards under {terms} checkpoints are too many files")
        for piece in self.pieces:
            runs = list(pairs(piece.drawn))
            if not isinstance(piece.owner, str) or not all(_count(n) and _whole(at) for at, n in runs):
                raise ValueError("a piece is not of the right kind")
            if len(piece.drawn) % 2 or sum(n for _, n in runs) != sum(piece.rows):
                raise ValueError("a piece has numbers for more or fewer examples than it holds")
            if not _whole(piece.first) or piece.first + len(piece.rows) > _NUMBERS:
                raise ValueError(f"a file is numbered {piece.first}")
        if len({number for number, _ in self.files}) < len(counts):
            raise ValueError("two shards have one file")
        if not isinstance(self.origin, str) or not all(isinstance(entry, dict) for entry in self.history):
            raise ValueError("its history is not of the right kind")
        for entry in self.history:
            told(entry)


def told(entry: Mapping[str, Any]) -> str:
    """
    >>> told({"what": "remove", "examples": 3, "left": 97, "on": "2030-01-01"})
    'removed 3 on 2030-01-01, which left 97'
    """
    if entry["what"] == MERGE:
        return f"merged from {_sources(entry)} on {entry['on']}"
    if entry["what"] == REPACK:
        return f"repacked from {entry['dtype']}, {_sources(entry)}, on {entry['on']}"
    count, left = int(entry["examples"]), int(entry["left"])
    if entry["what"] == APPEND:
        return f"appended {count} on {entry['on']}, which made {left}"
    return f"removed {count} on {entry['on']}, which left {left}"


def _sources(entry: Mapping[str, Any]) -> str:
    return " and ".join(f"{int(n)} of {name}" for name, n in entry["from"])


def runs(numbers: Tensor) -> list[int]:
    """Numbers as runs of neighbours.

    >>> runs(torch.tensor([4, 5, 6, 9]))
    [4, 3, 9, 1]
    """
    starts = torch.cat([torch.zeros(1, dtype=torch.long), 1 + (numbers.diff() != 1).nonzero()[:, 0]])
    counts = torch.diff(starts, append=torch.tensor([len(numbers)]))
    return torch.stack([numbers[starts], counts], 1).flatten().tolist()


def pairs(flat: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(flat[::2], flat[1::2])


def _whole(n: Any) -> bool:
    return type(n) is int and 0 <= n <= 2**40


def _count(n: Any) -> bool:
    return type(n) is int and 1 <= n <= 2**40
