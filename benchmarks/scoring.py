"""What scores cost beside the bare product of matrices, beside the disk, and from smaller stores.

    python -m benchmarks run scoring

Indexes of random features are written with the store's own writer, and scored as a user would. What is compared runs in
turns, so that noise of the machine hits all alike; ratios are medians over the rounds.

totals    N × D features in memory against sgemm of the same shape
groups    by_group of M groups, in blocks as weights are learned from (each is dropped once it was made) and as one
          array, against totals of as many queries. The array is M times as large as totals: writing it alone, a
          number into memory that is as new, is told beside it.
stores    int8 against float32, from files that are in the page cache
disk      the same from the disk: pages are given back before
million   a million examples, more than memory may hold, against reading the same files from the disk one after the
          other
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import drop_cache
from benchmarks.peaks import peaks
from benchmarks.rounds import Seconds, interleaved, ratio, timed
from unde import Groups
from unde.index.reader import IndexReader
from unde.index.scorer import Scorer
from unde.methods import TracIn
from unde.projection import VERSION
from unde.scoring import GroupScores
from unde.store.codec import codec
from unde.store.manifest import SCHEMA, Manifest, ResolvedSettings
from unde.store.shards import write_shard

EXAMPLES, WIDTH, QUERIES, ROUNDS = 50_000, 4096, 1000, 3
MILLION, NARROW = 1_000_000, 1024  # examples, and their features
GROUPS = (16, 64)
STORES = ("float32", "int8")
UNIT = 64  # features of a parameter where there are 64 groups
_SHARD = 2**24  # bytes of a shard in float32
_READ = 2**23  # bytes that are read from a disk at once


# --- indexes of random features --------------------------------------------------------------------------


def write_index(folder: Path, examples: int, width: int, dtype: str, unit: int = 256, seed: int = 0) -> Path:
    """An index whose features are random, in parameters of `unit` features each."""
    units = [{"name": f"layer{u}.weight", "shape": [unit], "size": unit} for u in range(width // unit)]
    method = TracIn(projection="none")
    rows = _SHARD // (4 * width)
    m = Manifest(
        schema=SCHEMA,
        projection_version=VERSION,
        method={"name": method.name, **asdict(method)},
        task={"name": "random"},
        examples=examples,
        store_dtype=dtype,
        seed=seed,
        on_bad="error",
        units=units,
        groups={u["name"]: [u["name"]] for u in units},
        models=["random"],
        checkpoint_weights=[1.0],
        data="random",
        ids="",
        factors=False,
        matrices="",
        resolved=ResolvedSettings(rows, rows, None),
    )
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for s, r in enumerate(m.shards):
        n = r.stop - r.start
        features = torch.randn(n, width, generator=generator)
        beside = {
            "squares": features.unflatten(1, (-1, unit)).square().sum(2),
            "loss": torch.zeros(n),
            "skipped": torch.zeros(n, dtype=torch.uint8),
            "digest": torch.arange(r.start, r.stop),
        }
        write_shard(m.shard(folder, 0, s), m.files[s][1], beside | codec(dtype).pack(features, m.columns))
    (folder / "manifest.json").write_bytes(m.text())
    return folder


def scored(folder: Path, queries: Tensor, memory: int, groups: int | None = None) -> GroupScores:
    """Of queries (Q, D), with as many groups of equal size."""
    m = Manifest.read(folder)
    stored = IndexReader(folder, m, memory)
    stored.record_files()
    names = m.unit_names
    each = len(names) // (groups or len(names))
    members = {f"group {j}": tuple(names[j * each : (j + 1) * each]) for j in range(len(names) // each)}
    scorer = Scorer(stored, Groups(members), None)
    return scorer.scores(TracIn(projection="none"), queries.unsqueeze(0), [""] * len(queries))


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "shards").iterdir())


def read_through(folder: Path) -> None:
    """All shards one after the other, in large reads."""
    buffer = bytearray(_READ)
    for path in shards(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# --- what is measured ------------------------------------------------------------------------------------


def ratios(runs: Mapping[str, Callable[[], Any]], to: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each, in turns: the median ratio over rounds with its interval, and seconds of both."""
    timers = {name: lambda run=run: timed(run) for name, run in runs.items()}
    return ratios_of(interleaved(timers, rounds)[0], to)


def ratios_of(seconds: Seconds, to: str) -> dict[str, dict[str, Any]]:
    median = {name: round(float(np.median(each)), 4) for name, each in seconds.items()}
    return {
        name: {**ratio(each, seconds[to]), "seconds": median[name], f"seconds_{to}": median[to]}
        for name, each in seconds.items()
    }


def totals(folder: Path, queries: Tensor, memory: int, rounds: int) -> dict[str, Any]:
    scores = scored(folder, queries, memory)
    train = torch.cat([block[0] for _, block in scores.train.blocks()])
    runs = {"sgemm": lambda: queries @ train.T, "totals": scores.total, "top 100": lambda: scores.top(100)}
    found = ratios(runs, "sgemm", rounds)
    return {name: found[name] for name in ("totals", "top 100")}


def groups(folder: Path, queries: Tensor, memory: int, rounds: int) -> list[dict[str, Any]]:
    found = []
    for count in GROUPS:
        scores = scored(folder, queries, memory, count)
        q, n = scores.shape
        few = max(1, min(q, memory // (4 * n * count)))  # whose array is within the budget
        some = scored(folder, queries[:few], memory, count)

        def blocks(scores: GroupScores = scores) -> None:
            for _ in scores.stream(slice(0, len(scores))):
                pass

        def written(count: int = count, few: int = few, n: int = n) -> None:
            torch.from_numpy(np.empty((count, few, n), dtype=np.float32)).fill_(1.0)

        whole = ratios({"totals": scores.total, "blocks": blocks}, "totals", rounds)
        part = ratios({"totals": some.total, "array": some.by_group, "writing": written}, "totals", rounds)
        row = {"groups": count, "queries": q, "blocks": whole["blocks"], "array_queries": few}
        found.append(row | {name: part[name] for name in ("array", "writing")})
    return found


def stores(
    folders: Mapping[str, Path], queries: Tensor, memory: int, rounds: int, cold: bool
) -> list[dict[str, Any]]:
    """Blocks are not kept: files are mapped, and read, each time."""
    found = []
    for count in (1, 10, len(queries)):
        runs = {}
        for dtype, folder in folders.items():
            total = scored(folder, queries[:count], memory).total
            runs[dtype] = lambda folder=folder, total=total: after_drop(folder if cold else None, total)
        seconds, _ = interleaved(runs, rounds if cold or count > 10 else 5 * rounds)
        rows = ratios_of(seconds, "float32")
        found += [{"store": dtype, "queries": count} | row for dtype, row in rows.items()]
    return found


def after_drop(folder: Path | None, run: Callable[[], Any]) -> float:
    """Seconds, without those of giving the pages of an index back."""
    if folder is not None:
        drop_cache(folder)
    return timed(run)


def asking(folder: str, count: int, memory: int) -> Callable[[], Any]:
    scores = scored(Path(folder), torch.randn(count, NARROW), memory)
    return lambda: scores.top(100)


def million(folder: Path, queries: Tensor, memory: int, rounds: int) -> list[dict[str, Any]]:
    size = sum(path.stat().st_size for path in shards(folder))
    found = []
    for count in (1, 10, 100):
        scores = scored(folder, queries[:count], memory)
        runs = {"disk": lambda: read_through(folder), "scores": lambda scores=scores: scores.top(100)}
        timers = {name: lambda run=run: after_drop(folder, run) for name, run in runs.items()}
        seconds, _ = interleaved(timers, rounds)
        row = {"examples": scores.shape[1], "features": queries.shape[1], "queries": count, "bytes": size}
        row |= ratios_of(seconds, "disk")["scores"]
        [row["peak_bytes"]] = peaks([("benchmarks.scoring:asking", str(folder), count, memory)])
        found.append(row | {"disk_gb_per_second": round(size / row["seconds_disk"] / 1e9, 3)})
    return found


def measure(quick: bool = False) -> dict[str, Any]:
    small = 40 if quick else 1
    n, q, rounds = EXAMPLES // small, QUERIES // (10 if quick else 1), 2 if quick else ROUNDS
    torch.manual_seed(0)
    queries, narrow = torch.randn(q, WIDTH), torch.randn(100, NARROW)
    with tempfile.TemporaryDirectory(prefix="unde-scoring-") as temporary:
        place = Path(temporary)
        folders = {dtype: write_index(place / dtype, n, WIDTH, dtype) for dtype in STORES}
        grouped = write_index(place / "groups", n // 10, WIDTH, "float32", UNIT)
        large = write_index(place / "million", MILLION // small, NARROW, "int8")
        return {
            "examples": n,
            "features": WIDTH,
            "queries": q,
            "totals": totals(folders["float32"], queries, 4 * 2**30, rounds),
            "groups": groups(grouped, queries, 2**30, rounds),
            "stores": stores(folders, queries, 2**30 // small, rounds, cold=False),
            "disk": stores(folders, queries, 2**30 // small, rounds, cold=True),
            "million": million(large, narrow, 2 * 10**9, rounds),
        }
