"""The manifest: one JSON file that says what an index holds and what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unde import projection
from unde.data import Rows, _feed
from unde.errors import UndeError
from unde.groups import Groups
from unde.tasks.base import Task

SCHEMA = 2
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
    factors: bool  # whether shards hold the covariances that EKFAC is made of
    given: str  # fingerprint of the matrices that are not drawn (pca, second moments), or ""

    @cached_property
    def id(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=16).hexdigest()

    @property
    def terms(self) -> int:
        """How many terms the sum over c has: checkpoints, or steps of a trajectory."""
        return len(self.checkpoint_weights)

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
    def shards(self) -> list[slice]:
        """The rows of each shard."""
        step = self.shard_size
        return [slice(a, min(a + step, self.examples)) for a in range(0, self.examples, step)]

    @property
    def unit_names(self) -> list[str]:
        return [u["name"] for u in self.units]

    def as_groups(self) -> Groups:
        return Groups({k: tuple(v) for k, v in self.groups.items()})

    def to_json(self) -> str:
        return json.dumps({"id": self.id} | asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / FILE
        if not path.exists():
            raise UndeError(
                f"{folder} holds no unde index: there is no {FILE} in it. Build one with Index.build"
            )
        try:
            fields = json.loads(path.read_text())
        except ValueError as e:
            raise _damaged(path, e) from None
        if not isinstance(fields, dict) or not {"schema", "id"} <= set(fields):
            raise UndeError(f"{path} is not the manifest of an unde index: choose another folder")
        if fields["schema"] != SCHEMA:
            raise UndeError(
                f"{folder} was written with index schema {fields['schema']}, this release reads {SCHEMA}: "
                "rebuild it, or install the release of unde that wrote it"
            )
        if fields.get("projection_version") != projection.VERSION:
            raise UndeError(
                f"{folder} was projected with version {fields.get('projection_version')} of the random "
                f"matrices, this release draws {projection.VERSION}: scores would be noise. Rebuild the index"
            )
        noted = fields.pop("id")
        try:
            manifest = cls(**fields)
        except TypeError as e:
            raise _damaged(path, e) from None
        if manifest.id != noted:
            raise _damaged(path, "its content does not match its id")
        return manifest


def _damaged(path: Path, why: object) -> UndeError:
    return UndeError(
        f"{path} is damaged ({why}): delete this file and run the same Index.build again, which keeps all "
        "sound shards"
    )


def differences(there: Manifest, asked: Manifest) -> list[str]:
    """What differs between an index on disk and one that is asked for, in words."""
    out = []
    for name, value in asdict(asked).items():
        old = getattr(there, name)
        same = json.dumps(old) == json.dumps(value)  # order counts: it is part of the id
        if same or (name == "data" and there.examples != asked.examples):
            continue
        if name == "models" and len(old) != len(value):
            out.append(f"the checkpoints ({len(old)} there, {len(value)} asked for)")
        elif name == "models":
            out.append("the model's weights (other values)")
        elif name == "data":
            out.append("the training data (same length, other content)")
        elif name == "ids":
            out.append("the ids" if old and value else f"the ids (there are {'some' if old else 'none'})")
        elif name in ("units", "groups"):
            out.append(f"the {'parameters' if name == 'units' else name} ({brief(old, value)})")
        elif name == "given":
            out.append("the directions of pca or the second moments (other values)")
        elif name == "factors":
            out.append(f"the covariances for EKFAC ({'some' if old else 'none'} there)")
        elif name == "examples":
            out.append(f"the length of the training data ({old} there, {value} given)")
        else:
            out.append(f"{name} ({old!r} there, {value!r} asked for)")
    return out


def brief(old: Any, new: Any) -> str:
    named = [{u["name"]: u for u in x} if isinstance(x, list) else x for x in (old, new)]
    lone = [n for n in [*named[0], *named[1]] if n not in named[0] or n not in named[1]]
    if lone:
        return f"{len(named[0])} there, {len(named[1])} asked for; e.g. {lone[0]!r} is in one only"
    other = [n for n in named[0] if named[0][n] != named[1][n]]
    return f"{other[0]!r} is not the same" if other else "in another order"


def model_fingerprint(state: Mapping[str, Tensor] | nn.Module) -> str:
    """A digest of all weights and buffers, by name."""
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    h = hashlib.sha256()
    for name in sorted(tensors):
        h.update(name.encode())
        _feed(h.update, tensors[name])
    return h.hexdigest()


def sampled(n: int) -> list[int]:
    """Up to 64 evenly spaced positions, the first and the last among them."""
    count = min(n, SAMPLED)
    return sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)})


def data_fingerprint(rows: Rows) -> str:
    """A digest of up to 64 evenly spaced examples; each is read twice, and must read the same."""
    where = sampled(len(rows))
    first, second = rows.digests(where), rows.digests(where)
    changed = [i for i, a, b in zip(where, first, second) if a != b]
    if changed:
        raise reads_differently(changed[0])
    return hashlib.blake2b(f"{len(rows)} {first}".encode(), digest_size=16).hexdigest()


def reads_differently(example: object) -> UndeError:
    return UndeError(
        f"example {example} reads differently a second time: features could not be matched to examples. "
        "Turn off random augmentation and shuffling"
    )


def task_name(task: Task) -> str:
    """The task's class and its plain settings."""
    plain = (str, int, float, bool, type(None))
    settings = [f"{k}={v!r}" for k, v in sorted(vars(task).items()) if isinstance(v, plain)]
    return f"{type(task).__name__}({', '.join(settings)})"


def plain_ids(ids: Iterable[Any]) -> list[str | int | float]:
    """The user's ids as JSON keeps them: strings and numbers."""
    out = [i.item() if hasattr(i, "item") else i for i in ids]
    odd = [i for i in out if not isinstance(i, (str, int, float))]
    if odd:
        raise UndeError(f"ids must be strings or numbers, but one is {odd[0]!r} ({type(odd[0]).__name__})")
    return out


def ids_fingerprint(ids: Sequence[Any] | None) -> str:
    if ids is None:
        return ""
    return hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=16).hexdigest()
