"""While a bank is being filled: a folder with its plan, and a file for each model that is finished.

plan.json                what is trained
model-00000.safetensors  what is kept of a model, with a checksum, its plan and its number
.lock                    held by who fills it
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unde.errors import UndeError
from unde.evaluate.bank.subsets import described
from unde.store.files import clear_partial, create_bytes
from unde.store.layout import LOCK
from unde.store.locks import locked
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.safe_io import read_json
from unde.store.shards import read_shard, write_shard

FORMAT = "unde bank 2"
OLD_FORMATS = ("unde bank 1", "whence bank 1")  # the package was called whence until 0.1
UTILITY = "utility/"
PARTS, _PLAN, _PART = ".parts", "plan.json", re.compile(r"model-(\d{5,})\.safetensors")
_OURS = re.compile(r"\.lock|plan\.json|model-\d{5,}\.safetensors|(plan\.json|model-).*\.partial")


@dataclass(frozen=True, eq=False)
class Part:
    """What is kept of one retrained model."""

    utility: dict[str, np.ndarray]  # name → (Q,)
    seconds: float
    environment: str  # JSON: versions and machine

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: values.shape for name, values in self.utility.items()}


@dataclass(frozen=True)
class Parts:
    """The models that are finished; `owner` stands for the plan that they belong to."""

    path: StorePath
    owner: str

    def write(self, number: int, part: Part) -> None:
        tensors = {UTILITY + name: torch.from_numpy(values) for name, values in part.utility.items()}
        tensors["seconds"] = torch.tensor(part.seconds, dtype=torch.float64)
        tensors["environment"] = torch.tensor(list(part.environment.encode()), dtype=torch.uint8)
        write_shard(self.file(number), self.owner, tensors)

    def read(self, number: int) -> Part | None:
        """The part, or None if it is not there, not whole, or of another model."""
        file = self.file(number)
        try:
            # Copied, since the tensors are views of the file.
            found = {name: tensor.numpy().copy() for name, tensor in read_shard(file, self.owner).items()}
            return _checked_part({**found, "environment": np.array(found["environment"].tobytes().decode())})
        except Unreachable:
            raise
        except (ValueError, KeyError, TypeError, OSError):
            return None

    def count(self) -> int:
        """How many models have a file."""
        return len({match[1] for file in self.path.iterdir() if (match := _PART.fullmatch(file.name))})

    def files(self) -> list[tuple[int, StorePath]]:
        """The files of models, by number."""
        found = [(match, file) for file in self.path.iterdir() if (match := _PART.fullmatch(file.name))]
        return sorted(
            ((int(match[1]), file) for match, file in found), key=lambda part: (part[0], str(part[1]))
        )

    def file(self, number: int) -> StorePath:
        return self.path / f"model-{number:05d}.safetensors"


class PartsFolder:
    """`<bank>.parts`."""

    def __init__(self, bank: StorePath) -> None:
        self.path = bank.with_name(bank.name + PARTS)
        self.plan = self.path / _PLAN

    @contextmanager
    def held(self, config: Mapping[str, Any]) -> Generator[Parts]:
        """The parts of this plan, for one run at a time."""
        with ExitStack() as stack:
            try:
                self._prepare()
                stack.enter_context(locked(self.path, doing="filling"))
                if not self.begun:
                    text = json.dumps({"format": FORMAT, "plan": dict(config)}, indent=1)
                    create_bytes(self.plan, text.encode())
            except UndeError:
                raise
            except OSError as e:
                raise UndeError(
                    f"cannot keep models in {self.path} ({e.strerror}): choose a path for the bank in a folder that "
                    "can be written to"
                ) from e
            there = self._read_plan()
            refuse_other_plan(there, config, self.path)
            yield Parts(self.path, _owner(config))

    @property
    def begun(self) -> bool:
        return exists(self.plan)

    def progress(self) -> tuple[int, int]:
        """How many models are there, and how many there will be."""
        parts, config = self.kept()
        return parts.count(), described(config).models

    def kept(self) -> tuple[Parts, dict[str, Any]]:
        """The parts as they are, for who looks at them alone, and the plan that they belong to."""
        config = self._read_plan()
        return Parts(self.path, _owner(config)), config

    def remove(self, config: Mapping[str, Any]) -> None:
        """Once the bank of this plan is one file: what a bank has written, and no other plan's."""
        with suppress(OSError, UndeError):
            if self.begun:
                if self._read_plan() != dict(config):
                    return
                clear_partial(self.path)
                for pattern in ("model-*.safetensors", _PLAN):
                    for file in self.path.glob(pattern):
                        file.unlink(missing_ok=True)
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    def _prepare(self) -> None:
        """Makes the folder, unless it holds anything that no bank has written."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.begun:  # another run may begin it this moment
            foreign = sorted(file.name for file in self.path.iterdir() if not _OURS.fullmatch(file.name))
            if foreign:
                raise UndeError(
                    f"{self.path} holds something else than a bank ({foreign[0]}): choose another path"
                )

    def _read_plan(self) -> dict[str, Any]:
        """What makes this bank this bank."""
        try:
            found = read_json(self.plan)
            form, config = found["format"], found["plan"]
            described(config)
        except Unreachable:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UndeError(
                f"{self.plan} is not the plan of a bank, or is damaged ({error}): delete this file and call Bank.run "
                "with the same arguments again, which keeps all sound models; or choose another path"
            ) from error
        if form != FORMAT:
            raise UndeError(
                f"{self.plan} is of format {form!r}, this release reads {FORMAT!r}: finish it with the release that "
                "began it, or choose another path"
            )
        return config


def bank_of(path: StorePath) -> StorePath | None:
    """The bank that a path names, if it is one that is not finished: its file, or the folder of its parts."""
    if path.is_dir() and path.suffix == PARTS and exists(path / _PLAN):
        return path.with_suffix("")
    begun = not exists(path) and PartsFolder(path).begun
    return path if begun else None


def refuse_other_plan(there: Mapping[str, Any], here: Mapping[str, Any], path: StorePath) -> None:
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        told = "; ".join(f"{key} is {there.get(key)!r} there and {here[key]!r} here" for key in differing)
        raise UndeError(
            f"{path} belongs to a bank with another plan: {told}. Use the same arguments to continue it, or "
            "another path for a new bank"
        )


def sets_in(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The sets of queries, each with its utilities: finite numbers, on as many axes as there are."""
    sets = {key.removeprefix(UTILITY): values for key, values in arrays.items() if key.startswith(UTILITY)}
    if not sets:
        raise ValueError("it has no utilities")
    for name, values in sets.items():
        if values.dtype != np.float64 or not values.size or not np.isfinite(values).all():
            raise ValueError(f"the utilities of {name!r} are not all finite numbers")
    return sets


def _checked_part(arrays: Mapping[str, np.ndarray]) -> Part:
    part = Part(sets_in(arrays), float(arrays["seconds"]), str(arrays["environment"]))
    one_axis = all(values.ndim == 1 for values in part.utility.values())
    if not one_axis or not 0 <= part.seconds < math.inf or not isinstance(json.loads(part.environment), dict):
        raise ValueError("a part that no release has written")
    return part


def _owner(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:32]
