"""Building an index: plan, print what it will cost, then shard after shard; a second call goes on where one stopped."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from whence import console
from whence.data import Rows, to_device
from whence.errors import WhenceError
from whence.features import Collector, Coverage, Unit, plan_coverage
from whence.index import manifest as mf
from whence.index.store import DTYPES, TEMPORARY, ShardError, pack, read_shard, write_bytes, write_shard
from whence.tasks.base import Task

SHARD_BYTES = 2**26
SHARD_BATCHES = 64  # at most this much work is lost to a kill

Checkpoint = Mapping[str, Tensor] | str | os.PathLike


def shard_name(checkpoint: int, shard: int) -> str:
    return f"c{checkpoint:02d}-{shard:06d}.safetensors"


def shard_size(batch_size: int, width: int, dtype: str) -> int:
    """Examples in a shard: a whole number of batches, so that a resumed build runs the very same batches."""
    batches = SHARD_BYTES // max(1, batch_size * width * DTYPES[dtype].itemsize)
    return batch_size * min(max(1, batches), SHARD_BATCHES)


class Builder:
    """Computes the missing shards of one index."""

    def __init__(
        self,
        folder: Path,
        manifest: mf.Manifest,
        model: nn.Module,
        task: Task,
        rows: Rows,
        units: Sequence[Unit],
        *,
        checkpoints: Sequence[Checkpoint] | None,
        ids: Sequence[Any] | None,
        num_workers: int,
        progress: bool,
    ) -> None:
        self.folder, self.manifest, self.model, self.task, self.rows = folder, manifest, model, task, rows
        self.units, self.checkpoints, self.ids = units, checkpoints, ids
        self.num_workers, self.progress = num_workers, progress
        self.columns = manifest.columns

    def run(self) -> None:
        prepare_folder(self.folder)
        with locked(self.folder):
            self._claim()
            todo = self._missing()
            if not todo:
                return
            started = time.perf_counter()
            total = sum(len(r) for _, _, r in todo)
            with console.progress("features", total, self.progress) as advance:
                for c in sorted({c for c, _, _ in todo}):
                    with self._weights_of(c):
                        coverage = self._coverage(announce=c == todo[0][0])
                        with Collector(self.model, self.task, self.units, coverage, self._measure) as collect:
                            self._fill(collect, c, [(s, r) for k, s, r in todo if k == c], advance)
            self._log(total, time.perf_counter() - started)

    @property
    def _measure(self) -> str:
        from whence.methods import parse

        return parse(self.manifest.method).measure

    def _claim(self) -> None:
        """Write the manifest, or check that the one there is the same."""
        if (self.folder / mf.FILE).exists():
            there = mf.Manifest.read(self.folder)
            differ = mf.differences(there, self.manifest)
            if differ:
                raise WhenceError(
                    f"{self.folder} already holds another index. What differs: {'; '.join(differ)}. "
                    "Choose another folder, or delete this one"
                )
        (self.folder / "shards").mkdir(exist_ok=True)
        if self.ids is not None:
            write_bytes(self.folder / "ids.json", (json.dumps(list(self.ids)) + "\n").encode())
        if not (self.folder / mf.FILE).exists():
            write_bytes(self.folder / mf.FILE, self.manifest.to_json().encode())
        for leftover in (self.folder / "shards").glob(f"*{TEMPORARY}"):
            leftover.unlink()

    def _missing(self) -> list[tuple[int, int, range]]:
        """(checkpoint, shard, rows) still to compute; damaged shards are named and count as missing."""
        todo = []
        for c in range(len(self.manifest.models)):
            for s, r in enumerate(self.manifest.shards):
                path = self.folder / "shards" / shard_name(c, s)
                try:
                    if path.exists():
                        self._check_rows(read_shard(path, self.manifest.id), r)
                        continue
                except ShardError as e:
                    console.note(f"{e}: computing it again")
                todo.append((c, s, r))
        return todo

    def _check_rows(self, shard: Mapping[str, Tensor], rows: range) -> None:
        """The shard's examples must still read as they did."""
        for i in {rows[0], rows[-1]}:
            if to_signed(self.rows.digests([i])[0]) != int(shard["digest"][i - rows.start]):
                raise WhenceError(
                    f"example {i} reads differently than when {self.folder} was begun: the data changed. "
                    "Restore the data, or build in another folder"
                )

    @contextmanager
    def _weights_of(self, c: int) -> Iterator[None]:
        with loaded(self.model, None if self.checkpoints is None else self.checkpoints[c]):
            yield

    def _coverage(self, announce: bool) -> Coverage:
        coverage = plan_coverage(self.model, self.task, self.rows, self.units, self._measure)
        if announce and self.progress:
            console.show_plan(self.folder, self.manifest, coverage)
        return coverage

    def _fill(self, collect: Collector, c: int, todo: list[tuple[int, range]], advance: console.Advance) -> None:
        step = self.manifest.batch_size
        batches = [
            range(a, min(a + step, r.stop)) for _, r in todo for a in range(r.start, r.stop, step)
        ]
        stream = self.rows.batches(batches, self.num_workers)
        try:
            for s, r in todo:
                parts: list[dict[str, Tensor]] = []
                while not parts or sum(len(p["loss"]) for p in parts) < len(r):
                    where, batch, digests = next(stream)
                    parts.append(self._batch(collect, where, batch, digests))
                    advance(len(where))
                whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
                features = whole.pop("features")
                whole["squares"] = torch.stack([features[:, x].square().sum(1) for x in self.columns], 1)
                whole |= pack(features, self.columns, DTYPES[self.manifest.store_dtype])
                write_shard(self.folder / "shards" / shard_name(c, s), self.manifest.id, whole)
        except (StopIteration, IndexError) as e:
            raise WhenceError(
                f"the data ended before its {self.manifest.examples} examples were read: its length changed. "
                "Build from data that stays as it is"
            ) from e

    def _batch(self, collect: Collector, where: range, batch: Any, digests: list[str]) -> dict[str, Tensor]:
        features, values = collect(to_device(batch, collect.device), list(where))
        features, values = features.float().cpu(), values.float().cpu()
        finite = features.isfinite().all(1) & values.isfinite()
        if not finite.all():
            bad = [where[int(i)] for i in (~finite).nonzero()[:, 0]]
            if self.manifest.on_bad == "error":
                named = bad if self.ids is None else [self.ids[i] for i in bad]
                raise WhenceError(
                    f"the gradient of example {named[0]!r} is NaN or infinite"
                    + (f" (and of {len(bad) - 1} more in its batch)" if len(bad) > 1 else "")
                    + ": look at the example and the model, or build with on_bad='skip' to leave it out of all scores"
                )
            features[~finite] = 0.0
        return {
            "features": features,
            "loss": values,
            "skipped": (~finite).to(torch.uint8),
            "digest": torch.tensor([to_signed(d) for d in digests], dtype=torch.int64),
        }

    def _log(self, examples: int, seconds: float) -> None:
        """How long it took, apart from what the index is: this file is no part of its identity."""
        entry = {"examples": examples, "seconds": round(seconds, 3), "cpus": os.cpu_count()}
        entry |= {"torch": torch.__version__, "machine": platform.machine()}
        with contextlib.suppress(OSError), open(self.folder / "log.jsonl", "a") as f:
            f.write(json.dumps(entry) + "\n")


def to_signed(digest: str) -> int:
    value = int(digest, 16)
    return value - (1 << 64) if value >= 1 << 63 else value


def prepare_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise WhenceError(f"{folder} is a file: an index needs a folder")
    if folder.exists() and not (folder / mf.FILE).exists():
        ours = {"shards", ".lock", "ids.json", f"ids.json{TEMPORARY}", f"{mf.FILE}{TEMPORARY}"}
        foreign = sorted(p.name for p in folder.iterdir() if p.name not in ours)
        if foreign:
            raise WhenceError(
                f"{folder} holds something else ({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''}): "
                "choose an empty or new folder for the index"
            )
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with the process, also when it is killed."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with open(folder / ".lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WhenceError(f"another process is building {folder} right now: wait for it to end") from None
        yield


@contextmanager
def loaded(model: nn.Module, checkpoint: Checkpoint | None) -> Iterator[None]:
    """The model with a checkpoint's weights inside the block, and its own after it."""
    if checkpoint is None:
        yield
        return
    own = {k: v.detach().clone() for k, v in model.state_dict().items()}
    try:
        model.load_state_dict(read_checkpoint(checkpoint))
        yield
    except RuntimeError as e:
        if "state_dict" in str(e):
            raise WhenceError(f"a checkpoint does not fit the model: {e}") from None
        raise
    finally:
        model.load_state_dict(own)


def read_checkpoint(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    if isinstance(checkpoint, Mapping):
        return checkpoint
    path = Path(checkpoint)
    if path.suffix != ".safetensors":
        raise WhenceError(f"checkpoint {path}: expected a .safetensors file or a state dict (pickles are never loaded)")
    if not path.exists():
        raise WhenceError(f"checkpoint {path} does not exist")
    return load_file(path)
