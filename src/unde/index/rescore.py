"""Scores of candidates from larger features: gradients computed under a larger projection, or those of another index.

A small store finds a thousand candidates of each query; a larger one says which of them are the best. Their gradients
stream by as all do under `unde.attribute`, once for as many queries as the memory budget holds features of. The kernel
of EKFAC is fitted to whole gradients of a sample of the training data, once for an open index, and that of LoGRA to the
features of a sample under the projection. Other kernels are fitted to the features of all training examples, so they
need an index of the larger projection, of which rows of candidates alone are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from unde import console
from unde.data import Rows
from unde.devices import put
from unde.errors import UndeError
from unde.fingerprints import reads_differently
from unde.index.gradient_kernel import KERNELS, is_by_layer, split_memory
from unde.index.gradient_scores import GradientScores, GradientStream
from unde.index.query_features import QueryFeatures
from unde.index.state import IndexState
from unde.kernels import Identity
from unde.methods import Method, TracIn
from unde.projection import Spec
from unde.scoring.blocks import cut
from unde.scoring.candidates import CandidateNorms, Candidates, CandidateScores, candidate_positions
from unde.scoring.group_scores import GroupScores
from unde.scoring.train_features import SelectedFeatures

QUERY_SHARE = 4  # features of queries take at most 1/4 of the memory budget
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
        linear = torch.zeros(*where.shape, len(scores.partition))
        with console.progress("rescoring", len(distinct), unit="examples") as advance:
            for q in _query_blocks(some):
                for rows, parts in replace(some, method=TracIn()).stream(q):
                    _add(linear[q], within[q], rows, parts)
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
        if kernel != Identity() and not (whole or is_by_layer(kernel)):
            raise UndeError(
                f"{type(scores.method).__name__} has a kernel, which is fitted to the features of all training "
                f"examples, and there are none under {spec}: build an index with that projection and pass it, "
                "scores.rescore(top, index=larger); or score by 'tracin', which needs no kernel. Those of EKFAC and of "
                "the diagonal metric are fitted to whole gradients, projection='none', and that of LoGRA with "
                "fisher='empirical' to any projection"
            )
        method, state = replace(scores.method, projection=str(spec)), self.state
        runner = state.runner
        inputs = state.build_inputs("gradients of training examples are computed anew")
        data = self._query_data(scores, queries, "queries=…")
        if isinstance(data, QueryFeatures):
            raise UndeError(
                f"these are features of queries, which have no other projection than that of their index: pass the "
                f"queries themselves to rescore under {spec}"
            )
        rows = data if isinstance(data, Rows) else Rows(data, runner.inputs.task.collate)
        runner.check_model()
        there = state.stored.compute
        runner = runner.with_method(
            method, inputs, lambda m: split_memory(method, m, there.memory, there) // 2
        )
        stream = GradientStream(runner, scores.partition, way_out="leave it out of the candidates")
        usable = (~state.stored.skipped).nonzero()[:, 0]
        kept, memory = state.gradient_moments, state.stored.memory
        computed = GradientScores(stream, method, rows, memory, there, kept=kept, usable=usable)
        rescored = self._collect(scores, where, computed)
        digests = zip(computed.query_digests, scores.query_digests)
        for i, (now, then) in enumerate(digests if queries is None else ()):
            if now != then:
                raise reads_differently(f"{i} of the queries")
        return rescored

    def _collect(self, scores: GroupScores, where: Tensor, computed: GradientScores) -> CandidateScores:
        """Stream the candidates of each block of queries; keep what each query has for its own."""
        m, groups, distinct = computed.stream.runner.manifest, len(scores.partition), where.unique()
        within, count = torch.searchsorted(distinct, where), len(distinct)
        linear, squares = torch.zeros(*where.shape, groups), torch.zeros(m.terms, count, groups)
        extra = torch.zeros(count, len(computed.method.extra_measures))
        stored = self.state.stored.values("digest")[distinct]
        step = max(1, min(scores.memory, scores.block_memory) // (QUERY_SHARE * 4 * m.width))
        blocks = list(cut(slice(0, len(scores)), step))
        some = [where[q].unique() for q in blocks]
        for c, i, rows, part in computed.parts(blocks, "rescoring", some):
            at = torch.searchsorted(distinct, some[i][rows])
            changed = (part["digest"] != stored[at]).nonzero()[:, 0]
            if len(changed):
                raise reads_differently(int(some[i][rows][changed[0]]))
            here = torch.searchsorted(some[i], where[blocks[i]])
            _add(linear[blocks[i]], here, rows, part["parts"])
            squares[c, at], extra[at] = part["norms"], part["extra"]
        norms = CandidateNorms(
            computed.query_squares,
            squares.sum(0),
            leverage=_no_kernel,
            extra_values=lambda: extra,
            where=within,
        )
        made = {"method": computed.method.describe(), "candidates": scores.provenance}
        return _candidate_scores(scores, where, linear, norms, computed.method, scores.provenance | made)

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


def _add(linear: Tensor, within: Tensor, rows: slice, parts: Tensor) -> None:
    """Add contributions (q, n, M) of the distinct candidates `rows` where they are candidates, `within` (q, k)."""
    q, r = ((within >= rows.start) & (within < rows.stop)).nonzero(as_tuple=True)
    at = put(torch.stack([q, within[q, r] - rows.start]), parts.device)
    linear[q, r] += parts[at[0], at[1]].cpu()


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
