"""Write shards: compute the features of some examples under a checkpoint; list missing shards; check the data."""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from unde import console, methods
from unde.data import evenly, to_device
from unde.devices import device_of, name_memory
from unde.errors import UndeError
from unde.fingerprints import SAMPLED, changed_example, length_now, reads_differently, to_signed_tensor
from unde.gradients import Coverage
from unde.gradients.feature_pass import Batch, FeaturePass, PassResult, split_range, torch_threads
from unde.index.feature_runner import FeatureRunner, bad_gradient, raise_failing_example
from unde.index.reader import IndexReader
from unde.index.sizes import kernel_files, shard_bytes, sizes_of
from unde.parallel import SERIAL, Executor, Job, JobsFailed
from unde.parallel.model_transport import BuildInputs
from unde.store import layout
from unde.store.files import append_line, clear_partial
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, write_shard

PACKED_BYTES = 2**24  # float32 features that are packed together, at least those of a pass
FACTORS = "factors"  # the covariances of EKFAC: sums over the examples of a shard


class ShardWriter:
    """Computes and writes the shards of an index. It can be pickled if the inputs have a recipe."""

    def __init__(
        self,
        folder: StorePath,
        manifest: Manifest,
        inputs: BuildInputs,
        workers: int = 0,
        ids: Sequence[Any] | None = None,
    ) -> None:
        self.folder, self.manifest, self.inputs = folder, manifest, inputs
        self.workers, self.ids = workers, ids
        self.runner, self.reader = FeatureRunner(folder, manifest, inputs), IndexReader(folder, manifest, 0)
        self.advance: Callable[[int], None] = lambda count: None
        self.upcoming: list[Job] = []  # jobs in the order of their computation, if known
        self._results: tuple[list[Job], Generator[PassResult]] | None = None  # and the jobs that they are of
        self._features = deque[Tensor]()  # of passes that are packed together, in the order of the results
        self._spare: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("folder", "manifest", "inputs", "workers", "ids")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
        self.inputs.check_model(self.manifest, self.folder)
        self.inputs.check_data(self.manifest, self.folder)

    def results(self, c: int, s: int) -> Iterator[PassResult]:
        """The passes of one shard. `upcoming` shards are read ahead by worker processes, and begun on a device."""
        if self._results is None or self._results[0][:1] != [(c, s)]:
            self._stop()
            at = self.upcoming.index((c, s)) if (c, s) in self.upcoming else None
            jobs: list[Job] = [(c, s)] if at is None else self.upcoming[at:]
            self._results = (jobs, self._run(jobs))
        jobs, stream = self._results
        self._results = (jobs[1:], stream)
        return itertools.islice(stream, len(self.cuts(s)))

    def _run(self, jobs: Sequence[Job]) -> Generator[PassResult]:
        """The passes of some shards, one checkpoint after the other."""
        ranges = [r for _, s in jobs for r in self.cuts(s)]
        with closing(self.inputs.rows.batches(ranges, self.workers)) as batches:
            for c, of_checkpoint in itertools.groupby(jobs, lambda job: job[0]):
                shards = [s for _, s in of_checkpoint]
                count = sum(len(self.cuts(s)) for s in shards)
                outs = (rows for s in shards for group in self.groups(s) for rows in self._rows(group))
                run = self.runner.open_pass(c)
                yield from run.over(_read_batches(self, itertools.islice(batches, count)), outs, take=True)

    def pack_features(self) -> dict[str, Tensor]:
        """The features of the passes whose results came last, as they are stored."""
        features = self._features.popleft()
        packed = self.manifest.codec.pack(features, self.manifest.columns)
        memory = features.untyped_storage().data_ptr()
        if all(x.untyped_storage().data_ptr() != memory for x in packed.values()):
            self._spare = features  # to be used again: new memory is slow
        return packed

    def _rows(self, group: Sequence[range]) -> Iterator[Tensor]:
        """The rows of each pass in one tensor."""
        sizes = [len(cut) for cut in group]
        spare, self._spare = self._spare, None
        if spare is None or len(spare) < sum(sizes):
            spare = torch.empty(sum(sizes), self.manifest.width)
        self._features.append(spare[: sum(sizes)])
        yield from self._features[-1].split(sizes)

    def groups(self, s: int) -> list[list[range]]:
        """The passes of a shard whose features are packed together."""
        cuts, m = self.cuts(s), self.manifest
        step = max(1, PACKED_BYTES // max(1, 4 * m.resolved.pass_size * m.width))
        return [cuts[i : i + step] for i in range(0, len(cuts), step)]

    def cuts(self, s: int) -> list[range]:
        """The rows of each pass of a shard."""
        rows = self.manifest.shards[s]
        return split_range(range(rows.start, rows.stop), self.manifest.resolved.pass_size)

    def close(self) -> None:
        """Restore the model; stop reading ahead."""
        self._stop()
        self.runner.close()

    def _stop(self) -> None:
        if self._results is not None:
            self._results[1].close()
        self._results = None
        self._features.clear()
        self._spare = None


class ShardsFailed(UndeError):
    """Some shards failed repeatedly; the others are done, and the same call resumes."""


def compute_shard(writer: ShardWriter, c: int, s: int) -> None:
    """Compute and write shard s under checkpoint c; the bytes do not depend on the process."""
    m, inputs = writer.manifest, writer.inputs
    where = range(m.shards[s].start, m.shards[s].stop)
    with (
        name_memory(device_of(inputs.model)),
        raise_failing_example(
            inputs.model, inputs.task, inputs.rows, lambda: where, writer.ids, close=writer.close
        ),
    ):
        whole = _compute_tensors(writer, c, s)
    write_shard(m.shard(writer.folder, c, s), m.files[s][1], whole)


def _compute_tensors(writer: ShardWriter, c: int, s: int) -> dict[str, Tensor]:
    m = writer.manifest
    with torch_threads(m.resolved.threads):
        results, parts, packed = writer.results(c, s), list[dict[str, Tensor]](), list[dict[str, Tensor]]()
        for group in writer.groups(s):
            for rows in group:
                parts.append(_pass_tensors(writer, c, rows, next(results)))
                if (
                    len(parts) > 1 and FACTORS in parts[-1]
                ):  # as large as the model: only the sum stays in memory
                    parts[0][FACTORS] += parts[-1].pop(FACTORS)
                writer.advance(len(rows))
            packed.append(writer.pack_features())
        whole = packed[0] if len(packed) == 1 else concatenate(packed)
        return concatenate(parts) | whole


def compute_missing(writer: ShardWriter, executor: Executor, progress: bool) -> None:
    """Compute the missing shards of an index."""
    jobs = list_missing(writer, executor)
    if not jobs:
        if executor.exclusive:
            check_data_unchanged(writer)
        return
    count, started = sum(_length(writer, s) for _, s in jobs), time.perf_counter()
    if progress:
        print_summary(writer.runner, count)
    writer.upcoming = jobs
    with console.progress("features", count, progress, estimate="examples") as writer.advance:
        try:
            for _, s in executor.run(compute_shard, writer, jobs):
                if not executor.in_process:
                    writer.advance(_length(writer, s))
        except JobsFailed as e:
            raise _failure(writer, e.reasons) from None
        finally:
            writer.close()
    _log(writer, count, time.perf_counter() - started)
    if executor.exclusive:
        clear_partial(writer.folder / layout.SHARDS)  # what workers left that were killed
        check_data_unchanged(writer)


def check_data_unchanged(writer: ShardWriter) -> None:
    """Raise if the data has changed between the first shard and now."""
    m, digests = writer.manifest, writer.reader.values("digest")
    for c in range(1, m.terms):
        differ = (digests != writer.reader.values("digest", c)).nonzero()[:, 0]
        if len(differ):
            raise reads_differently(int(differ[0]))
    if length_now(writer.inputs.rows) != m.examples:
        raise _length_error(writer)
    where = torch.tensor(evenly(m.examples, SAMPLED))
    changed = changed_example(writer.inputs.rows, where, digests[where])
    if changed is not None:
        raise reads_differently(changed)


def list_missing(writer: ShardWriter, executor: Executor = SERIAL) -> list[Job]:
    """Shards that `executor` has to compute; damaged ones are reported and count as missing."""
    m, jobs = writer.manifest, []
    where, digests = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    if executor.exclusive:
        clear_partial(writer.folder / layout.SHARDS)
    written = layout.list_names(writer.folder / layout.SHARDS)
    for (c, s), path in writer.reader.paths.items():
        if not executor.owns((c, s)):
            continue
        try:
            if path.name in written:
                digests.append(writer.reader.read_checked(c, s)["digest"].clone())
                where.append(torch.arange(m.shards[s].start, m.shards[s].stop))
                continue
        except ShardError as e:
            console.note(f"{e}: computing it again")
        jobs.append((c, s))
    changed = changed_example(writer.inputs.rows, torch.cat(where), torch.cat(digests))
    if changed is not None:
        raise UndeError(
            f"example {changed} reads differently than when {writer.folder} was begun: the data changed. "
            "Restore the data, or build in another folder"
        )
    return jobs


def _read_batches(writer: ShardWriter, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, with the numbers that seed random draws of their examples."""
    while True:
        try:
            where, batch, digests = next(batches)
            yield writer.runner.sample_numbers(where), batch, digests
        except StopIteration:
            return
        except IndexError:
            if length_now(writer.inputs.rows) == writer.manifest.examples:
                raise
            raise _length_error(writer) from None


def _pass_tensors(writer: ShardWriter, c: int, rows: range, result: PassResult) -> dict[str, Tensor]:
    """What is stored of a pass besides features; bad gradients raise, or are zeroed and marked as skipped."""
    norms = [torch.linalg.vector_norm(result.features[:, x], dim=1) for x in writer.manifest.columns]
    squares = torch.stack(norms, 1).square_()  # read once: a sum of squares makes a copy of them
    finite = squares.isfinite().all(1) & result.values.isfinite()
    if not finite.all():  # or too large to be squared
        finite = result.features.isfinite().all(1) & result.values.isfinite()
    if not finite.all():
        if writer.manifest.on_bad == "error":
            bad = [rows[int(i)] for i in (~finite).nonzero()[:, 0]]
            way_out = "look at the example and the model, or build with on_bad='skip' to leave it out"
            raise bad_gradient(bad if writer.ids is None else [writer.ids[i] for i in bad], way_out)
        result.features[~finite] = squares[~finite] = 0.0
    beside = {"beside": result.extra} if writer.runner.method.extra_measures else {}
    if result.factors is not None:
        beside[FACTORS] = result.factors
        if not finite.all():
            finite_rows = [rows[int(i)] for i in finite.nonzero()[:, 0]]
            beside[FACTORS] = covariances(writer, writer.runner.open_pass(c), finite_rows)
    return beside | {
        "squares": squares,
        "loss": result.values,
        "skipped": (~finite).to(torch.uint8),
        "digest": to_signed_tensor(result.digests),
    }


def covariances(writer: ShardWriter, run: FeaturePass, rows: Sequence[int]) -> Tensor:
    """Covariances of some examples, in one pass."""
    assert run.factors is not None
    if rows:
        run.collect(
            to_device(writer.inputs.rows.batch(rows), run.collect.device), writer.runner.sample_numbers(rows)
        )
    return run.factors.take().cpu()


def concatenate(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the rows of parts of a shard and add up their covariances."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != FACTORS}
    if FACTORS in parts[0]:
        whole[FACTORS] = torch.stack([part[FACTORS] for part in parts if FACTORS in part]).sum(0)
    return whole


def _failure(writer: ShardWriter, reasons: dict[Job, str]) -> UndeError:
    (c, s), reason = next(iter(reasons.items()))
    rows = writer.manifest.shards[s]
    more = f" So did {len(reasons) - 1} more." if len(reasons) > 1 else ""
    return ShardsFailed(
        f"shard {s} (examples {rows.start} to {rows.stop - 1}, checkpoint {c}) failed again and again: {reason}\n"
        f"All others are done.{more} Mend what is wrong and run the same call again, it goes on where it stopped"
    )


def _length(writer: ShardWriter, s: int) -> int:
    rows = writer.manifest.shards[s]
    return rows.stop - rows.start


def _length_error(writer: ShardWriter) -> UndeError:
    return UndeError(
        f"the length of the data changed while it was read: {writer.manifest.examples} examples at first, "
        f"now {length_now(writer.inputs.rows)}. Build from data that stays as it is"
    )


def _log(writer: ShardWriter, examples: int, seconds: float) -> None:
    """Append the time to the log, which is no part of the identity of the index."""
    entry = {
        "examples": examples,
        "seconds": round(seconds, 6),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    append_line(writer.folder / layout.LOG, json.dumps(entry))


# --- summary ---------------------------------------------------------------------------------------------


def print_summary(runner: FeatureRunner, missing: int) -> None:
    """Print what will be built and what it takes; `missing` examples are still to do."""
    m, terms = runner.manifest, runner.manifest.terms
    whole = sum(shard_bytes(m, runner.units[0].projection.dtype).values())
    kernel = sum(kernel_files(m, runner.method.kernel.bind(sizes_of(m))).values())
    console.line(
        f"{runner.folder}: {console.counted(m.examples, 'example')} × {console.counted(m.width, 'feature')} "
        f"({console.counted(len(m.units), 'parameter')} in {console.counted(len(m.groups), 'group')}"
        + (f", {terms} {_name_terms(runner)}" if terms > 1 else "")
        + f"), {console.size(whole)} on disk in {m.store_dtype}, "
        + console.counted(terms * len(m.shards), "shard")
        + (f"; its kernel will take {console.size(kernel)} more" if kernel else ""),
        style="bold",
    )
    if missing < m.examples * terms:
        console.line(f"  going on: {missing:,} of {m.examples * terms:,} are still to do")
    device = device_of(runner.inputs.model)
    if device.type != "cpu":
        console.line(f"  on {device}: passes, kernels and scores; on the host: data and files")
    _print_routes(runner.coverage(0), m.resolved.pass_size)


def _print_routes(coverage: Coverage, pass_size: int) -> None:
    rules = Counter(type(hooked.rule).__name__ for hooked in coverage.modules if hooked.layout)
    counts = ", ".join(f"{n} × {name}" for name, n in rules.most_common())
    console.line(f"  by layer rules: {counts or 'none'}; {console.counted(pass_size, 'example')} in a pass")
    for route, names in (
        ("by one copy for each example", list(coverage.expanded)),
        ("by torch.func.vmap", coverage.vmapped),
        ("by one backward pass for each example (slow)", coverage.looped),
        ("no gradient on the examples tried", coverage.unused),
    ):
        if names:
            console.line(f"  {route}: {', '.join(names)}")


def _name_terms(runner: FeatureRunner) -> str:
    """What several features of an example are of."""
    if isinstance(runner.method, methods.Fisher) and runner.method.labels > 1:
        return "checkpoints and labels" if len(runner.manifest.models) > 1 else "labels"
    return "checkpoints" if len(runner.manifest.models) > 1 else "steps"
