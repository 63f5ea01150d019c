"""When a bank is done: one file of arrays, and the checks that it holds what its plan says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate.bank.arrays import match_checksum, read_arrays, write_arrays
from unde.evaluate.bank.bank_io import FORMAT, OLD_FORMATS, UTILITY, Part, sets_in
from unde.evaluate.bank.subsets import Plan, described
from unde.store.files import PARTIAL
from unde.store.remote import Remote, StorePath, Unreachable


@dataclass(frozen=True, eq=False)
class Content:
    """What the file of a bank holds."""

    masks: np.ndarray  # (S, N)
    by_seed: dict[str, np.ndarray]  # (S, R, Q)
    seeds: np.ndarray  # (S, R)
    seconds: np.ndarray  # (S, R)
    provenance: dict[str, Any]


def write_bank(path: StorePath, plan: Plan, parts: Sequence[Part]) -> None:
    grid = (plan.subsets, plan.seeds_per_subset)
    provenance = {
        "format": FORMAT,
        "plan": plan.config(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environments": _environments(parts),
    }
    arrays = {
        "masks": np.packbits(plan.masks(), axis=1),
        "seeds": plan.train_seeds(),
        "seconds": np.array([part.seconds for part in parts]).reshape(grid),
        "provenance": np.array(json.dumps(provenance)),
    }
    for name in parts[0].utility:
        arrays[UTILITY + name] = np.stack([part.utility[name] for part in parts]).reshape(*grid, -1)
    _clear_leftovers(path)
    write_arrays(path, arrays)


def read_bank(path: StorePath) -> Content:
    try:
        return _checked(read_arrays(path))
    except Unreachable:
        raise
    except OSError as e:
        raise UndeError(f"cannot read {path} ({e.strerror}): expected the file of a bank") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        raise UndeError(
            f"{path} is not a bank that can be read, or is damaged ({e}): choose another path, or delete it and "
            "make it anew with Bank.run"
        ) from e


def _checked(arrays: Mapping[str, np.ndarray]) -> Content:
    provenance = json.loads(str(arrays["provenance"]))
    form, plan = provenance["format"], described(provenance["plan"])
    if form not in (FORMAT, *OLD_FORMATS):
        raise ValueError(f"format {form!r} instead of {FORMAT!r}")
    if form == FORMAT and not match_checksum(arrays):
        raise ValueError("its content does not match its checksum")
    grid = (plan.subsets, plan.seeds_per_subset)
    seeds, seconds, by_seed = arrays["seeds"], arrays["seconds"], sets_in(arrays)
    # Shapes first: a plan that was made up may be far too large to draw.
    if seeds.shape != grid or not np.array_equal(seeds, plan.train_seeds()):
        raise ValueError("its seeds are not those of its plan")
    if seconds.shape != grid or not (np.isfinite(seconds) & (seconds >= 0)).all():
        raise ValueError(f"its seconds are not one duration for each of {grid} models")
    for name, values in by_seed.items():
        if values.ndim != 3 or values.shape[:2] != grid:
            raise ValueError(f"the utilities of {name!r} have shape {values.shape}, expected {(*grid, 'Q')}")
    return Content(_masks(arrays["masks"], plan), by_seed, seeds, seconds, provenance)


def _masks(packed: np.ndarray, plan: Plan) -> np.ndarray:
    expected = (plan.subsets, -(-plan.n_train // 8))
    if packed.dtype != np.uint8 or packed.shape != expected:
        raise ValueError(f"its masks have shape {packed.shape}, expected {expected}")
    masks = np.unpackbits(packed, axis=1, count=plan.n_train).view(bool)
    if (masks.sum(axis=1) != plan.subset_size).any():
        raise ValueError(f"not all of its subsets have {plan.subset_size} examples")
    return masks


def _environments(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The distinct environments that models were trained in, each with the number of its models."""
    counts = Counter(part.environment for part in parts)
    return [{**json.loads(text), "models": count} for text, count in sorted(counts.items())]


def _clear_leftovers(path: StorePath) -> None:
    """Of runs that were killed while they wrote this very file. Others may keep their own in this folder."""
    if isinstance(path, Remote):
        return  # nothing is left there
    leftover = re.compile(re.escape(path.name) + r"\.[0-9a-f]+" + re.escape(PARTIAL))
    with suppress(OSError):
        for file in path.parent.iterdir():
            if leftover.fullmatch(file.name):
                file.unlink()
