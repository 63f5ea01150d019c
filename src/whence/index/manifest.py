"""The manifest: one JSON file that says what an index holds and what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from whence import projection
from whence.data import Rows, _feed
from whence.errors import WhenceError
from whence.groups import Groups
from whence.tasks.base import Task

SCHEMA = 1
FILE = "manifest.json"
SAMPLED = 64  # examples whose content is compared before anything else is trusted


@dataclass(frozen=True)
class Manifest:
    schema: int
    projection_version: int
    method: dict[str, Any]
    task: str
    examples: int
    batch_size: int
    shard_size: int
    store_dtype: str
    seed: int
    on_bad: str
    units: list[dict[str, Any]]  # name, shape, size; in model order
    groups: dict[str, list[str]]
    models: list[str]  # a fingerprint for each checkpoint
    checkpoint_weights: list[float]
    data: str  # fingerprint of the sampled examples
    ids: str  # fingerprint of the user's ids, or ""

    @property
    def id(self) -> str:
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    @property
    def width(self) -> int:
        return sum(u["size"] for u in self.units)

    @property
    def columns(self) -> list[slice]:
        out, start = [], 0
        for u in self.units:
            out.append(slice(start, start + u["size"]))
            start += u["size"]
        return out

    @property
    def shards(self) -> list[range]:
        step = self.shard_size
        return [range(a, min(a + step, self.examples)) for a in range(0, self.examples, step)]

    @property
    def unit_names(self) -> list[str]:
        return [u["name"] for u in self.units]

    def as_groups(self) -> Groups:
        return Groups({k: tuple(v) for k, v in self.groups.items()})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / FILE
        if not path.exists():
            raise WhenceError(f"{folder} holds no whence index: there is no {FILE} in it. Build one with Index.build")
        try:
            fields = json.loads(path.read_text())
            schema = fields.get("schema")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as e:
            raise WhenceError(f"{path} is not a whence manifest ({e})") from None
        if schema != SCHEMA:
            raise WhenceError(
                f"{folder} was written with index schema {schema}, this version reads {SCHEMA}: rebuild it, or install "
                "the whence version that wrote it"
            )
        try:
            manifest = cls(**fields)
        except TypeError as e:
            raise WhenceError(f"{path} is damaged: {e}") from None
        if manifest.projection_version != projection.VERSION:
            raise WhenceError(
                f"{folder} was projected with version {manifest.projection_version} of the random matrices, this "
                f"version draws {projection.VERSION}: scores would be noise. Rebuild the index"
            )
        return manifest


def differences(there: Manifest, asked: Manifest) -> list[str]:
    """What differs between an index on disk and one that is asked for, in words."""
    words = {"models": "the model's weights", "data": "the training data", "ids": "the ids"}
    out = []
    for name, value in asdict(asked).items():
        old = getattr(there, name)
        if old == value:
            continue
        if name in words:
            out.append(f"{words[name]} (another content)")
        elif name in ("units", "groups"):
            out.append(f"the {name} ({_brief(old, value)})")
        else:
            out.append(f"{name} ({old!r} there, {value!r} asked for)")
    return out


def _brief(old: Any, new: Any) -> str:
    names = [[u["name"] for u in x] if isinstance(x, list) else list(x) for x in (old, new)]
    gone, added = [n for n in names[0] if n not in names[1]], [n for n in names[1] if n not in names[0]]
    if not gone and not added:
        return "same names, other sizes or members"
    return f"{len(names[0])} there, {len(names[1])} asked for; e.g. {(gone + added)[0]!r} is in one only"


def model_fingerprint(state: Mapping[str, Tensor] | nn.Module) -> str:
    """A digest of all weights and buffers, by name."""
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        h.update(name.encode())
        _feed(h.update, tensors[name])
    return h.hexdigest()


def sampled(n: int) -> list[int]:
    count = min(n, SAMPLED)
    return sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)})


def data_fingerprint(rows: Rows) -> str:
    """A digest of up to 64 evenly spaced examples; each is read twice, and must read the same."""
    where = sampled(len(rows))
    first, second = rows.digests(where), rows.digests(where)
    changed = [i for i, a, b in zip(where, first, second) if a != b]
    if changed:
        raise WhenceError(
            f"the data reads differently a second time (example {changed[0]}"
            + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
            + "): features could not be matched to examples. Turn off random augmentation and shuffling"
        )
    return hashlib.blake2b(f"{len(rows)} {first}".encode(), digest_size=16).hexdigest()


def task_name(task: Task) -> str:
    """The task's class and its plain settings."""
    plain = {k: v for k, v in sorted(vars(task).items()) if isinstance(v, (str, int, float, bool, type(None)))}
    return f"{type(task).__name__}({', '.join(f'{k}={v!r}' for k, v in plain.items())})"


def ids_fingerprint(ids: Iterable[Any] | None) -> str:
    if ids is None:
        return ""
    return hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=16).hexdigest()
