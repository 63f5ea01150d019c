"""Fingerprints of weights, examples and ids, and checks that they have not changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, feed, parts
from unde.errors import UndeError

SAMPLED = 64  # examples whose content is compared before anything else is trusted
LOOK_SECONDS = 5.0  # how long data is compared with what an index has seen; small data is compared whole
_HALF = re.compile("[\ud800-\udfff]")  # of a character, without the other half
_ENTRIES = 64  # of a tensor, that a quick look at a model reads


def model_fingerprint(state: Mapping[str, Tensor] | nn.Module) -> str:
    """A digest of all weights and buffers, by name."""
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    h = hashlib.sha256()
    for name in sorted(tensors):
        h.update(name.encode())
        feed(h.update, tensors[name])
    return h.hexdigest()


class ModelWatch:
    """Detects changes of a model or its checkpoints without reading all of it: by the version counters of tensors,
    some of their entries, and the size and time of files."""

    def __init__(
        self,
        model: nn.Module,
        checkpoints: Sequence[Mapping[str, Tensor] | str | PathLike[str]] | None = None,
    ) -> None:
        self.model, self.checkpoints = model, checkpoints
        self._state = self._read_state()

    def unchanged(self) -> bool:
        return self._read_state() == self._state

    def _read_state(self) -> list[tuple[Any, ...]]:
        tensors: list[tuple[Any, str, Tensor]] = [
            (where, name, part)
            for where, module in self.model.named_modules()  # one walk: it is most of the time
            for name, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
            for part in parts(t)
        ]
        files: list[tuple[Any, ...]] = []
        for c, checkpoint in enumerate(self.checkpoints or ()):
            if isinstance(checkpoint, Mapping):
                tensors += [(c, name, part) for name, t in checkpoint.items() for part in parts(t)]
            else:
                files.append((c, *_file_state(checkpoint)))
        seen = [(where, name, t.data_ptr(), t._version) for where, name, t in tensors]
        return [*files, *seen, *_some([t for _, _, t in tensors])]


def _file_state(path: str | PathLike[str]) -> tuple[int, int, int]:
    """Size, time of the last change, and inode; zeros where there is no file."""
    try:
        state = os.stat(os.path.expanduser(path))
    except OSError:
        return 0, 0, 0
    return state.st_size, state.st_mtime_ns, state.st_ino


def _some(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Some entries of each, in one copy from each device."""
    found = defaultdict[torch.device, list[Tensor]](list)
    for t in tensors:
        flat = t.detach().reshape(-1)
        found[t.device].append(flat[:: max(1, flat.numel() // _ENTRIES)].contiguous().view(torch.uint8))
    return [(place, torch.cat(some).cpu().numpy().tobytes()) for place, some in found.items()]


def data_fingerprint(rows: Rows) -> str:
    """A digest of up to 64 evenly spaced examples; each is read twice, and must read the same."""
    where = evenly(len(rows), SAMPLED)
    first, second = rows.digests(where), rows.digests(where)
    changed = [i for i, a, b in zip(where, first, second) if a != b]
    if changed:
        raise reads_differently(changed[0])
    return _of_sample(len(rows), first)


def fingerprint_of(digests: Tensor) -> str:
    """The same from the digests of all examples, as they are stored."""
    where = evenly(len(digests), SAMPLED)
    return _of_sample(len(digests), [to_digest(int(digests[i])) for i in where])


def _of_sample(count: int, digests: list[str]) -> str:
    return hashlib.blake2b(f"{count} {digests}".encode(), digest_size=16).hexdigest()


def reads_differently(example: object) -> UndeError:
    return UndeError(
        f"example {example} reads differently a second time: features could not be matched to examples. "
        "Turn off random augmentation and shuffling"
    )


def changed_example(rows: Rows, where: Tensor, digests: Tensor) -> int | None:
    """One of the examples `where` that no longer has its digest; looks at as many as time allows."""
    deadline = time.monotonic() + LOOK_SECONDS
    for count, at in enumerate(_spread(len(where))):
        i = int(where[at])
        if to_signed(rows.digests([i])[0]) != int(digests[at]):
            return i
        if count >= SAMPLED and time.monotonic() > deadline:
            break
    return None


def align_rows(rows: Rows, digests: Tensor) -> tuple[Rows | None, int]:
    """The examples that have these digests, in their order; None, and how many there are not, if some are missing."""
    places: dict[int, list[int]] = defaultdict(list)
    for i in reversed(range(len(rows))):
        places[to_signed(rows.digests([i])[0])].append(i)
    matches = [at for at in map(places.get, digests.tolist()) if at]
    if len(matches) < len(digests):
        return None, len(digests) - len(matches)
    return rows.subset([at[0] if len(at) == 1 else at.pop() for at in matches]), 0


def _spread(n: int) -> Iterator[int]:
    """0 … n − 1, each once, so that any first part of it is spread evenly over all."""
    step = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, n) > 1:
        step += 1
    return (i * step % n for i in range(n))


def length_now(rows: Rows) -> int:
    """How many examples the data has now, whatever it had when it was first looked at."""
    try:
        return len(Rows(rows.data, rows.collate))
    except UndeError:
        return 0


def to_signed(digest: str) -> int:
    value = int(digest, 16)
    return value - (1 << 64) if value >= 1 << 63 else value


def to_signed_tensor(digests: Iterable[str]) -> Tensor:
    return torch.tensor([to_signed(d) for d in digests], dtype=torch.int64)


def to_digest(signed: int) -> str:
    """
    >>> to_digest(to_signed("ff00000000000001"))
    'ff00000000000001'
    """
    return f"{signed % (1 << 64):016x}"


def origins(digests: Iterable[str]) -> list[str]:
    """The examples that queries stand for, one or, after `mean` and `-`, several each.

    >>> origins(["a", "b+c"])
    ['a', 'b', 'c']
    """
    return [part for digest in digests for part in digest.split("+")]


def plain_ids(ids: Iterable[Any]) -> list[str | int | float]:
    """The user's ids as JSON keeps them: strings and numbers."""
    out = [i.item() if hasattr(i, "item") else i for i in ids]
    if odd := [i for i in out if not isinstance(i, (str, int, float))]:
        raise UndeError(f"ids must be strings or numbers, but one is {odd[0]!r} ({type(odd[0]).__name__})")
    if broken := [i for i in out if isinstance(i, str) and _HALF.search(i)]:
        raise UndeError(f"the id {broken[0]!r} holds half of a character, which no file can keep: mend it")
    return out


def ids_fingerprint(ids: Sequence[Any] | None) -> str:
    if ids is None:
        return ""
    return hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=16).hexdigest()
