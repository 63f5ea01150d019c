"""The files of a bank: a folder of small parts while it is being filled, one file when it is done."""

from __future__ import annotations

import io
import json
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.store.files import write_atomically

FORMAT = "unde bank 1"
FORMATS = (FORMAT, "whence bank 1")  # the package was called whence until 0.1
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    AttributeError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class Part:
    """What is kept of one retrained model."""

    utility: dict[str, np.ndarray]  # name → (Q,)
    seconds: float
    environment: str  # JSON: versions and machine

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: values.shape for name, values in self.utility.items()}


class PartsFolder:
    """`<bank>.parts`: the plan, and one file for each model that is finished."""

    def __init__(self, bank: Path) -> None:
        self.path = bank.with_name(bank.name + ".parts")
        self._plan = self.path / "plan.json"

    def open(self, config: Mapping[str, Any]) -> None:
        """Creates the folder, or makes sure that it holds parts of the same plan."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._plan.exists():
            refuse_other_plan(self.config(), config, self.path)
            return
        foreign = sorted(file.name for file in self.path.iterdir() if not file.name.endswith(".tmp"))
        if foreign:
            raise UndeError(
                f"{self.path} holds something else than a bank ({foreign[0]}): choose another path"
            )
        text = json.dumps({"format": FORMAT, "plan": dict(config)}, indent=1)
        write_atomically(self._plan, text.encode())

    def config(self) -> dict[str, Any]:
        try:
            found = json.loads(self._plan.read_text())
            if found["format"] not in FORMATS:
                raise UndeError(f"{self._plan} is of format {found['format']!r}, expected {FORMAT!r}")
            return found["plan"]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise UndeError(f"{self._plan} is not the plan of a bank: choose another path") from error

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Held by one run at a time; the system lets go of it when that run ends, however it ends."""
        with open(self._plan, "rb") as file:
            if sys.platform != "win32":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise UndeError(
                        f"another run is filling {self.path}: wait until it ends, or stop it"
                    ) from error
            yield

    def file(self, number: int) -> Path:
        return self.path / f"model-{number:05d}.npz"

    def write(self, number: int, part: Part) -> None:
        arrays = {f"utility/{name}": values for name, values in part.utility.items()}
        arrays |= {"seconds": np.array(part.seconds), "environment": np.array(part.environment)}
        write_arrays(self.file(number), arrays)

    def read(self, number: int) -> Part | None:
        """The part, or None if it is not there or not whole (the zip format carries checksums)."""
        try:
            arrays = read_arrays(self.file(number))
            return Part(sets_in(arrays), float(arrays["seconds"]), str(arrays["environment"]))
        except UNREADABLE:
            return None

    def remove(self, config: Mapping[str, Any]) -> None:
        """Once the bank of this plan is one file; only files that a bank writes."""
        if not self._plan.exists() or self.config() != dict(config):
            return
        for file in [*self.path.glob("model-*.npz"), *self.path.glob(".*.tmp"), self._plan]:
            file.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def sets_in(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key[len("utility/") :]: values for key, values in arrays.items() if key.startswith("utility/")}


def refuse_other_plan(there: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        told = "; ".join(f"{key} is {there.get(key)!r} there and {here[key]!r} here" for key in differing)
        raise UndeError(
            f"{path} belongs to a bank with another plan: {told}. Use the same arguments to continue it, or "
            "another path for a new bank"
        )


def environments(parts: list[Part]) -> list[dict[str, Any]]:
    """The distinct environments that models were trained in, each with the number of its models."""
    counts = Counter(part.environment for part in parts)
    return [{**json.loads(text), "models": count} for text, count in sorted(counts.items())]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # ty: ignore[invalid-argument-type]
    write_atomically(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}
