"""Results of other libraries as scores: what kronfluence, dattri and bergson computed, for weights and evaluation.

Everywhere here a positive score is a proponent: training on it lowers the loss of the query. All three multiply the
gradient of something at the query with that of the training loss, so that is their sign too as long as the something is
a loss. Of a margin, a log-probability or another `target="utility"`, where higher is better, scores change their sign.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unde.data import parse_bytes, to_numpy
from unde.errors import UndeError, explain, unknown
from unde.groups import Groups
from unde.methods import TracIn
from unde.scoring import ArrayScores, GroupScores, TrainFeatures, from_arrays
from unde.store.files import read_json

Names = Sequence[Any] | None
File = str | os.PathLike[str]
_PAIRWISE = "pairwise_scores.safetensors"
_ALL = "all_modules"
_TARGETS = {"loss": 1.0, "utility": -1.0}
_TYPES = ("float16", "float32", "float64", "bfloat16")  # of gradients
_AT_ONCE = 32  # of the memory budget a block of gradients may take one in so many


def kronfluence(
    scores: File | Mapping[str, Any], *, target: str = "loss", ids: Names = None, query_ids: Names = None
) -> ArrayScores:
    """Pairwise scores of kronfluence: the folder `scores_NAME` or its file, or what `load_pairwise_scores` gave.

    With `ScoreArguments(compute_per_module_scores=True)` every module is a group. Scores of single tokens are added up.
    `target` is what `compute_measurement` returns: "loss", or "utility" if higher is better.
    """
    tensors = scores if isinstance(scores, Mapping) else _safetensors(Path(scores).expanduser())
    if not tensors:
        raise UndeError(
            "there are no scores of kronfluence: expected a tensor for each module, or 'all_modules'"
        )
    parts = {name: _sum_tokens(name, values) for name, values in tensors.items()}
    return _by_module(parts, "kronfluence", target, ids, query_ids)


def dattri(
    scores: Any | Mapping[str, Any], *, target: str = "loss", ids: Names = None, query_ids: Names = None
) -> ArrayScores:
    """What `attribute` of a dattri attributor gave: (N, Q), training examples first, so it is transposed here.

    {layer: scores}, of attributors with `layer_name=` one layer each, makes every layer a group. `target` is what
    `target_func` of the `AttributionTask` returns, `loss_func` unless it was given: "loss", or "utility" if higher is
    better while `loss_func` is a loss. With one function for both sides, as for TRAK, scores stay as they are: "loss".
    """
    parts = {}
    for name, values in (scores if isinstance(scores, Mapping) else {_ALL: scores}).items():
        array = to_numpy(values)
        if array.ndim != 2:
            raise UndeError(
                f"scores of dattri have shape {array.shape}: expected (training examples, queries), as "
                "`attribute` gives"
            )
        parts[str(name)] = array.T
    return _by_module(parts, "dattri", target, ids, query_ids)


def bergson(
    path: File,
    queries: File | None = None,
    *,
    target: str = "loss",
    ids: Names = None,
    query_ids: Names = None,
    memory: int | str = "1GB",
) -> ArrayScores | GroupScores:
    """What bergson wrote: the folder of `bergson score`, or two of `bergson build`, of training examples and `queries`.

    Scores are taken as they are, one group; those of single tokens are added up. Of two folders of gradients the scores
    are inner products, module by module: every module is a group that weights can be learned for. They are read in
    blocks, within `memory`.
    """
    folder = Path(path).expanduser()
    info, sign = _info(folder), _sign(target)
    if queries is None:
        if "num_scores" not in info:
            raise UndeError(
                f"{folder} holds gradients, no scores: give those of the queries too, "
                f"bergson({str(path)!r}, 'runs/queries')"
            )
        return from_arrays(sign * _scores(folder, info).T, ids=ids, query_ids=query_ids, name="bergson")
    train, query = _Gradients.open(folder, info), _Gradients.open(Path(queries).expanduser())
    if train.sizes != query.sizes:
        raise UndeError(
            f"{folder} and {queries} hold gradients of other modules or projections ({len(train.sizes)} modules of "
            f"{train.width} numbers, {len(query.sizes)} of {query.width}): build both with the same options"
        )
    for what, names, count in (("ids", ids, len(train)), ("query_ids", query_ids, len(query))):
        if names is not None and len(names) != count:
            raise UndeError(f"{len(names)} {what}, the gradients are of {count}: expected one for each")
    features = _BergsonFeatures(train, ids, parse_bytes(memory))
    gradients = sign * query.block(slice(0, len(query)))
    digests = [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in gradients.numpy()]
    groups = Groups({name: (name,) for name in train.sizes})
    provenance = {"method": {"name": "bergson"}}
    return GroupScores(
        features,
        gradients[None],
        TracIn(),
        groups,
        digests,
        provenance,
        parse_bytes(memory),
        query_ids=query_ids,
    )


# --- scores by module -----------------------------------------------------------------------------------


def _by_module(
    parts: Mapping[str, np.ndarray], name: str, target: str, ids: Names, query_ids: Names
) -> ArrayScores:
    shapes = {part: values.shape for part, values in parts.items()}
    if len(set(shapes.values())) > 1:
        raise UndeError(
            f"scores of different shapes {shapes}: expected the same queries and training examples in all"
        )
    alone = list(parts) == [_ALL]
    whole = _sign(target) * (
        parts[_ALL] if alone else np.stack(list(parts.values()), 2)
    )  # (Q, N) or (Q, N, M)
    groups = None if alone else list(parts)
    return from_arrays(whole, groups=groups, ids=ids, query_ids=query_ids, name=name)


def _safetensors(path: Path) -> dict[str, Tensor]:
    file = path / _PAIRWISE if path.is_dir() else path
    if not file.is_file():
        raise UndeError(
            f"no file {file}: expected the folder scores_NAME that kronfluence wrote, with {_PAIRWISE} in it "
            "(partitions are put together by its aggregate_pairwise_scores)"
        )
    with explain(f"cannot read {file} as scores of kronfluence ({{e}})", SafetensorError, OSError):
        return load_file(file)


def _sum_tokens(name: str, values: Any) -> np.ndarray:
    array = to_numpy(values).astype(np.float32)
    if array.ndim not in (2, 3):
        raise UndeError(
            f"scores of {name!r} have shape {array.shape}: expected (queries, training examples), or with tokens as a "
            "third axis. Self-influence has no queries"
        )
    return array if array.ndim == 2 else array.sum(2)


def _sign(target: str) -> float:
    if target not in _TARGETS:
        raise unknown("target", target, _TARGETS)
    return _TARGETS[target]


# --- files of bergson -----------------------------------------------------------------------------------


def _info(folder: Path) -> dict[str, Any]:
    with (
        explain(f"cannot read {folder / 'info.json'} ({{e}})", OSError, ValueError),
        explain(f"{folder} holds no info.json: expected a folder that bergson wrote", FileNotFoundError),
    ):
        found = read_json(folder / "info.json", follow=True)
    if not isinstance(found, dict) or not {"num_scores", "grad_sizes"} & set(found):
        raise UndeError(
            f"{folder / 'info.json'} names neither scores nor gradients: expected one that bergson wrote"
        )
    return found


def _map_file(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    with explain(f"cannot read {file} ({{why}})", OSError):
        size = file.stat().st_size
    need = dtype.itemsize * int(np.prod(shape))
    if size != need or not need:
        raise UndeError(f"{file} has {size:,} bytes, its info.json tells of {need:,}: is it finished?")
    return np.memmap(file, dtype, "r", shape=shape)


def _scores(folder: Path, info: Mapping[str, Any]) -> np.ndarray:
    """(N, Q) in float32, once all are known to be written."""
    message = f"{folder / 'info.json'} does not describe scores as bergson does ({{e}})"
    with explain(message, KeyError, TypeError, ValueError):
        dtype, rows, count = _struct(info["dtype"]), int(info["num_rows"]), int(info["num_scores"])
        found = _map_file(folder / "scores.bin", dtype, (rows,))
        out = np.empty((rows, count), np.float32)
        for q in range(count):
            if not found[f"written_{q}"].all():
                missing = int(np.argmin(found[f"written_{q}"]))
                raise UndeError(
                    f"{folder} is not finished: the score of query {q} with row {missing} is not written. Run "
                    "bergson again"
                )
            out[:, q] = _as_float(found[f"score_{q}"], info["dtype"]["formats"][0]).numpy()
    if not info.get("attribute_tokens"):
        return out
    return _sum_rows(torch.from_numpy(out), _offsets(folder, rows), 0, int(info["num_items"])).numpy()


def _struct(described: Mapping[str, Any]) -> np.dtype:
    """The type of a row; numpy knows no bfloat16, which is read as it is stored."""
    formats = ["uint16" if f == "bfloat16" else f for f in described["formats"]]
    names = {"names": described["names"], "formats": formats, "offsets": described["offsets"]}
    return np.dtype(names | {"itemsize": described["itemsize"]})


def _as_float(values: np.ndarray, stored: str) -> Tensor:
    if stored == "bfloat16":
        return torch.from_numpy(np.array(values).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _offsets(folder: Path, rows: int) -> np.ndarray:
    """Where the tokens of each example begin, and the last ones end."""
    message = f"cannot read {folder / 'offsets.npy'}, which says whose the tokens are ({{e}})"
    with explain(message, OSError, ValueError):
        found = np.load(folder / "offsets.npy", allow_pickle=False)
    if found.ndim != 1 or not len(found) or found[0] != 0 or found[-1] != rows or (np.diff(found) < 0).any():
        raise UndeError(
            f"{folder / 'offsets.npy'} does not divide {rows} tokens into examples: build it again"
        )
    return found


def _sum_rows(rows: Tensor, offsets: np.ndarray, first: int, count: int) -> Tensor:
    """The rows of tokens of `count` examples from `first` on, added up for each."""
    of = torch.repeat_interleave(
        torch.arange(count), torch.from_numpy(np.diff(offsets[first : first + count + 1]))
    )
    return torch.zeros(count, *rows.shape[1:], dtype=torch.float64).index_add_(0, of, rows.double()).float()


@dataclass(frozen=True)
class _Gradients:
    """A folder of `bergson build`."""

    folder: Path
    rows: np.ndarray  # (rows, D) as they are stored, of examples or of tokens
    stored: str
    sizes: dict[str, int]  # of each module
    offsets: np.ndarray | None

    @classmethod
    def open(cls, folder: Path, info: dict[str, Any] | None = None) -> _Gradients:
        info = _info(folder) if info is None else info
        sizes, stored = info.get("grad_sizes"), info.get("base_dtype")
        good = isinstance(sizes, dict) and sizes and all(type(n) is int and n > 0 for n in sizes.values())
        if not good or stored not in _TYPES or type(info.get("num_grads")) is not int:
            raise UndeError(
                f"{folder / 'info.json'} does not describe gradients as bergson 2 does: expected num_grads, grad_sizes "
                f"and base_dtype, one of {', '.join(_TYPES)}"
            )
        shape = (info["num_grads"], sum(sizes.values()))
        dtype = np.dtype("uint16" if stored == "bfloat16" else stored)
        rows = _map_file(folder / "gradients.bin", dtype, shape)
        return cls(
            folder, rows, stored, sizes, _offsets(folder, len(rows)) if info.get("attribute_tokens") else None
        )

    def __len__(self) -> int:
        return len(self.rows) if self.offsets is None else len(self.offsets) - 1

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @cached_property
    def columns(self) -> list[slice]:
        ends = np.cumsum(list(self.sizes.values())).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes.values())]

    def block(self, examples: slice) -> Tensor:
        """(n, D) float32."""
        offsets = self.offsets
        rows = examples if offsets is None else slice(offsets[examples.start], offsets[examples.stop])
        block = _as_float(self.rows[rows], self.stored)
        if offsets is not None:
            block = _sum_rows(block, offsets, examples.start, examples.stop - examples.start)
        if not torch.stack(torch.aminmax(block)).isfinite().all():
            row = examples.start + int((~block.isfinite()).any(1).nonzero()[0, 0])
            raise UndeError(
                f"{self.folder} holds gradients that are NaN or infinite, the first of example {row}"
            )
        return block


class _BergsonFeatures(TrainFeatures):
    """Gradients that bergson stored, as training features."""

    def __init__(self, gradients: _Gradients, ids: Names, memory: int) -> None:
        step = max(1, memory // (4 * _AT_ONCE * gradients.width))
        self.gradients, self.ids = gradients, ids
        self.units, self.columns, self.checkpoint_weights = list(gradients.sizes), gradients.columns, [1.0]
        self.cuts = [slice(a, min(a + step, len(gradients))) for a in range(0, len(gradients), step)]

    def block(self, s: int) -> list[Tensor]:
        return [self.gradients.block(self.cuts[s])]
