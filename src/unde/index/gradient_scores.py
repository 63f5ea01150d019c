"""Scores by gradients that are computed anew: those of queries are held with K applied, those of training examples
stream by.

    score(q, n)_j = Σ_c η_c ⟨ [K_c g^c(q)]_j, g_j^c(n) ⟩

`unde.attribute` streams all training examples, `scores.rescore` the candidates of some queries. A job is a run of
neighbouring passes under one checkpoint. In this process it is one pass; other processes take more of them together,
and read the queries from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.data import Rows, evenly, to_device
from unde.devices import Compute, put
from unde.fingerprints import to_digest, to_signed_tensor
from unde.gradients.feature_pass import split_range, torch_threads
from unde.groups import Groups
from unde.index.feature_runner import FeatureRunner, bad_gradient, raise_failing_example, raise_failing_sample
from unde.index.gradient_kernel import (
    Kept,
    QueryFactors,
    apply_in_place,
    fit_to_gradients,
    gradient_dampings,
    is_by_layer,
    solve,
    split_memory,
)
from unde.index.query_features import BadQuery
from unde.kernels.base import Fitted, ParameterColumns
from unde.methods import Method
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.parallel.model_transport import BuildInputs
from unde.scoring.blocks import TINY, ScoreRange
from unde.scoring.query_side import Run, join
from unde.store.remote import StorePath
from unde.store.shards import Results, read_shard, write_shard

OWNER = "unde.attribute"
PROBED = 4  # training examples whose scores tell how much is lost where queries are held as outer products
_QUERIES = "queries.safetensors"
_PASSES = 64  # of a job for another process, at most
_RESULT_BYTES = 2**26  # of such a job, at most


class GradientStream:
    """Inner products of the gradients of training examples with queries, group by group.

    Args:
        runner: The model, task and data.
        partition: The groups of parameters.
        ids: The users' names of the examples.
        folder: Where other processes read queries and write results; None for this process.
        factors: What is held of queries; None: whole gradients.
        way_out: What to do about an example whose gradient is NaN or infinite.
    """

    def __init__(
        self,
        runner: FeatureRunner,
        partition: Groups,
        ids: Sequence[Any] | None = None,
        folder: StorePath | None = None,
        factors: QueryFactors | None = None,
        way_out: str = "look at the example and the model, or leave it out of the training data",
    ) -> None:
        self.runner, self.partition, self.ids, self.folder = runner, partition, ids, folder
        self.factors, self.way_out = factors, way_out
        self.step = runner.manifest.resolved.pass_size  # examples of a job
        self.results = Results(OWNER, folder)
        self.kernel: Fitted | None = None  # acts on training examples where it mixes groups
        self._queries: Tensor | None = None
        self.data, self.names = self.inputs.rows, ids

    def select(self, which: Tensor) -> GradientStream:
        """The stream of some training examples, by position, in this process."""
        some, where = GradientStream(self.runner, self.partition, way_out=self.way_out), which.tolist()
        some.data, some.kernel = self.inputs.rows.subset(where), self.kernel
        some.names = where if self.ids is None else [self.ids[i] for i in where]
        some.numbers = self.runner.sample_numbers(where)
        return some

    def __getstate__(self) -> dict[str, Any]:
        names = ("runner", "partition", "ids", "folder", "step", "results", "factors", "way_out")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, kernel=None, _queries=None)
        self.data, self.names = self.inputs.rows, self.ids
        self.inputs.check_data(self.runner.manifest, self.runner.folder)

    @property
    def inputs(self) -> BuildInputs:
        """The model, task and data."""
        inputs = self.runner.inputs
        assert isinstance(inputs, BuildInputs)
        return inputs

    @cached_property
    def numbers(self) -> Sequence[int]:
        """What seeds the random draws of the examples."""
        return self.runner.manifest.numbers

    @cached_property
    def _runs(self) -> list[Run]:
        """Neighbouring columns of each group."""
        m = self.runner.manifest
        return list(join(zip(self.partition.of(m.unit_names), m.columns)))

    def close(self) -> None:
        """Restore the model."""
        self.runner.close()

    def rows(self, s: int) -> slice:
        """The examples of job s."""
        return slice(s * self.step, min((s + 1) * self.step, len(self.data)))

    def over(
        self, queries: Tensor, c: int, executor: Executor, title: str
    ) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """(examples, results) under checkpoint c, in any order; `queries` (Q, ·) have K applied."""
        m, groups = self.runner.manifest, len(self.partition)
        if self.folder is None:
            self._queries = queries
        else:
            most = max(1, _RESULT_BYTES // (4 * max(1, len(queries)) * groups * m.resolved.pass_size))
            self.step = m.resolved.pass_size * min(_PASSES, most)
            write_shard(self.folder / _QUERIES, OWNER, {"queries": queries})
        jobs: list[Job] = [(c, s) for s in range(-(-len(self.data) // self.step))]
        try:
            for job in run_with_progress(
                executor,
                GradientStream.put,
                self,
                jobs,
                title,
                describe=lambda job: f"examples {self.rows(job[1]).start} to {self.rows(job[1]).stop - 1}",
                size=lambda job: self.rows(job[1]).stop - self.rows(job[1]).start,
                unit="examples",
            ):
                yield self.rows(job[1]), self.results.take(job)
        finally:
            self.close()
            self._queries = None

    def put(self, c: int, s: int) -> None:
        """Compute job (c, s)."""
        rows, m, inputs = self.rows(s), self.runner.manifest, self.inputs
        where = range(rows.start, rows.stop)
        with (
            raise_failing_example(
                inputs.model, inputs.task, self.data, lambda: where, self.names, close=self.close
            ),
            torch_threads(m.resolved.threads),
        ):
            parts = [self._pass(c, cut) for cut in split_range(where, m.resolved.pass_size)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "parts"}
        self.results.put((c, s), joined | {"parts": torch.cat([part["parts"] for part in parts], 1)})

    def _pass(self, c: int, cut: range) -> dict[str, Tensor]:
        """Contributions (Q, n, M), squared norms (n, M), further measures and digests of the examples of a pass."""
        run = self.runner.open_pass(c, factors=False)
        [(where, batch, digests)] = self.data.batches([cut])
        batch = run.collect.task.batching.prepare(batch)
        numbers = [self.numbers[i] for i in where]
        features, values = run.collect(to_device(batch, run.collect.device), numbers)
        features = run.scale(features).float()
        norms = self.squared_norms(features)
        if not (norms.isfinite().all() and values.isfinite().all()):  # or too large to be squared
            finite = features.isfinite().all(1) & values.isfinite()
            if not finite.all():
                bad = [cut[int(i)] for i in (~finite).nonzero()[:, 0]]
                raise bad_gradient([i if self.names is None else self.names[i] for i in bad], self.way_out)
        if self.kernel is not None:
            features = apply_in_place(self.kernel, features)
        parts = self._products(self._held(features.device), features)
        tensors = {"parts": parts.permute(2, 1, 0), "norms": norms, "extra": run.collect.extra.float()}
        return {name: t.cpu() for name, t in tensors.items()} | {"digest": to_signed_tensor(digests)}

    def _held(self, device: torch.device) -> Tensor:
        """The queries, where gradients are computed."""
        if self._queries is None:
            assert self.folder is not None
            self._queries = read_shard(self.folder / _QUERIES, OWNER)["queries"]
        self._queries = self._queries.to(device)
        return self._queries

    def squared_norms(self, features: Tensor) -> Tensor:
        """(n, M) squared norms."""
        out = features.new_zeros(len(features), len(self.partition))
        for j, columns in self._runs:
            out[:, j] += torch.linalg.vector_norm(features[:, columns], dim=1).square_()
        return out

    def _products(self, queries: Tensor, features: Tensor) -> Tensor:
        """(M, n, Q); products with Q columns take less time than those with n, which are fewer."""
        out = features.new_zeros(len(self.partition), len(features), len(queries))
        if self.factors is not None:
            groups = self.partition.of(self.runner.manifest.unit_names)
            return self.factors.products(queries, features, groups, out)
        for j, columns in self._runs:
            out[j].addmm_(features[:, columns], queries[:, columns].T)
        return out

    def splits_layers(self) -> bool:
        """Whether parameters of a layer are in different groups."""
        m, groups = self.runner.manifest, dict[str, int]()
        parts = [ParameterColumns(name, columns) for name, columns in zip(m.unit_names, m.columns)]
        return any(groups.setdefault(p.layer, j) != j for p, j in zip(parts, self.partition.of(m.unit_names)))


@dataclass
class GradientScores:
    """Queries on their way through the training data.

    Args:
        memory: The budget in bytes for what kernels are fitted to.
        there: Where K is applied.
        kept: Moments of kernels that stay for later calls; None keeps those of one checkpoint at a time.
        usable: Positions of training examples that kernels may be fitted to; all by default.
        cg: Steps of conjugate gradients.
    """

    stream: GradientStream
    method: Method
    queries: Rows
    memory: int
    there: Compute
    executor: Executor = SERIAL
    kept: Kept | None = None
    usable: Tensor | None = None
    cg: int = 0
    query_digests: list[str] = field(default_factory=list)
    query_squares: Tensor = field(init=False)  # (Q, M) squared norms
    probe: Tensor = field(default_factory=lambda: torch.empty(0))  # gradients of a few training examples
    errors: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def __post_init__(self) -> None:
        self.query_squares = torch.zeros(len(self.queries), len(self.stream.partition))

    def parts(
        self, blocks: Sequence[slice], title: str, which: Sequence[Tensor] | None = None
    ) -> Iterator[tuple[int, int, slice, Mapping[str, Tensor]]]:
        """(checkpoint, block of queries, examples, their results), with contributions and norms times η; of all
        training examples, or of those at the positions `which` for each block."""
        sizes = ScoreRange(len(self.queries))
        for c, eta in enumerate(self.stream.runner.manifest.checkpoint_weights):
            kept: Kept = {} if self.kept is None else self.kept
            fitted = None
            for i, block in enumerate(blocks):
                fitted = fitted or self._fit(c, kept)
                held = self._hold(block, c, fitted, kept)
                stream = self.stream if which is None else self.stream.select(which[i])
                if i == len(blocks) - 1:
                    fitted = None  # eigenvectors are large
                    if self.kept is None:
                        kept.clear()
                of_block = f"{title}, {i + 1} of {len(blocks)}" if len(blocks) > 1 else title
                for rows, part in stream.over(held, c, self.executor, of_block):
                    parts = sizes.update(block, eta * part["parts"])
                    yield c, i, rows, {**part, "parts": parts, "norms": eta * part["norms"]}
                del held
            self.stream.kernel = None

    def check_model(self) -> None:
        """Raise what the model cannot run on before the kernel is fitted, which takes longer."""
        for _ in self.stream.runner.passes(self.queries.subset([0]), 0):
            pass

    def _fit(self, c: int, kept: Kept) -> Fitted:
        stream = self.stream
        rows, at = stream.inputs.rows, (c, self.split(self.memory), self.there, kept)
        with raise_failing_sample(stream.inputs, stream.ids):
            return fit_to_gradients(self.method, stream.runner, rows, *at, self.usable)

    def split(self, memory: int) -> int:
        """The part of a budget that K leaves to passes."""
        return split_memory(self.method, self.stream.runner.manifest, memory, self.there)

    def _hold(self, block: slice, c: int, fitted: Fitted, kept: Kept) -> Tensor:
        """What is held of a block of queries under checkpoint c: K g(q), (q, D), or outer products of it."""
        stream, runner, inputs = self.stream, self.stream.runner, self.stream.inputs
        factors = None if self.cg else stream.factors
        stream.kernel = fitted if is_by_layer(self.method.kernel) and stream.splits_layers() else None
        width = runner.manifest.width if factors is None else factors.width
        held = torch.empty(block.stop - block.start, width, device=self.there.device)
        for here, part in runner.passes(self.queries.subset(range(block.start, block.stop)), c):
            features = put(part["features"], self.there.device)
            bad = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
            if bad:
                raise BadQuery(block.start + here.start + bad[0], len(bad))
            rows = slice(block.start + here.start, block.start + here.stop)
            squares = stream.squared_norms(features).cpu()
            self.query_squares[rows] += runner.manifest.checkpoint_weights[c] * squares
            if not self.cg and stream.kernel is None:
                features = apply_in_place(fitted, features)
            held[here.start : here.stop] = features if factors is None else self._pack(features, c)
            if c == 0:
                self.query_digests += [to_digest(d) for d in part["digest"].tolist()]
        if self.cg:
            dampings = gradient_dampings(self.method, runner, c, kept)
            held, residual = solve(self.method, runner, inputs.rows, c, fitted, dampings, held, self.cg)
            console.line(
                f"conjugate gradients: {self.cg} steps leave {float(residual.median()):.1%} of a gradient unexplained, "
                f"at most {float(residual.max()):.1%}"
            )
            held = held if stream.factors is None else self._pack(held, c)
        if stream.factors is not None:
            off, size = self.errors.tolist()
            console.line(
                f"queries held as {stream.factors.rank} outer products of each matrix: scores of "
                f"{len(self.probe)} examples are off by {(off / max(size, TINY)) ** 0.5:.1%}"
            )
        return held

    def _pack(self, queries: Tensor, c: int) -> Tensor:
        """What is held of queries (q, D), after a look at how much their scores with a few examples change."""
        factors, runner = self.stream.factors, self.stream.runner
        assert factors is not None
        if not len(self.probe):
            rows = self.stream.inputs.rows
            passes = runner.passes(rows.subset(evenly(len(rows), PROBED)), c)
            self.probe = torch.cat([put(part["features"], self.there.device) for _, part in passes])
        held = factors.pack(queries)
        self.errors += factors.error(queries, held, self.probe).cpu().double()
        return held
