"""Scores of candidates from larger features: gradients computed under a larger projection, or those of another index.

A small store finds a thousand candidates of each query; a larger one says which of them are the best. Under K = I the
score of a pair depends on nothing but the pair, so gradients of candidates suffice: each is computed once for as many
queries as the memory budget holds features of. The kernel of EKFAC is fitted to whole gradients of a sample of the
training data, once for an open index, and that of LoGRA to the features of a sample under the projection. Other kernels
are fitted to the features of all training examples, so they need an index of the larger projection, of which rows of
candidates alone are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unde import console
from unde.data import Rows, evenly
from unde.devices import put
from unde.errors import BadExample, UndeError
from unde.fingerprints import reads_differently, to_signed
from unde.gradients.feature_pass import exclusive
from unde.gradients.whitening import SAMPLE
from unde.index.feature_runner import FeatureRunner
from unde.index.gradient_kernel import (
    KERNELS,
    Kept,
    apply_in_place,
    fit_to_gradients,
    split_memory,
)
from unde.index.query_features import QueryFeatures
from unde.index.reader import IndexReader
from unde.index.state import IndexState
from unde.kernels import Gram, Identity, TensorSource
from unde.kernels.base import Fitted, Kernel, ParameterColumns, fit_kernel
from unde.kernels.logra import layer_columns
from unde.methods import Method, TracIn
from unde.projection import Spec
from unde.scoring.blocks import cut
from unde.scoring.candidates import CandidateNorms, Candidates, CandidateScores, candidate_positions
from unde.scoring.group_scores import GroupScores
from unde.scoring.train_features import SelectedFeatures, TrainFeatures

QUERY_SHARE = 4  # features of queries take at most 1/4 of the memory budget
TRAIN_SHARE = 8  # and those of candidates that are computed together 1/8
WHOLE = "none"  # the projection that keeps whole gradients


class ScoringIndex(Protocol):
    """An index that scores queries."""

    @property
    def folder(self) -> Any: ...

    def score(self, queries: Any, method: str | Method | None = None) -> GroupScores: ...


@dataclass(frozen=True)
class IndexRescorer:
    """The index and the queries behind scores."""

    state: IndexState
    queries: Rows | None  # None: features were scored in their place

    def select(self, queries: Tensor) -> IndexRescorer:
        if self.queries is None:
            return self
        return replace(self, queries=self.queries.subset(queries.tolist()))

    def rescore(
        self,
        scores: GroupScores,
        top: Candidates,
        projection: str | None,
        index: ScoringIndex | None,
        queries: Any,
    ) -> CandidateScores:
        """See `GroupScores.rescore`."""
        if index is not None and projection is not None:
            raise UndeError("rescore(projection=…, index=…): give one of the two")
        where = candidate_positions(top, scores)
        _check_memory(scores, where)
        if index is not None:
            return self._read(scores, where, index, queries)
        return self._measure(scores, where, projection or WHOLE, queries)

    # --- from another index ----------------------------------------------------------------------------

    def _read(self, scores: GroupScores, where: Tensor, index: ScoringIndex, queries: Any) -> CandidateScores:
        data = self._query_data(scores, queries, "queries=larger.features(…)")
        larger = index.score(data, replace(scores.method, projection=None))
        _check_same(index, larger, scores)
        candidate_positions(where, larger)
        distinct = where.unique()
        some = replace(larger.regroup(scores.partition), train=SelectedFeatures(larger.train, distinct))
        within = torch.searchsorted(distinct, where)
        linear = torch.empty(*where.shape, len(scores.partition))
        with console.progress("rescoring", len(distinct), unit="examples") as advance:
            for q in _query_blocks(some):
                for rows, parts in replace(some, method=TracIn()).stream(q):
                    _put(linear[q], within[q], rows, parts)
                    advance(0 if q.start else rows.stop - rows.start)
        norms = CandidateNorms(
            *_squared_norms(some),
            leverage=lambda: some.leverage,
            extra_values=lambda: some.extra_values,
            where=within,
        )
        provenance = larger.provenance | {"candidates": scores.provenance}
        return _candidate_scores(scores, where, linear, norms, larger.method, provenance)

    # --- from gradients --------------------------------------------------------------------------------

    def _measure(self, scores: GroupScores, where: Tensor, projection: str, queries: Any) -> CandidateScores:
        spec, kernel = Spec.parse(projection), scores.method.kernel
        whole = str(spec) == WHOLE and isinstance(kernel, KERNELS)
        if kernel != Identity() and not (whole or _is_by_layer(kernel)):
            raise UndeError(
                f"{type(scores.method).__name__} has a kernel, which is fitted to the features of all training "
                f"examples, and there are none under {spec}: build an index with that projection and pass it, "
                "scores.rescore(top, index=larger); or score by 'tracin', which needs no kernel. Those of EKFAC and of "
                "the diagonal metric are fitted to whole gradients, projection='none', and that of LoGRA with "
                "fisher='empirical' to any projection"
            )
        method = replace(scores.method, projection=str(spec))
        runner = self.state.runner
        train = self.state.build_inputs("gradients of training examples are computed anew").rows
        data = self._query_data(scores, queries, "queries=…")
        if isinstance(data, QueryFeatures):
            raise UndeError(
                f"these are features of queries, which have no other projection than that of their index: pass the "
                f"queries themselves to rescore under {spec}"
            )
        rows = data if isinstance(data, Rows) else Rows(data, runner.inputs.task.collate)
        runner.check_model()
        measure = OtherProjection(self.state.stored, runner, train, method, self.state.gradient_moments)
        return _CandidatePass(scores, where, measure, rows).run(method)

    def _query_data(self, scores: GroupScores, queries: Any, option: str) -> Any:
        """The queries that were scored, or those passed in their place."""
        data = self.queries if queries is None else queries
        if data is None:
            raise UndeError(
                "these scores were made from features of queries, not from queries, which are needed to rescore: "
                f"pass the same queries, scores.rescore(top, {option})"
            )
        if len(data if isinstance(data, QueryFeatures) else Rows(data)) != len(scores):
            raise UndeError(f"queries= are not the {len(scores)} that were scored: expected the same")
        return data


class OtherProjection:
    """Features of queries and training examples of an index under another projection; nothing is stored.

    Args:
        stored: The index.
        runner: The model of the index.
        train: The training data.
        method: The method with the other projection; a kernel it has acts on the queries.
        moments: What kernels were fitted to before, and are again.
    """

    def __init__(
        self, stored: IndexReader, runner: FeatureRunner, train: Rows, method: Method, moments: Kept
    ) -> None:
        self.moments, self.there = moments, stored.compute
        within = partial(split_memory, method, there=stored.compute)
        self.runner = runner.with_method(method, train, lambda m: within(m, stored.compute.memory) // 2)
        self.method, self.manifest, self.train = method, self.runner.manifest, train
        self.memory = within(self.manifest, stored.memory)
        self._digests, self._skipped = stored.values("digest"), stored.skipped

    def queries(self, rows: Rows) -> Tensor:
        """(C, Q, D) features of queries, with K applied where it does not mix parameters."""
        features = self.runner.features(rows).features
        if isinstance(self.method.kernel, KERNELS) and self.method.kernel != Identity():
            for c, of_checkpoint in enumerate(features):
                at = self.runner, self.train, c, self.memory, self.there
                apply_in_place(fit_to_gradients(self.method, *at, self.moments), of_checkpoint)
        return features

    @cached_property
    def layer_kernels(self) -> list[Fitted]:
        """K of LoGRA under each checkpoint, fitted to the features of a sample."""
        if not _is_by_layer(self.method.kernel):
            return []
        m, there = self.manifest, (~self._skipped).nonzero()[:, 0]
        where = there[evenly(len(there), SAMPLE)]
        need = 4 * m.terms * m.width * len(where)
        if QUERY_SHARE * need > self.memory:
            raise UndeError(
                f"{type(self.method).__name__} under {self.method.projection} is fitted to the features of "
                f"{len(where):,} examples, {console.size(need)}, and a quarter of the memory budget of "
                f"{console.size(self.memory)} is less: raise memory=, or take a smaller projection, "
                "scores.rescore(top, projection='kron(64)')"
            )
        parts = [ParameterColumns(name, columns) for name, columns in zip(m.unit_names, m.columns)]
        fitted = list[Fitted]()
        for features in self.rows(where)[0]:
            source = TensorSource(put(features, self.there.device), parts)
            self.method.kernel.bind(source.sizes).check(self.there.memory, self.there.device)
            fitted.append(fit_kernel(self.method.kernel, source))
        return fitted

    def rows(self, where: Tensor) -> tuple[list[Tensor], Tensor]:
        """Features (n, D) of training examples under each checkpoint, and further measures (n, ·) of the method."""
        numbers, some = where.tolist(), self.train.subset(where.tolist())
        with exclusive(self.runner.inputs.model):
            result = self.runner.compute(
                some, numbers=self.runner.sample_numbers(numbers), names=numbers, what="example"
            )
        wanted = self._digests[where].tolist()
        changed = [i for i, digest, then in zip(numbers, result.digests, wanted) if to_signed(digest) != then]
        if changed:
            raise reads_differently(changed[0])
        bad = (~result.features.isfinite().all(2).all(0)).nonzero()[:, 0].tolist()
        if bad:
            raise BadExample(
                f"the gradient of example {numbers[bad[0]]} is NaN or infinite: leave it out of the candidates"
            )
        return list(result.features), result.beside


class CandidateFeatures(TrainFeatures):
    """Gradients of some training examples, computed block by block; their norms are noted on the way."""

    def __init__(self, computation: _CandidatePass, which: Tensor) -> None:
        m = computation.measure.manifest
        self.computation, self.which = computation, which
        self.units, self.columns, self.checkpoint_weights = m.unit_names, m.columns, m.checkpoint_weights
        self.cuts = list(cut(slice(0, len(which)), computation.step))
        behind = computation.scores.train
        self.device, self.block_memory = behind.device, behind.block_memory
        if kernels := computation.measure.layer_kernels:
            self.kernel_blocks = list(layer_columns(kernels[0].source.sizes.parts).values())

    def apply_kernel(self, checkpoint: int, queries: Tensor) -> Tensor:
        kernels = self.computation.measure.layer_kernels
        return kernels[checkpoint].apply(queries) if kernels else queries

    def block(self, s: int) -> list[Tensor]:
        which = self.which[self.cuts[s]]
        features, extra = self.computation.measure.rows(which)
        block = [put(of_checkpoint, self.device) for of_checkpoint in features]
        self.computation.note(which, self._squared_norms(block).cpu(), extra)
        return block


class _CandidatePass:
    """Candidates measured under another projection."""

    def __init__(self, scores: GroupScores, where: Tensor, measure: OtherProjection, queries: Rows) -> None:
        self.scores, self.where, self.measure, self.queries = scores, where, measure, queries
        m = measure.manifest
        self.distinct = where.unique()
        groups, count = len(scores.partition), len(self.distinct)
        self.group = torch.tensor(scores.partition.of(m.unit_names))
        self.linear = torch.empty(*where.shape, groups)
        self.train_squares, self.query_squares = torch.zeros(count, groups), torch.zeros(len(scores), groups)
        self.extra_values = torch.zeros(count, len(measure.method.extra_measures))
        row = 4 * m.terms * m.width
        memory = min(scores.memory, scores.block_memory)
        self.queries_per_block = max(1, memory // (QUERY_SHARE * row))
        size = m.resolved.pass_size
        self.step = size * max(1, memory // (TRAIN_SHARE * row) // size)

    def run(self, method: Method) -> CandidateScores:
        blocks = list(cut(slice(0, len(self.scores)), self.queries_per_block))
        sets = [self.where[q].unique() for q in blocks]
        with console.progress("rescoring", sum(map(len, sets)), unit="examples") as advance:
            for q, some in zip(blocks, sets):
                self._score_block(q, some, advance)
        norms = CandidateNorms(
            self.query_squares,
            self.train_squares,
            leverage=_no_kernel,
            extra_values=lambda: self.extra_values,
            where=torch.searchsorted(self.distinct, self.where),
        )
        provenance = self.scores.provenance | {
            "method": method.describe(),
            "candidates": self.scores.provenance,
        }
        return _candidate_scores(self.scores, self.where, self.linear, norms, method, provenance)

    def _score_block(self, q: slice, some: Tensor, advance: Callable[[int], None]) -> None:
        """Score a block of queries against its candidates `some`."""
        rows = self.queries.subset(range(q.start, q.stop))
        part = replace(
            self.scores,
            train=CandidateFeatures(self, some),
            queries=self.measure.queries(rows),
            method=TracIn(),
            query_digests=self.scores.query_digests[q],
            query_ids=None,
        )
        self.query_squares[q] = part.query_side.squared_norms
        within = torch.searchsorted(some, self.where[q])
        for block, parts in part.stream(slice(0, len(part))):
            _put(self.linear[q], within, block, parts)
            advance(block.stop - block.start)

    def note(self, which: Tensor, squares: Tensor, extra_values: Tensor) -> None:
        """Keep the squared norms (n, U) and further measures of training examples."""
        at = torch.searchsorted(self.distinct, which)
        groups = self.train_squares.shape[1]
        self.train_squares[at] = torch.zeros(len(which), groups).index_add_(1, self.group, squares)
        self.extra_values[at] = extra_values


def _is_by_layer(kernel: Kernel) -> bool:
    """Whether it is that of LoGRA, of the gradients that candidates have."""
    return isinstance(kernel, Gram) and (kernel.blocks, kernel.fisher) == ("layer", "empirical")


def _put(linear: Tensor, within: Tensor, rows: slice, parts: Tensor) -> None:
    """Contributions (q, n, M) of the distinct candidates `rows` to where they are candidates, `within` (q, k)."""
    q, r = ((within >= rows.start) & (within < rows.stop)).nonzero(as_tuple=True)
    at = put(torch.stack([q, within[q, r] - rows.start]), parts.device)
    linear[q, r] = parts[at[0], at[1]].cpu()


def _squared_norms(scores: GroupScores) -> tuple[Tensor, Tensor]:
    """(Q, M) and (n, M) squared norms, where the method needs them."""
    if scores.method.linear:
        return torch.zeros(len(scores), len(scores.groups)), torch.zeros(scores.shape[1], len(scores.groups))
    return scores.query_side.squared_norms.cpu(), scores.train_squares


def _query_blocks(scores: GroupScores) -> Iterator[slice]:
    """Queries whose contributions with a block of candidates are within the budget."""
    most = max(r.stop - r.start for r in scores.train.cuts)
    each = 16 * most * len(scores.partition)
    return cut(slice(0, len(scores)), max(1, scores.memory // (8 * each)))


def _check_same(index: ScoringIndex, larger: GroupScores, scores: GroupScores) -> None:
    """Raise unless both indexes have the same model, task, examples and parameters."""
    names = {"data": "the training data", "model": "the model", "task": "the task"}
    differ = [
        what for name, what in names.items() if larger.provenance.get(name) != scores.provenance.get(name)
    ]
    if differ or larger.shape[1] != scores.shape[1]:
        raise UndeError(
            f"{index.folder} was made from something else than what is rescored. What differs: "
            f"{'; '.join(differ or ['the training data'])}. Expected an index of the same model and examples"
        )
    if set(larger.train.units) != set(scores.train.units):
        raise UndeError(
            f"{index.folder} covers other parameters than what is rescored: expected the same exclude="
        )


def _check_memory(scores: GroupScores, where: Tensor) -> None:
    groups = len(scores.partition)
    need = 4 * where.numel() * groups
    if need > scores.memory:
        raise UndeError(
            f"the contributions of {where.shape[1]} candidates to {where.shape[0]} queries in {groups} groups need "
            f"{need / 2**30:.3g} GiB, the budget is {scores.memory / 2**30:.3g} GiB: rescore fewer candidates, or "
            "regroup, or raise memory="
        )


def _candidate_scores(
    scores: GroupScores,
    where: Tensor,
    linear: Tensor,
    norms: CandidateNorms,
    method: Method,
    provenance: dict[str, Any],
) -> CandidateScores:
    return CandidateScores(
        where,
        linear,
        norms,
        method,
        scores.groups,
        scores.query_digests,
        provenance,
        scores.memory,
        scores.ids,
        scores.query_ids,
        scores.trained_on,
    )


def _no_kernel() -> Tensor:
    raise UndeError("there is no kernel here, and no leverage: rescore with index=")
