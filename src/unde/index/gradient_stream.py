"""Jobs that multiply gradients of training examples with those of queries, and forget them.

A job is a run of neighbouring passes under one checkpoint. In this process a job is one pass; other processes take more
of them together, and read the queries from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde.data import to_device
from unde.errors import BadExample
from unde.fingerprints import to_signed
from unde.gradients.feature_pass import split_range, torch_threads
from unde.groups import Groups
from unde.index.feature_runner import FeatureRunner, raise_failing_example
from unde.index.query_factors import QueryFactors
from unde.parallel import Executor, Job, run_with_progress
from unde.parallel.model_transport import BuildInputs
from unde.scoring.query_side import Run, join
from unde.store.remote import StorePath
from unde.store.shards import Results, read_shard, write_shard

OWNER = "unde.attribute"
_QUERIES = "queries.safetensors"
_PASSES = 64  # of a job for another process, at most
_RESULT_BYTES = 2**26  # of such a job, at most


class GradientStream:
    """Inner products of the gradients of all training examples with queries, group by group.

    Args:
        runner: The model, task and data; its units are whole gradients.
        partition: The groups of parameters.
        ids: The users' names of the examples.
        folder: Where other processes read queries and write results; None for this process.
        factors: What is held of queries; None: whole gradients.
    """

    def __init__(
        self,
        runner: FeatureRunner,
        partition: Groups,
        ids: Sequence[Any] | None = None,
        folder: StorePath | None = None,
        factors: QueryFactors | None = None,
    ) -> None:
        self.runner, self.partition, self.ids, self.folder = runner, partition, ids, folder
        self.factors = factors
        self.step = runner.manifest.resolved.pass_size  # examples of a job
        self.results = Results(OWNER, folder)
        self._queries: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("runner", "partition", "ids", "folder", "step", "results", "factors")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _queries=None)
        self.inputs.check_data(self.runner.manifest, self.runner.folder)

    @property
    def inputs(self) -> BuildInputs:
        """The model, task and data."""
        inputs = self.runner.inputs
        assert isinstance(inputs, BuildInputs)
        return inputs

    @cached_property
    def _runs(self) -> list[Run]:
        """Neighbouring columns of each group."""
        m = self.runner.manifest
        return list(join(zip(self.partition.of(m.unit_names), m.columns)))

    def close(self) -> None:
        """Restore the model."""
        self.runner.close()

    def rows(self, s: int) -> slice:
        """The training examples of job s."""
        return slice(s * self.step, min((s + 1) * self.step, self.runner.manifest.examples))

    def over(
        self, queries: Tensor, c: int, executor: Executor, title: str
    ) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """(training examples, results) under checkpoint c, in any order; `queries` (Q, ·) have K applied."""
        m, groups = self.runner.manifest, len(self.partition)
        if self.folder is None:
            self._queries = queries
        else:
            most = max(1, _RESULT_BYTES // (4 * max(1, len(queries)) * groups * m.resolved.pass_size))
            self.step = m.resolved.pass_size * min(_PASSES, most)
            write_shard(self.folder / _QUERIES, OWNER, {"queries": queries})
        jobs: list[Job] = [(c, s) for s in range(-(-m.examples // self.step))]
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
        rows, m = self.rows(s), self.runner.manifest
        where = range(rows.start, rows.stop)
        inputs = self.inputs
        with (
            raise_failing_example(
                inputs.model, inputs.task, inputs.rows, lambda: where, self.ids, close=self.close
            ),
            torch_threads(m.resolved.threads),
        ):
            parts = [self._pass(c, cut) for cut in split_range(where, m.resolved.pass_size)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in ("norms", "digest")}
        self.results.put((c, s), joined | {"parts": torch.cat([part["parts"] for part in parts], 1)})

    def _pass(self, c: int, cut: range) -> dict[str, Tensor]:
        """Contributions (Q, n, M), squared norms (n, M) and digests of the examples of a pass."""
        run = self.runner.open_pass(c, factors=False)
        [(where, batch, digests)] = self.inputs.rows.batches([cut])
        numbers = self.runner.sample_numbers(where)
        features, values = run.collect(to_device(batch, run.collect.device), numbers)
        features = features.float()
        norms = self.squared_norms(features)
        if not (norms.isfinite().all() and values.isfinite().all()):  # or too large to be squared
            finite = features.isfinite().all(1) & values.isfinite()
            if not finite.all():
                raise self._bad_example([cut[int(i)] for i in (~finite).nonzero()[:, 0]])
        parts = self._products(self._held(features.device), features)
        digest = torch.tensor([to_signed(d) for d in digests], dtype=torch.int64)
        return {"parts": parts.permute(2, 1, 0).cpu(), "norms": norms.cpu(), "digest": digest}

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

    def _bad_example(self, bad: list[int]) -> BadExample:
        name = bad[0] if self.ids is None else self.ids[bad[0]]
        more = f" (and of {len(bad) - 1} more in its batch)" if len(bad) > 1 else ""
        return BadExample(
            f"the gradient of example {name!r} is NaN or infinite{more}: look at the example and the model, or leave "
            "it out of the training data"
        )
