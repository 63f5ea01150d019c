"""Scores of candidates looked at again: under a larger projection, from gradients that are computed anew, or from
another index.

A small store finds a thousand candidates of each query; which of them are the best, a larger one says. Of K = I the
score of a pair depends on nothing but the pair, so gradients of candidates suffice: each is computed once for as many
queries as the memory budget holds features of. Other kernels are fitted to the features of all training examples, so
they need an index of the larger projection, of which rows of candidates alone are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from unde import console
from unde.data import Rows
from unde.errors import BadExample, UndeError
from unde.fingerprints import Watch, reads_differently, to_signed
from unde.gradients.feature_pass import exclusive
from unde.index.query_features import QueryFeatures, QueryRunner
from unde.index.reader import Stored
from unde.index.views import Picked
from unde.kernels import Identity
from unde.methods import Method, TracIn
from unde.projection import Spec
from unde.scoring.blocking import cut
from unde.scoring.candidates import Candidates, CandidateScores, Norms, positions
from unde.scoring.group_scores import GroupScores
from unde.scoring.train_side import TrainSide

QUERIES = 4  # features of queries take at most one in so many of the memory budget
TRAIN = 8  # and those of candidates that are at work together
EVERYTHING = "none"  # the projection that keeps whole gradients


class Asks(Protocol):
    """An index."""

    @property
    def folder(self) -> Any: ...

    def score(self, queries: Any, method: str | Method | None = None) -> GroupScores: ...


@dataclass(frozen=True)
class Asked:
    """What scores were asked with, to ask again."""

    stored: Stored
    query_runner: Callable[[], QueryRunner]  # raises without model and task
    train: Rows | None
    queries: Rows | None  # None: features were given in their place

    def of(self, queries: Tensor) -> Asked:
        if self.queries is None:
            return self
        return replace(self, queries=Rows(Picked(self.queries, queries), self.queries.collate))

    def rescored(
        self,
        scores: GroupScores,
        top: Candidates,
        projection: str | None,
        index: Asks | None,
        queries: Any,
    ) -> CandidateScores:
        if index is not None and projection is not None:
            raise UndeError("rescore(projection=…, index=…): give one of the two")
        where = positions(top, scores, scores.skipped())
        if index is not None:
            return self._from_index(scores, where, index, queries)
        return self._measured(scores, where, projection or EVERYTHING, queries)

    # --- from another index ----------------------------------------------------------------------------

    def _from_index(self, scores: GroupScores, where: Tensor, index: Asks, queries: Any) -> CandidateScores:
        asked = self._asked(scores, queries, "queries=larger.features(…)")
        larger = index.score(asked, replace(scores.method, projection=None))
        differ = [
            what
            for what, name in (("the training data", "data"), ("the model", "model"), ("the task", "task"))
            if larger.provenance.get(name) != scores.provenance.get(name)
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
        positions(where, larger, larger.skipped())
        distinct = where.unique()
        some = replace(larger.regroup(scores.partition), train=larger.train.only(distinct), spread=None)
        within, m = torch.searchsorted(distinct, where), len(scores.partition)
        _check_memory(scores, where, m)
        linear = torch.empty(*where.shape, m)
        with console.progress("rescoring", len(distinct), unit="examples") as advance:
            for q in _query_blocks(some):
                for rows, parts in replace(some, method=TracIn()).stream(q):
                    _put(linear[q], within[q], rows, parts)
                    advance(0 if q.start else rows.stop - rows.start)
        norms = Norms(
            *_squares(some),
            leverage=lambda: some._leverage,
            beside=lambda: some._beside,
            where=within,
        )
        told = larger.provenance | {"candidates": scores.provenance}
        return _made(scores, where, linear, norms, larger.method, told)

    # --- from gradients --------------------------------------------------------------------------------

    def _measured(self, scores: GroupScores, where: Tensor, projection: str, queries: Any) -> CandidateScores:
        spec = Spec.parse(projection)
        if scores.method.kernel != Identity():
            raise UndeError(
                f"{type(scores.method).__name__} has a kernel, which is fitted to the features of all training "
                f"examples, and there are none under {spec}: build an index with that projection and pass it, "
                "scores.rescore(top, index=larger); or score by 'tracin', which needs no kernel"
            )
        if spec.kind == "pca":
            raise UndeError(
                f"the directions of {spec} are found on training data: build an index with that projection and pass "
                "it, scores.rescore(top, index=larger), or use 'kron(64)' or 'none'"
            )
        method = replace(scores.method, projection=str(spec))
        query_runner = self.query_runner()
        if self.train is None:
            raise UndeError(
                "this index was opened without its training data, whose gradients are computed anew: pass "
                "train_data= to Index.open"
            )
        asked = self._asked(scores, queries, "queries=…")
        if isinstance(asked, QueryFeatures):
            raise UndeError(
                f"these are features of queries, which have no other projection than that of their index: pass the "
                f"queries themselves to rescore under {spec}"
            )
        asked = asked if isinstance(asked, Rows) else Rows(asked, query_runner.inputs.task.collate)
        query_runner.check_model()
        work = _Measuring(scores, where, OtherProjection(query_runner, self.train, method), asked)
        return work.done(method)

    def _asked(self, scores: GroupScores, queries: Any, how: str) -> Any:
        """What the scores were asked about, or what is given in its place."""
        found = self.queries if queries is None else queries
        if found is None:
            raise UndeError(
                "these scores were made from features of queries, not from queries, which are needed to rescore: "
                f"pass the same queries, scores.rescore(top, {how})"
            )
        if len(found if isinstance(found, QueryFeatures) else Rows(found)) != len(scores):
            raise UndeError(f"queries= are not the {len(scores)} that were scored: expected the same")
        return found


class OtherProjection:
    """Features of queries and training examples of an index under another projection; nothing is stored."""

    def __init__(self, query_runner: QueryRunner, train: Rows, method: Method) -> None:
        stored, inputs = query_runner.stored, query_runner.inputs
        with exclusive(inputs.model):
            self.runner = query_runner.runner.with_method(method, train, stored.memory // 2)
        self.method, self.manifest, self.train = method, self.runner.manifest, train
        watch = Watch(inputs.model, inputs.checkpoints)
        self._queries = QueryRunner(stored, self.runner, watch=watch)
        self._digests = stored.values("digest")

    def queries(self, rows: Rows) -> Tensor:
        """(C, Q, D) features of queries."""
        return self._queries.features(rows).features

    def rows(self, where: Tensor) -> tuple[list[Tensor], Tensor]:
        """Features (n, D) of training examples under each checkpoint, and further measures (n, ·) of the method."""
        numbers, some = where.tolist(), Rows(Picked(self.train, where), self.train.collate)
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


class _Measuring:
    """Candidates that are being measured under another projection."""

    def __init__(self, scores: GroupScores, where: Tensor, again: OtherProjection, queries: Rows) -> None:
        self.scores, self.where, self.again, self.queries = scores, where, again, queries
        m = again.manifest
        self.distinct = where.unique()
        groups, count = len(scores.partition), len(self.distinct)
        _check_memory(scores, where, groups)
        self.linear = torch.empty(*where.shape, groups)
        self.of_train, self.of_queries = torch.zeros(count, groups), torch.zeros(len(scores), groups)
        self.beside = torch.zeros(count, len(again.method.beside))
        each = 4 * m.terms * m.width
        self.at_once = max(1, scores.memory // (QUERIES * each))
        size = m.settled.pass_size
        self.step = size * max(1, scores.memory // (TRAIN * each) // size)

    def done(self, method: Method) -> CandidateScores:
        blocks = list(cut(slice(0, len(self.scores)), self.at_once))
        sets = [self.where[q].unique() for q in blocks]
        with console.progress("rescoring", sum(map(len, sets)), unit="examples") as advance:
            for q, some in zip(blocks, sets):
                self._block(q, some, advance)
        norms = Norms(
            self.of_queries,
            self.of_train,
            leverage=_no_kernel,
            beside=lambda: self.beside,
            where=torch.searchsorted(self.distinct, self.where),
        )
        told = self.scores.provenance | {
            "method": method.describe(),
            "candidates": self.scores.provenance,
        }
        return _made(self.scores, self.where, self.linear, norms, method, told)

    def _block(self, q: slice, some: Tensor, advance: Callable[[int], None]) -> None:
        """The candidates `some` of a block of queries."""
        m = self.again.manifest
        asked = Rows(Picked(self.queries, torch.arange(q.start, q.stop)), self.queries.collate)
        features = self.again.queries(asked)
        cuts = list(cut(slice(0, len(some)), self.step))
        within = torch.searchsorted(some, self.where[q])
        train = TrainSide(
            examples=len(some),
            units=m.unit_names,
            columns=m.columns,
            checkpoint_weights=m.checkpoint_weights,
            cuts=cuts,
            block=lambda s: self._rows(some[cuts[s]]),
            squares=_no_kernel,
            skipped=lambda: torch.zeros(len(some), dtype=torch.bool),
            ids=None,
        )
        part = replace(
            self.scores,
            train=train,
            queries=features,
            method=TracIn(),
            query_digests=self.scores.query_digests[q],
            query_ids=None,
            spread=None,
        )
        self.of_queries[q] = part.asked.squares
        for rows, parts in part.stream(slice(0, len(part))):
            _put(self.linear[q], within, rows, parts)
            advance(rows.stop - rows.start)

    def _rows(self, which: Tensor) -> list[Tensor]:
        """Features of training examples, whose norms are noted on the way."""
        blocks, beside = self.again.rows(which)
        m, at = self.again.manifest, torch.searchsorted(self.distinct, which)
        squares = torch.zeros(len(which), len(m.columns))
        for eta, block in zip(m.checkpoint_weights, blocks):
            squares += eta * torch.stack([block[:, c].square().sum(1) for c in m.columns], 1)
        group = torch.tensor(self.scores.partition.of(m.unit_names))
        self.of_train[at] = torch.zeros(len(which), len(self.scores.partition)).index_add_(1, group, squares)
        self.beside[at] = beside
        return blocks


def _put(linear: Tensor, within: Tensor, rows: slice, parts: Tensor) -> None:
    """Contributions (q, n, M) of the distinct candidates `rows` to where they are candidates, `within` (q, k)."""
    q, r = ((within >= rows.start) & (within < rows.stop)).nonzero(as_tuple=True)
    linear[q, r] = parts[q, within[q, r] - rows.start]


def _squares(scores: GroupScores) -> tuple[Tensor, Tensor]:
    """(Q, M) and (n, M) squared norms, where the method asks for them."""
    if scores.method.linear:
        return torch.zeros(len(scores), len(scores.groups)), torch.zeros(scores.shape[1], len(scores.groups))
    return scores.asked.squares, scores._train_squares


def _query_blocks(scores: GroupScores) -> Iterator[slice]:
    """Queries whose contributions with a block of candidates are within the budget."""
    most = max(r.stop - r.start for r in scores.train.cuts)
    each = 16 * most * len(scores.partition)
    return cut(slice(0, len(scores)), max(1, scores.memory // (8 * each)))


def _check_memory(scores: GroupScores, where: Tensor, groups: int) -> None:
    need = 4 * where.numel() * groups
    if need > scores.memory:
        raise UndeError(
            f"the contributions of {where.shape[1]} candidates to {where.shape[0]} queries in {groups} groups need "
            f"{need / 2**30:.3g} GiB, the budget is {scores.memory / 2**30:.3g} GiB: rescore fewer candidates, or "
            "regroup, or raise memory="
        )


def _made(
    scores: GroupScores,
    where: Tensor,
    linear: Tensor,
    norms: Norms,
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
        scores.telling,
    )


def _no_kernel() -> Tensor:
    raise UndeError("there is no kernel here, and no leverage: rescore with index=")
