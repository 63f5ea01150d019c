"""What all scores of queries against training examples can do: take weights, and rank examples or documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, overload

import torch
from torch import Tensor

from unde.default_device import host_default
from unde.errors import UndeError, unknown
from unde.markup import facts, list_names
from unde.scoring.blocks import TopK, check_finite, check_k
from unde.scoring.data_splits import LearnedWeights, refuse_seen
from unde.scoring.documents import Names, Pieces, name_pieces
from unde.scoring.top import Top

DOCUMENT_SHARE = 8  # sums, and the scores added to them, take at most 1/8 of the memory budget each

S = TypeVar("S", bound="Scores")
T = TypeVar("T")


class GroupWeights(Protocol):
    """Weights that know the groups they belong to."""

    def aligned_to(self, groups: Sequence[str]) -> Tensor: ...


WeightsLike = GroupWeights | Tensor | Sequence[float] | None


@host_default
class Scores(ABC):
    """Scores (Q, N) resolved into groups, of all queries or of some."""

    noun: ClassVar[str] = "training examples"  # what is ranked
    title: ClassVar[str] = "Scores"  # in notebooks

    if TYPE_CHECKING:  # fields of the dataclasses among the subclasses

        @property
        def memory(self) -> int: ...  # budget in bytes

        @property
        def method(self) -> Any: ...

        @property
        def query_digests(self) -> list[str]: ...  # of the content of each query

        @property
        def provenance(self) -> dict[str, Any]: ...  # JSON-able; copied into weights

        @property
        def query_ids(self) -> Sequence[Any] | None: ...  # names of the queries

        @property
        def ids(self) -> Sequence[Any] | None: ...  # the users' names of the training examples

    @property
    def default_weights(self) -> GroupWeights | None:
        """Weights of a calibration, used where none are passed."""
        return None

    @property
    @abstractmethod
    def groups(self) -> list[str]:
        """Names of the M groups, in order."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Queries and training examples, (Q, N)."""

    @abstractmethod
    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, N) scores; positive = proponent."""

    @abstractmethod
    def select(self: S, queries: Tensor) -> S:
        """The scores of some of the queries, by number."""

    @abstractmethod
    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """Blocks over the training examples: (slice of them, (q, n, M) linear contributions)."""

    @abstractmethod
    def contributions(self, queries: slice) -> Tensor:
        """All of it for some queries: (q, N, M)."""

    @abstractmethod
    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """Weighted sums (q, n) → final scores (q, n), differentiable in the weights."""

    @abstractmethod
    def rank(self, w: Tensor, k: int, largest: bool) -> TopK:
        """The k best training examples of each query."""

    def skipped(self) -> Tensor:
        """(N,) bool: training examples that were left out."""
        return torch.zeros(self.shape[1], dtype=torch.bool)

    def trained_on(self) -> list[int]:
        """Positions of the queries that are training examples, by content."""
        return []

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        q, n = self.shape
        noun, name = self.noun.split()[-1], getattr(self.method, "name", self.method)
        method = self.method if self.noun == "candidates" else name
        return f"{type(self).__name__}({method}, {q} queries × {n} {noun} × {len(self.groups)} groups)"

    def _repr_html_(self) -> str:
        q, n = self.shape
        table = {
            "method": str(getattr(self.method, "name", self.method)),
            "queries": f"{q:,}",
            self.noun: f"{n:,}",
        }
        return facts(self.title, table | {"groups": list_names(self.groups)})

    def _name_documents(self, by: Names | None) -> Pieces | None:
        """The documents to rank, or None for training examples."""
        return None if by is None else name_pieces(by, self.shape[1], "training examples")

    # --- ranking ----------------------------------------------------------------------------------------

    def top(
        self,
        k: int,
        weights: WeightsLike = None,
        largest: bool = True,
        *,
        by: Names | None = None,
        queries: Names | None = None,
    ) -> Top:
        """The k best training examples of each query; no more than k scores of a query are kept.

        Args:
            k: How many.
            weights: Weights of the groups, such as `unde.learn_weights` returns. None: those of a calibration, or all
                ones.
            largest: False for the k smallest scores, opponents.
            by: The document of each training example, by name, or `unde.scoring.documents(index.ids)`. Documents are
                ranked by the sums of the scores of their pieces, as influences add up: `top.indices` are then numbers
                of documents, `top.ids` their names.
            queries: Names of the queries. Scores of queries with one name are added up.

        Returns:
            The indices, ids and scores of the best, best first.

        Raises:
            UndeError: If k is not between 1 and the number of examples, weights do not fit the groups or were learned
                on these queries, or names do not fit.

        >>> from unde.scoring import from_arrays
        >>> from_arrays([[0.1, 0.9, 0.5]]).top(2).indices
        tensor([[1, 2]])
        """
        w, skipped = self.align_weights(weights), self.skipped()
        named = None if queries is None else name_pieces(queries, self.shape[0], "queries")
        train = self._name_documents(by)
        if train is None and (named is None or named.whole):
            check_k(k, len(skipped) - int(skipped.sum()), int(skipped.sum()), self.noun)
            top = self.rank(w, k, largest).top(self.ids)
        else:
            top = self._rank_documents(w, k, largest, named, train, skipped)
        return replace(
            top, query_ids=self.query_ids if named is None else named.names, trained_on=self.trained_on
        )

    def _rank_documents(
        self, w: Tensor, k: int, largest: bool, queries: Pieces | None, train: Pieces | None, skipped: Tensor
    ) -> Top:
        """The best by sums over the pieces of queries and of documents."""
        queries = queries or Pieces(torch.arange(len(self)), list(range(len(self))))
        if train is None:
            empty, ids, noun = skipped, self.ids, "training examples"
        else:
            empty = torch.bincount(train.of[~skipped], minlength=len(train)) == 0
            ids, noun = train.names, "documents"
        check_k(k, len(empty) - int(empty.sum()), int(empty.sum()), noun)
        best = TopK(len(queries), k, largest)
        for q, sums in self._document_scores(w, queries, train, skipped):
            best.update(q, 0, sums.masked_fill_(empty, best.worst))
        return best.top(ids)

    def _document_scores(
        self, w: Tensor, queries: Pieces, train: Pieces | None, skipped: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """(whole queries, (q, D) sums of their scores with each of the D documents), within the memory budget.

        Added up in float64, in the order of pieces. Skipped training examples add nothing.
        """
        examples, budget = self.shape[1], self.memory // DOCUMENT_SHARE
        columns = examples if train is None else len(train)
        ends = [0, *queries.ends]
        step, at_once = max(1, budget // (8 * columns)), max(1, budget // (12 * examples))
        for start in range(0, len(queries), step):
            stop = min(start + step, len(queries))
            out = torch.zeros(columns, stop - start, dtype=torch.float64)
            for some in queries.order[ends[start] : ends[stop]].split(at_once):
                part = self.select(some).total(w).masked_fill_(skipped, 0.0).T.double()  # (N, q)
                if train is not None:
                    part = torch.zeros(columns, len(some), dtype=torch.float64).index_add_(0, train.of, part)
                out.index_add_(1, queries.of[some] - start, part)
            yield slice(start, stop), check_finite(out.T.float(), "scores")

    # --- weights and groups -----------------------------------------------------------------------------

    def align_weights(self, weights: WeightsLike) -> Tensor:
        """(M,) weights in the order of the groups; None gives those of a calibration, or all ones."""
        m = len(self.groups)
        if weights is None:
            default = self.default_weights
            return torch.ones(m) if default is None else default.aligned_to(self.groups)
        if isinstance(weights, LearnedWeights):
            refuse_seen(self.query_digests, weights)
        align = getattr(weights, "aligned_to", None)
        values = torch.as_tensor(align(self.groups) if align else weights, dtype=torch.float32).cpu()
        if values.shape != (m,):
            raise UndeError(f"weights of shape {tuple(values.shape)} for {m} groups: expected ({m},)")
        if not (values.isfinite() & (values >= 0)).all():
            raise UndeError("weights must be finite numbers ≥ 0, one for each group")
        return values

    def _joint_groups(self, groups: Mapping[str, Sequence[str]]) -> Tensor:
        """(M, M′): 1 where a group becomes part of a coarser one."""
        number = {name: j for j, name in enumerate(self.groups)}
        members = [name for names in groups.values() for name in names]
        for name in members:
            if name not in number:
                raise unknown("group", name, self.groups)
        if sorted(members) != sorted(number):
            raise UndeError(
                f"{len(members)} groups are named, there are {len(number)}: expected each of them in one new group"
            )
        joint = torch.zeros(len(number), len(groups))
        for j, names in enumerate(groups.values()):
            joint[[number[name] for name in names], j] = 1
        return joint


@overload
def pick(names: None, queries: Tensor) -> None: ...
@overload
def pick(names: Sequence[T], queries: Tensor) -> list[T]: ...
def pick(names: Sequence[T] | None, queries: Tensor) -> list[T] | None:
    """What belongs to some of the queries, by number."""
    return None if names is None else [names[q] for q in queries.tolist()]
