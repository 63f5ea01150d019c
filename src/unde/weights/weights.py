"""Learned weights: one number for each parameter group, their provenance, and their file format."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unde.default_device import host_default
from unde.errors import UndeError, explain
from unde.markup import bars
from unde.store.files import read_json, write_atomically
from unde.store.layout import DAMAGED, VerifyReport
from unde.store.remote import StorePath, Unreachable, exists, place

_FORMAT = "unde weights"
_VERSION = 1
_NAMED = 8  # groups in a message


@dataclass(frozen=True, eq=False, repr=False)
class Weights:
    """How much each parameter group counts: non-negative numbers of mean one.

    Only ratios of weights matter to a ranking, so values on another scale are brought to mean one.
    Uniform weights are then all ones and leave scores exactly as they are.

    Args:
        values: (M,) numbers: finite, non-negative, not all zero.
        groups: The M group names, all different.
        query_digests: Digests of the queries that the weights were learned from; weights are refused on them.
        provenance: Method, data, k, loss, solver, objective and so on; saved with the weights.

    Raises:
        UndeError: If values and groups do not fit together, or values are not weights.

    Example:
        >>> w = Weights(torch.tensor([1.0, 3.0]), ["body", "head"])
        >>> w.values
        tensor([0.5000, 1.5000])
        >>> w
        Weights(2 groups, from 0.5 to 1.5, largest: 'head')
    """

    values: Tensor  # (M,) float32
    groups: list[str]
    query_digests: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    @host_default
    def __post_init__(self) -> None:
        values = torch.as_tensor(self.values, dtype=torch.float64).detach().cpu()
        groups = list(self.groups)
        if values.ndim != 1 or len(values) != len(groups) or not groups:
            raise UndeError(
                f"weights of shape {tuple(values.shape)} for {len(groups)} group names: expected one number "
                "for each group, and at least one group"
            )
        twice = sorted(name for name, count in Counter(groups).items() if count > 1)
        if twice:
            raise UndeError(f"group names must differ, but these occur more than once: {_join_names(twice)}")
        bad = [name for name, good in zip(groups, (values.isfinite() & (values >= 0)).tolist()) if not good]
        if bad or not values.any():
            what = f"these are not: {_join_names(bad)}" if bad else "all are zero"
            raise UndeError(f"weights must be finite, non-negative and not all zero, but {what}")
        object.__setattr__(self, "values", _scale_to_mean_one(values).float())
        object.__setattr__(self, "groups", groups)

    @classmethod
    def uniform(cls, groups: Sequence[str]) -> Weights:
        """All ones: the unweighted method.

        Example:
            >>> Weights.uniform(["body", "head"]).values
            tensor([1., 1.])
        """
        return cls(torch.ones(len(groups)), list(groups))

    def aligned_to(self, groups: Sequence[str]) -> Tensor:
        """Order the values as `groups`, the names of another index.

        Args:
            groups: The same names as `self.groups`, in any order.

        Returns:
            (M,) values.

        Raises:
            UndeError: If names are missing or superfluous.

        Example:
            >>> Weights(torch.tensor([0.5, 1.5]), ["body", "head"]).aligned_to(["head", "body"])
            tensor([1.5000, 0.5000])
        """
        value_of = dict(zip(self.groups, self.values.tolist()))
        missing = [name for name in groups if name not in value_of]
        superfluous = sorted(set(self.groups) - set(groups))
        if missing or superfluous:
            complaints = [f"no weight for {_join_names(missing)}"] if missing else []
            complaints += [f"weights for unknown groups {_join_names(superfluous)}"] if superfluous else []
            raise UndeError(
                f"weights do not match the groups: {'; '.join(complaints)}. Expected the same {len(groups)} "
                "names: learn weights on this index, or group it as the one they were learned on"
            )
        return torch.tensor([value_of[name] for name in groups])

    def table(self, rows: int = 10) -> str:
        """Format the largest weights, one to a line, with a bar.

        Example:
            >>> print(Weights(torch.tensor([0.5, 1.5]), ["body", "head"]).table())
            head  1.500  ####################
            body  0.500  #######
        """
        largest = sorted(zip(self.values.tolist(), self.groups), key=lambda item: -item[0])[:rows]
        width, top = max(len(name) for _, name in largest), largest[0][0]
        lines = [
            f"{name:<{width}}  {value:.3f}  {'#' * round(20 * value / top)}".rstrip()
            for value, name in largest
        ]
        rest = len(self.groups) - len(largest)
        return "\n".join([*lines, f"… and {rest} more groups"] if rest else lines)

    def save(self, path: str | os.PathLike[str] | StorePath) -> None:
        """Write a readable JSON file; an interrupted write leaves an older file intact.

        Args:
            path: A path or fsspec URL.

        Raises:
            UndeError: If the file cannot be written.

        Example:
            >>> import os, tempfile
            >>> file = os.path.join(tempfile.mkdtemp(), "w.json")
            >>> Weights.uniform(["body", "head"]).save(file)
            >>> Weights.load(file)
            Weights(2 groups, from 1 to 1, largest: 'body')
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "weights": dict(zip(self.groups, self.values.tolist())),
            "provenance": self.provenance,
            "query_digests": self.query_digests,
        }
        content["checksum"] = _checksum(content)
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        message = (
            f"cannot write weights to '{path}' ({{why}}): expected a file in a folder that is there and has room. "
            "No half-written file is left: save them again"
        )
        with explain(message, OSError):
            write_atomically(place(path), text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str] | StorePath) -> Weights:
        """Read a file that `save` wrote.

        Args:
            path: A path or fsspec URL.

        Returns:
            The weights.

        Raises:
            UndeError: If the file is missing, damaged, or of another version.

        >>> Weights.load("w.json").values  # doctest: +SKIP
        """
        with (
            explain(f"'{path}' is not a whole JSON file ({{e}}): learn and save it again", ValueError),
            explain(f"cannot read '{path}' ({{why}}): expected a file written by Weights.save", OSError),
            explain(
                f"no weights file at '{path}': expected a file written by Weights.save", FileNotFoundError
            ),
        ):
            content = read_json(place(path), follow=True)
        if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
            raise UndeError(f"'{path}' does not hold weights: expected a file written by Weights.save")
        if content.get("version") != _VERSION:
            raise UndeError(
                f"'{path}' has version {content.get('version')!r} of the weights file, this release reads "
                f"version {_VERSION}: use the release that wrote it, or learn and save it again"
            )
        # Users may delete the checksum of a file that they edited.
        if "checksum" in content and content["checksum"] != _checksum(content):
            raise UndeError(
                f"'{path}' is damaged or was changed: its content does not match its checksum. Learn and save it "
                "again, or delete its 'checksum' to use it as it is"
            )
        return _from_content(cls, content, path)

    def __len__(self) -> int:
        return len(self.groups)

    def __repr__(self) -> str:
        low, high = self.values.min().item(), self.values.max().item()
        largest = self.groups[int(self.values.argmax())]
        return f"Weights({len(self)} groups, from {low:.3g} to {high:.3g}, largest: {largest!r})"

    def _repr_html_(self) -> str:
        title = f"Weights of {len(self):,} groups" + (", uniform" if bool((self.values == 1).all()) else "")
        return bars(title, dict(zip(self.groups, self.values.tolist())), "1 is the unweighted method")


def verify(path: StorePath) -> VerifyReport:
    """Check a weights file against its checksum."""
    report = VerifyReport(path, "weights")
    if not exists(path):
        raise UndeError(f"no weights file at '{path}': expected a file written by Weights.save")
    try:
        Weights.load(path)
        report.count(path)
    except Unreachable:
        raise
    except UndeError as e:
        why = str(e).removeprefix(f"'{path}' is damaged")
        report.report(path, DAMAGED, why, "learn and save them again")
    return report


def _scale_to_mean_one(values: Tensor) -> Tensor:
    """Values of mean one to the accuracy of float32 are left alone, so that a file reads back exactly."""
    if abs(values.mean() - 1) < 1e-6:
        return values
    values = values / values.max()  # the mean of numbers near the end of the range may overflow
    return values / values.mean()


def _checksum(content: Mapping[str, Any]) -> str:
    signed = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(signed).encode()).hexdigest()


def _from_content(cls: type[Weights], content: Mapping[str, Any], path: object) -> Weights:
    weights, digests = content.get("weights"), content.get("query_digests")
    provenance = content.get("provenance")
    numbers = isinstance(weights, dict) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in weights.values()
    )
    if not numbers or not isinstance(digests, list) or not isinstance(provenance, dict):
        raise UndeError(
            f"'{path}' is damaged: expected 'weights' (group name to number), 'provenance' (an object) and "
            "'query_digests' (a list). Learn and save it again"
        )
    with explain(f"'{path}' is damaged: {{e}}", UndeError, OverflowError):
        values = torch.tensor([float(v) for v in weights.values()], dtype=torch.float64)
        return cls(values, list(weights), digests, provenance)


def _join_names(names: Sequence[str]) -> str:
    first = ", ".join(map(repr, names[:_NAMED]))
    return first if len(names) <= _NAMED else f"{first} and {len(names) - _NAMED} more"
