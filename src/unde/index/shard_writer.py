"""Shards: the one job of a build, what is still to do, and what is looked at when all is done."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unde import console, methods
from unde.data import evenly, to_device
from unde.errors import BadExample, UndeError
from unde.fingerprints import SAMPLED, changed_example, length_now, reads_differently, to_signed
from unde.gradients.factors import gathered
from unde.gradients.feature_pass import Batch, FeaturePass, PassResult, threads
from unde.index.build_context import Context
from unde.index.failing_example import blaming
from unde.index.running import close_on_error
from unde.pages import kept_pages
from unde.parallel import SERIAL, Executor, Job, JobsFailed
from unde.store import layout
from unde.store.files import append_line, clear_partial
from unde.store.manifest import Manifest
from unde.store.remote import Remote, StorePath, exists
from unde.store.shards import ShardError, damaged, file_bytes, read_shard

BESIDE = "beside"  # measures that the method keeps beside features


class GivenUp(UndeError):
    """Some shards failed again and again; the others are done, and the same call goes on with the rest."""


def compute_shard(context: Context, c: int, s: int) -> None:
    """The features of shard s under checkpoint c, written to its file: the same bytes whoever computes them."""
    m, given = context.manifest, context.given
    rows = m.shards[s]
    with (
        blaming(given.model, given.task, given.rows, lambda: range(rows.start, rows.stop), context.ids),
        close_on_error(context),
    ):
        whole = _computed(context, c, s)
    context.behind.write(m.shard(context.folder, c, s), m.files[s][1], whole)


def _computed(context: Context, c: int, s: int) -> dict[str, Tensor]:
    m = context.manifest
    with threads(m.settled.threads):
        run = context.running(c)
        features = context.behind.memory(_length(context, s), m.width)
        parts: list[dict[str, Tensor]] = []
        for rows, found in zip(context.cuts(s), run.over(_read(context, c, s), features)):
            parts.append(_tensors(context, run, rows, found))
            _gather(parts)
            context.advance(len(rows))
        return _joined(parts) | m.codec.pack(features, m.columns)


def content(m: Manifest, rows: int, precision: torch.dtype) -> dict[str, Tensor]:
    """What the file of a shard of so many rows holds, as tensors that take no memory. `precision` is that in which
    features are computed."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = m.codec.layout(rows, m.columns)
    found = {name: empty(*shape, dtype=dtype) for name, (shape, dtype) in packed.items()} | {
        "squares": empty(rows, len(m.units)),
        "loss": empty(rows),
        "skipped": empty(rows, dtype=torch.uint8),
        "digest": empty(rows, dtype=torch.int64),
    }
    if beside := methods.parse(m.method).beside:
        found[BESIDE] = empty(rows, len(beside))
    if m.factors:
        sizes = gathered(m.units, m.method["projection"])
        found["factors"] = empty(sum(r * r + c * c for r, c in sizes.values()), dtype=precision)
    return found


class Shapes:
    """What the shards of an index hold, by the length of a shard."""

    def __init__(self, m: Manifest) -> None:
        self.m = m
        self._by_number = {number: s for s, (number, _) in enumerate(m.files)}
        self._known: dict[int, dict[str, tuple[int, ...]]] = {}

    def read(self, path: StorePath, verify: bool = True) -> dict[str, Tensor]:
        """The tensors of a shard. One that is made up is refused by its shapes, before it is read to its end; one that
        was fetched was read."""
        place = layout.numbers(path.name)
        assert place is not None
        s = self._by_number[place[1]]
        owner = self.m.files[s][1]
        if verify and not isinstance(path, Remote):
            self._check(path, s, read_shard(path, owner, False))
        tensors = read_shard(path, owner, verify)
        self._check(path, s, tensors)
        rows = self.m.shards[s]
        with damaged(path):
            self.m.codec.check(tensors, rows.stop - rows.start, self.m.columns)
        return tensors

    def has(self, path: StorePath) -> bool:
        """Whether it is called like a shard of the index."""
        place = layout.numbers(path.name)
        return place is not None and place[0] < self.m.terms and place[1] in self._by_number

    def _check(self, path: StorePath, s: int, tensors: Mapping[str, Tensor]) -> None:
        """Raises if a shard, whole as it may be, is larger or smaller than the manifest says; nothing of it is read."""
        rows = self.m.shards[s]
        wanted = dict(self._of(rows.stop - rows.start))
        for name, t in tensors.items():
            if wanted.pop(name, None) != tuple(t.shape):
                raise ShardError(
                    f"shard {path} is damaged: {name!r} of shape {tuple(t.shape)} is not in its plan"
                )
        if wanted:
            raise ShardError(f"shard {path} is damaged: {', '.join(map(repr, wanted))} is not in it")

    def _of(self, rows: int) -> dict[str, tuple[int, ...]]:
        if rows not in self._known:
            found = content(self.m, rows, torch.float32)
            self._known[rows] = {name: tuple(t.shape) for name, t in found.items()}
        return self._known[rows]


def on_disk(m: Manifest, precision: torch.dtype) -> dict[str, int]:
    """Bytes of all shards, by what is in them."""
    features = m.terms * m.codec.nbytes(m.examples, m.columns)
    whole = covariances = 0
    for rows, count in Counter(r.stop - r.start for r in m.shards).items():
        tensors = content(m, rows, precision)
        whole += count * sum(file_bytes(tensors, layout.shard(Path(), c, 0).name) for c in range(m.terms))
        covariances += count * m.terms * (tensors["factors"].nbytes if m.factors else 0)
    found = {"features": features, "norms, losses, digests": whole - features - covariances}
    return found | ({"covariances": covariances} if m.factors else {})


def waiting(m: Manifest, precision: torch.dtype) -> int:
    """Bytes that are there while a pass runs, beside its own features: the other rows of its shard, the shard before
    it that is being sent, and covariances, of which each pass has its own."""
    rows, size = _rows(m), min(_rows(m), m.settled.pass_size)
    covariances = content(m, 0, precision)["factors"].nbytes if m.factors else 0
    return 4 * (rows - size) * m.width + (2 if rows > size else 1) * covariances + _behind(m, precision)


def _behind(m: Manifest, precision: torch.dtype) -> int:
    """Bytes of a shard that is sent to an object store while the next one is computed, a copy of it. None on a disk."""
    several = m.examples > _rows(m)
    return sum(t.nbytes for t in content(m, _rows(m), precision).values()) if several else 0


def writing(m: Manifest, precision: torch.dtype) -> int:
    """Bytes while a shard is packed and written, with the one before it."""
    tensors, features = content(m, _rows(m), precision), 4 * _rows(m) * m.width
    stored = m.codec
    packed = 0 if stored.mapped else stored.nbytes(_rows(m), m.columns)
    column = stored.columns_packed * 4 * _rows(m) * max(u["size"] for u in m.units)  # one after the other
    covariances = tensors["factors"].nbytes if m.factors else 0
    return features + covariances + packed + column + _behind(m, precision)


def _rows(m: Manifest) -> int:
    """Of the largest shard."""
    return min(m.examples, m.settled.shard_size)


@kept_pages()
def compute(context: Context, jobs: list[Job], executor: Executor) -> None:
    """All jobs, and what they cost; then a look at whether the data stayed what it was."""
    started = time.perf_counter()
    context.upcoming, context.behind.at_once = jobs, not executor.here
    try:
        for _, s in executor.run(compute_shard, context, jobs):
            if not executor.here:
                context.advance(_length(context, s))
        context.behind.wait()
    except JobsFailed as e:
        raise _failed(context, e.reasons) from None
    finally:
        context.close()
    _log(context, sum(_length(context, s) for _, s in jobs), time.perf_counter() - started)
    if executor.alone:
        clear_partial(context.folder / layout.SHARDS)  # what workers left that were killed
        check(context)


def check(context: Context) -> None:
    """Whether the data stayed what it was, from the first shard to the last."""
    m = context.manifest
    _check_checkpoints_agree(context)
    if length_now(context.given.rows) != m.examples:
        raise _other_length(context)
    where = torch.tensor(evenly(m.examples, SAMPLED))
    changed = changed_example(context.given.rows, where, _digests(context)[where])
    if changed is not None:
        raise reads_differently(changed)


def unwritten(context: Context) -> list[Job]:
    """Shards that are not there, whether they are whole or not."""
    m = context.manifest
    jobs = [(c, s) for c in range(m.terms) for s in range(len(m.shards))]
    return [job for job in jobs if not exists(m.shard(context.folder, *job))]


def missing(context: Context, executor: Executor = SERIAL) -> list[Job]:
    """What is still to compute by `executor`; damaged shards are named and count as missing."""
    m, jobs = context.manifest, []
    where, digests = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    if executor.alone:
        clear_partial(context.folder / layout.SHARDS)
    written, shapes = layout.listed(context.folder / layout.SHARDS), Shapes(m)
    for c in range(m.terms):
        for s, r in enumerate(m.shards):
            if not executor.mine((c, s)):
                continue
            path = m.shard(context.folder, c, s)
            try:
                if path.name in written:
                    digests.append(shapes.read(path)["digest"].clone())
                    where.append(torch.arange(r.start, r.stop))
                    continue
            except ShardError as e:
                console.note(f"{e}: computing it again")
            jobs.append((c, s))
    changed = changed_example(context.given.rows, torch.cat(where), torch.cat(digests))
    if changed is not None:
        raise UndeError(
            f"example {changed} reads differently than when {context.folder} was begun: the data changed. "
            "Restore the data, or build in another folder"
        )
    return jobs


def _read(context: Context, c: int, s: int) -> Iterator[Batch]:
    """The batches of a shard, with the numbers under which their examples are measured."""
    batches = context.batches(c, s)
    while True:
        try:
            where, batch, digests = next(batches)
            yield context.drawn(where), batch, digests
        except StopIteration:
            return
        except IndexError:
            if length_now(context.given.rows) == context.manifest.examples:
                raise
            raise _other_length(context) from None


def _tensors(context: Context, run: FeaturePass, rows: range, found: PassResult) -> dict[str, Tensor]:
    """What is stored of one pass over `rows` beside its features; examples with bad gradients are refused, or left out
    and noted."""
    norms = [torch.linalg.vector_norm(found.features[:, x], dim=1) for x in context.manifest.columns]
    squares = torch.stack(norms, 1).square_()  # read once: a sum of squares makes a copy of them
    finite = squares.isfinite().all(1) & found.values.isfinite()
    if not finite.all():  # or too large to be squared
        finite = found.features.isfinite().all(1) & found.values.isfinite()
    if not finite.all():
        if context.manifest.on_bad == "error":
            raise _bad(context, [rows[int(i)] for i in (~finite).nonzero()[:, 0]])
        found.features[~finite] = squares[~finite] = 0.0
    beside = {"beside": found.beside} if context.method.beside else {}
    if run.factors is not None:
        beside["factors"] = run.factors.take().cpu()
        if not finite.all():
            beside["factors"] = covariances(context, run, [rows[int(i)] for i in finite.nonzero()[:, 0]])
    return beside | {
        "squares": squares,
        "loss": found.values,
        "skipped": (~finite).to(torch.uint8),
        "digest": torch.tensor([to_signed(d) for d in found.digests], dtype=torch.int64),
    }


def covariances(context: Context, run: FeaturePass, rows: Sequence[int]) -> Tensor:
    """Those of some examples alone, in one pass."""
    assert run.factors is not None
    if rows:
        run.collect(to_device(context.given.rows.batch(rows), run.collect.device), context.drawn(rows))
    return run.factors.take().cpu()


def _bad(context: Context, bad: list[int]) -> UndeError:
    named = bad if context.ids is None else [context.ids[i] for i in bad]
    more = f" (and of {len(bad) - 1} more in its batch)" if len(bad) > 1 else ""
    return BadExample(
        f"the gradient of example {named[0]!r} is NaN or infinite{more}: look at the example and the model, or build "
        "with on_bad='skip' to leave it out"
    )


def _gather(parts: list[dict[str, Tensor]]) -> None:
    """The covariances of the last pass go to those of the first: there is one sum of them at any time."""
    if len(parts) > 1 and "factors" in parts[-1]:
        parts[0]["factors"] += parts[-1].pop("factors")


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The passes of a shard as one, rows one after the other. `parts` are spent."""
    whole = dict(parts[0])
    if len(parts) > 1:
        whole |= {name: torch.cat([part[name] for part in parts]) for name in whole if name != "factors"}
    parts.clear()
    return whole


def _digests(context: Context, c: int = 0) -> Tensor:
    m = context.manifest
    found = [
        read_shard(m.shard(context.folder, c, s), owner, verify=False)["digest"].clone()  # no views
        for s, (_, owner) in enumerate(m.files)
    ]
    return torch.cat(found)


def _check_checkpoints_agree(context: Context) -> None:
    """Each checkpoint reads the data again: it must be what the first one read."""
    first = _digests(context)
    for c in range(1, context.manifest.terms):
        changed = (first != _digests(context, c)).nonzero()[:, 0]
        if len(changed):
            raise reads_differently(int(changed[0]))


def _failed(context: Context, reasons: dict[Job, str]) -> UndeError:
    (c, s), reason = next(iter(reasons.items()))
    rows = context.manifest.shards[s]
    more = f" So did {len(reasons) - 1} more." if len(reasons) > 1 else ""
    return GivenUp(
        f"shard {s} (examples {rows.start} to {rows.stop - 1}, checkpoint {c}) failed again and again: {reason}\n"
        f"All others are done.{more} Mend what is wrong and run the same call again, it goes on where it stopped"
    )


def _length(context: Context, s: int) -> int:
    rows = context.manifest.shards[s]
    return rows.stop - rows.start


def _other_length(context: Context) -> UndeError:
    return UndeError(
        f"the length of the data changed while it was read: {context.manifest.examples} examples at first, "
        f"now {length_now(context.given.rows)}. Build from data that stays as it is"
    )


def _log(context: Context, examples: int, seconds: float) -> None:
    """How long it took, apart from what the index is: this file is no part of its identity."""
    entry = {
        "examples": examples,
        "seconds": round(seconds, 6),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    append_line(context.folder / layout.LOG, json.dumps(entry))
