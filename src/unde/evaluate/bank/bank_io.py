"""Files of a bank: one .npz when it is finished; until then a folder `<bank>.parts` with a file for each model.

plan.json                what is trained
model-00000.safetensors  the result of a model, with a checksum, the digest of its plan and its number
.lock                    held by the process that fills the folder
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, TypeVar

import numpy as np
import torch

from unde.errors import UndeError, explain
from unde.evaluate.bank.subsets import SubsetPlan, parse_plan
from unde.store.files import check_plain, clear_partial, create_bytes, read_json, write_bytes
from unde.store.layout import DAMAGED, LOCK, VerifyReport
from unde.store.locks import locked
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.shards import checksum, read_shard, write_shard

T = TypeVar("T")
FORMAT = "unde bank 2"
OLD_FORMATS = ("unde bank 1", "whence bank 1")  # finished banks without a checksum
UTILITY = "utility/"
_RESUME = "Bank.run with the same arguments"
PARTS, _PLAN, _MODEL = ".parts", "plan.json", re.compile(r"model-(\d{5,})\.safetensors")
_OURS = re.compile(r"\.lock|plan\.json|model-\d{5,}\.safetensors|(plan\.json|model-).*\.partial")


@dataclass(frozen=True, eq=False)
class ModelResult:
    """What a bank keeps of one retrained model."""

    utility: dict[str, np.ndarray]  # name → (Q,)
    seconds: float
    environment: str  # JSON: versions and machine

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: values.shape for name, values in self.utility.items()}


@dataclass(frozen=True)
class UnfinishedBank:
    """The folder of a bank that is being filled."""

    path: StorePath
    owner: str = ""  # digest of the plan; results of other plans are not read

    @classmethod
    def of(cls, bank: StorePath) -> UnfinishedBank:
        return cls(bank.with_name(bank.name + PARTS))

    @property
    def plan_file(self) -> StorePath:
        return self.path / _PLAN

    def exists(self) -> bool:
        return exists(self.plan_file)

    @contextmanager
    def fill(self, config: Mapping[str, Any]) -> Generator[UnfinishedBank]:
        """Lock the folder for results of this plan."""
        cure = "choose a path for the bank in a folder that can be written to"
        with ExitStack() as stack:
            with explain(f"cannot keep models in {self.path} ({{why}}): {cure}", OSError):
                self.path.mkdir(parents=True, exist_ok=True)
                known = self.exists()  # another run may create it at this moment
                foreign = sorted(
                    p.name for p in self.path.iterdir() if not (known or _OURS.fullmatch(p.name))
                )
                if foreign:
                    raise UndeError(
                        f"{self.path} holds something else than a bank ({foreign[0]}): choose another path"
                    )
                stack.enter_context(locked(self.path, doing="filling"))
                if not self.exists():
                    text = json.dumps({"format": FORMAT, "plan": dict(config)}, indent=1)
                    create_bytes(self.plan_file, text.encode())
            refuse_other_plan(self._read_plan(), config, self.path)
            yield replace(self, owner=_digest(config))

    def open(self) -> tuple[UnfinishedBank, SubsetPlan]:
        """The folder for reading, and its plan."""
        config = self._read_plan()
        return replace(self, owner=_digest(config)), parse_plan(config)

    def remove(self, config: Mapping[str, Any]) -> None:
        """Delete the files that a bank of this plan has written."""
        with suppress(OSError, UndeError):
            if self.exists():
                if self._read_plan() != dict(config):
                    return
                clear_partial(self.path)
                for _, file in self.files():
                    file.unlink(missing_ok=True)
                self.plan_file.unlink(missing_ok=True)
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    # --- results of models ------------------------------------------------------------------------------

    def write(self, number: int, result: ModelResult) -> None:
        tensors = {UTILITY + name: torch.from_numpy(values) for name, values in result.utility.items()}
        tensors["seconds"] = torch.tensor(result.seconds, dtype=torch.float64)
        tensors["environment"] = torch.tensor(list(result.environment.encode()), dtype=torch.uint8)
        write_shard(self.file(number), self.owner, tensors)

    def read(self, number: int) -> ModelResult | None:
        """The result of a model; None if it is missing, damaged, or of another plan or model."""
        try:
            # Copied, since the tensors are views of the file.
            arrays = {name: t.numpy().copy() for name, t in read_shard(self.file(number), self.owner).items()}
            environment = arrays["environment"].tobytes().decode()
            result = ModelResult(utilities(arrays), float(arrays["seconds"]), environment)
            flat = all(values.ndim == 1 for values in result.utility.values())
            sound = flat and 0 <= result.seconds < math.inf and isinstance(json.loads(environment), dict)
            return result if sound else None
        except (ValueError, KeyError, TypeError, OSError) as e:
            if isinstance(e, Unreachable):
                raise
            return None

    def files(self) -> list[tuple[int, StorePath]]:
        """Files of models, by number."""
        matches = [(_MODEL.fullmatch(file.name), file) for file in self.path.iterdir()]
        return sorted((int(match[1]), file) for match, file in matches if match)

    def file(self, number: int) -> StorePath:
        return self.path / f"model-{number:05d}.safetensors"

    def _read_plan(self) -> dict[str, Any]:
        damaged = (
            f"{self.plan_file} is not the plan of a bank, or is damaged ({{e}}): delete this file and call "
            "Bank.run with the same arguments again, which keeps all sound models; or choose another path"
        )
        with explain(damaged, UndeError, OSError, ValueError, KeyError, TypeError, RecursionError):
            content = read_json(self.plan_file)
            version, config = content["format"], content["plan"]
            parse_plan(config)
        if version != FORMAT:
            raise UndeError(
                f"{self.plan_file} is of format {version!r}, this release reads {FORMAT!r}: finish it with the "
                "release that began it, or choose another path"
            )
        return config


def unfinished_bank(path: StorePath) -> StorePath | None:
    """The bank that a path (its file, or the folder of its parts) names, if it is not finished."""
    if path.is_dir() and path.suffix == PARTS and exists(path / _PLAN):
        return path.with_suffix("")
    return path if not exists(path) and UnfinishedBank.of(path).exists() else None


def refuse_other_plan(stored: Mapping[str, Any], config: Mapping[str, Any], path: StorePath) -> None:
    differing = [key for key in config if stored.get(key) != config[key]]
    if differing:
        pairs = "; ".join(f"{key} is {stored.get(key)!r} there and {config[key]!r} here" for key in differing)
        raise UndeError(
            f"{path} belongs to a bank with another plan: {pairs}. Use the same arguments to continue it, or "
            "another path for a new bank"
        )


def utilities(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The utilities of each set of queries, which must be finite."""
    sets = {key.removeprefix(UTILITY): values for key, values in arrays.items() if key.startswith(UTILITY)}
    if not sets:
        raise ValueError("it has no utilities")
    for name, values in sets.items():
        if values.dtype != np.float64 or not values.size or not np.isfinite(values).all():
            raise ValueError(f"the utilities of {name!r} are not all finite numbers")
    return sets


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:32]


# --- finished banks ---------------------------------------------------------------------------------------


def write_bank(path: StorePath, plan: SubsetPlan, results: Sequence[ModelResult]) -> None:
    grid = (plan.subsets, plan.seeds_per_subset)
    environments = Counter(result.environment for result in results)
    provenance = {
        "format": FORMAT,
        "plan": plan.config(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environments": [
            {**json.loads(text), "models": count} for text, count in sorted(environments.items())
        ],
    }
    arrays = {
        "masks": np.packbits(plan.masks(), axis=1),
        "seeds": plan.train_seeds(),
        "seconds": np.array([result.seconds for result in results]).reshape(grid),
        "provenance": np.array(json.dumps(provenance)),
    }
    for name in results[0].utility:
        arrays[UTILITY + name] = np.stack([result.utility[name] for result in results]).reshape(*grid, -1)
    arrays[_CHECKSUM] = np.array(_checksum(arrays))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # ty: ignore[invalid-argument-type]
    clear_partial(path.parent, f"{glob.escape(path.name)}.????????")  # of killed runs
    write_bytes(path, buffer.getvalue())


def read_bank(path: StorePath) -> dict[str, Any]:
    """The arrays and the provenance of a finished bank, by the names of the attributes of `Bank`."""
    damaged = (
        f"{path} is not a bank that can be read, or is damaged ({{e}}): choose another path, or delete it and "
        "make it anew with Bank.run"
    )
    with explain(f"cannot read {path} ({{why}}): expected the file of a bank", OSError):
        check_plain(path, follow=True)
        content = path.read_bytes()
    with explain(damaged, UndeError, Exception):  # damaged bytes make zipfile and numpy raise a dozen kinds
        return _check_content(_unpack(content))


def _check_content(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    provenance = json.loads(str(arrays["provenance"]))
    version, plan = provenance["format"], parse_plan(provenance["plan"])
    if version not in (FORMAT, *OLD_FORMATS):
        raise ValueError(f"format {version!r} instead of {FORMAT!r}")
    signed = {name: array for name, array in arrays.items() if name != _CHECKSUM}
    if version == FORMAT and str(arrays.get(_CHECKSUM)) != _checksum(signed):
        raise ValueError("its content does not match its checksum")
    grid = (plan.subsets, plan.seeds_per_subset)
    seeds, seconds, by_seed = arrays["seeds"], arrays["seconds"], utilities(arrays)
    # Shapes first: the masks of a forged plan may be too large for memory.
    if seeds.shape != grid or not np.array_equal(seeds, plan.train_seeds()):
        raise ValueError("its seeds are not those of its plan")
    if seconds.shape != grid or not (np.isfinite(seconds) & (seconds >= 0)).all():
        raise ValueError(f"its seconds are not one duration for each of {grid} models")
    for name, values in by_seed.items():
        if values.ndim != 3 or values.shape[:2] != grid:
            raise ValueError(f"the utilities of {name!r} have shape {values.shape}, expected {(*grid, 'Q')}")
    packed, expected = arrays["masks"], (plan.subsets, -(-plan.n_train // 8))
    if packed.dtype != np.uint8 or packed.shape != expected:
        raise ValueError(f"its masks have shape {packed.shape}, expected {expected}")
    masks = np.unpackbits(packed, axis=1, count=plan.n_train).view(bool)
    if (masks.sum(axis=1) != plan.subset_size).any():
        raise ValueError(f"not all of its subsets have {plan.subset_size} examples")
    return {"masks": masks, "by_seed": by_seed, "seeds": seeds, "seconds": seconds, "provenance": provenance}


def verify_bank(path: StorePath) -> VerifyReport:
    """Check the file of a bank, or while there is none the results of its models."""
    report, folder = VerifyReport(path, "bank"), UnfinishedBank.of(path)
    if not (exists(path) or folder.exists()):
        raise UndeError(f"there is no bank at {path}: make one with Bank.run")
    if exists(path):
        bank = _verify_file(report, path, lambda: read_bank(path), "makes it anew")
        if bank is not None and bank["provenance"]["format"] in OLD_FORMATS:
            report.notes.append("it has no checksum, as releases before 0.2 wrote none")
        return report
    opened = _verify_file(report, folder.plan_file, folder.open, "keeps all sound models")
    if opened is None:
        return report
    (results, plan), done = opened, 0
    for number, file in results.files():
        if number < plan.models and results.read(number) is not None:
            report.count(file)
            done += 1
        else:
            report.report(file, DAMAGED, "", f"delete it, {_RESUME} trains this model again")
    report.unfinished = f"{done} of {plan.models} models are trained; {_RESUME} goes on"
    return report


def _verify_file(report: VerifyReport, file: StorePath, read: Callable[[], T], cure: str) -> T | None:
    try:
        content = read()
    except Unreachable:
        raise
    except UndeError as e:
        reason = str(e).partition("damaged (")[2].partition("): ")[0] or str(e).partition(": ")[0]
        report.report(file, DAMAGED, reason, f"delete it, {_RESUME} {cure}")
        return None
    report.count(file)
    return content


_CHECKSUM = "checksum"
_MAX_BYTES = 2**24  # of all arrays in memory, for any file
_MAX_RATIO = 20  # of bytes in memory to bytes of a larger file: measurements hardly compress


def _unpack(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, after checking that they are as long as their headers say."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
        if size > max(_MAX_BYTES, _MAX_RATIO * len(content)):
            raise ValueError(f"its {len(content):,} bytes would take {size:,} in memory")
        for entry in packed.infolist():
            with packed.open(entry) as unpacked:  # `ZipFile.read` may unpack more than the entry declares
                file = io.BytesIO(unpacked.read(entry.file_size))
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("an array is of a later version of the .npy format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if math.prod(shape) * dtype.itemsize != len(file.getbuffer()) - file.tell():
                raise ValueError(f"an array is shorter or longer than its shape {shape} says")
            file.seek(0)
            arrays[entry.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    raw = {
        n: np.frombuffer(bytearray(str(a).encode()), np.uint8) if a.dtype.kind == "U" else a
        for n, a in arrays.items()
    }
    return checksum({name: torch.from_numpy(a) for name, a in raw.items()})
