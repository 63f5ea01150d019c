"""What all scores of queries against training examples can do: take weights of any kind, and rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.scoring.data_splits import Learned, refuse_seen
from unde.scoring.documents import Pieces, named, sums
from unde.scoring.top import Best, Top, check_k


class Aligned(Protocol):
    """Weights that know the groups they belong to."""

    def aligned_to(self, groups: Sequence[str]) -> Tensor: ...


WeightsLike = Aligned | Tensor | Sequence[float] | None
Names = Pieces | Sequence[Any]


class Ranked(ABC):
    """Scores that can be totalled, of all queries or of some."""

    called: ClassVar[str] = "training examples"  # what is ranked

    if TYPE_CHECKING:  # fields of a dataclass among those who follow

        @property
        def memory(self) -> int: ...  # bytes that may be taken

        @property
        def query_digests(self) -> list[str]: ...  # of the content of each query

        @property
        def query_ids(self) -> Sequence[Any] | None: ...  # what the queries are called, if they have names

    @property
    def default_weights(self) -> Aligned | None:
        """The weights of a calibration, which are used where none are named."""
        return None

    @property
    @abstractmethod
    def groups(self) -> list[str]: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def ids(self) -> Sequence[Any] | None:
        """The user's names of the training examples."""

    @property
    def telling(self) -> Callable[[], list[int]] | None:
        """What knows which of the queries are training examples."""
        return None

    @abstractmethod
    def total(self, weights: WeightsLike = None) -> Tensor: ...

    @abstractmethod
    def picked(self, queries: Tensor) -> Any:
        """The same of some of the queries, by number."""

    @abstractmethod
    def best_examples(self, w: Tensor, k: int, largest: bool) -> Best:
        """The k best of all training examples."""

    @abstractmethod
    def skipped(self) -> Tensor:
        """(N,) bool: training examples that are left out."""

    def top(
        self,
        k: int,
        weights: WeightsLike = None,
        largest: bool = True,
        *,
        by: Names | None = None,
        queries: Names | None = None,
    ) -> Top:
        """The k largest scores of each query (largest=False: the k smallest, opponents); only k are kept.

        `by` ranks documents as wholes: it says which document each training example is a piece of, by name, or as
        `unde.scoring.documents(index.ids)` tells. The score of a document is the sum of the scores of its pieces, as
        influences add up; `top.indices` are the numbers of documents then, `top.ids` their names. `queries` names the
        queries; those of one name are pieces of one, and their scores are added up alike.
        """
        w, skipped = self.weights(weights), self.skipped()
        asked = None if queries is None else named(queries, self.shape[0], "queries")
        train = None if by is None else named(by, self.shape[1], "training examples")
        if train is None and (asked is None or asked.whole):
            check_k(k, len(skipped) - int(skipped.sum()), int(skipped.sum()), self.called)
            top = self.best_examples(w, k, largest).top(self.ids)
        else:
            top = self._summed(w, k, largest, asked, train, skipped)
        return replace(
            top,
            query_ids=self.query_ids if asked is None else asked.names,
            trained_on=self.telling,
        )

    def _summed(
        self, w: Tensor, k: int, largest: bool, queries: Pieces | None, train: Pieces | None, skipped: Tensor
    ) -> Top:
        """The best by sums over the pieces of queries and of documents."""
        count = self.shape[0]
        queries = queries or Pieces(torch.arange(count), list(range(count)))
        if train is None:
            out, ids, what = skipped, self.ids, "training examples"
        else:
            out = torch.bincount(train.of[~skipped], minlength=len(train)) == 0
            ids, what = train.names, "documents"
        check_k(k, len(out) - int(out.sum()), int(out.sum()), what)
        best = Best(len(queries), k, largest)
        for q, found in sums(self, w, queries, train, skipped):
            best.see(q, 0, found.masked_fill_(out, best.worst))
        return best.top(ids)

    def weights(self, weights: WeightsLike) -> Tensor:
        """(M,) from whatever names them; None is those of a calibration, or all ones without one. Weights that remember
        these queries are refused."""
        m = len(self.groups)
        if weights is None:
            return (
                torch.ones(m)
                if self.default_weights is None
                else self.default_weights.aligned_to(self.groups)
            )
        if isinstance(weights, Learned):
            refuse_seen(self.query_digests, weights)
        aligned = getattr(weights, "aligned_to", None)
        values = torch.as_tensor(aligned(self.groups) if aligned else weights, dtype=torch.float32).cpu()
        if values.shape != (m,):
            raise UndeError(f"weights of shape {tuple(values.shape)} for {m} groups: expected ({m},)")
        if not (values.isfinite() & (values >= 0)).all():
            raise UndeError("weights must be finite numbers ≥ 0, one for each group")
        return values
