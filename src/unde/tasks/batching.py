"""How the batches of a task go through the model: whole, or cut into several passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from unde.errors import UndeError

AnyTask = TypeVar("AnyTask", bound=Any)


class Batching:
    """A batch is one pass. Subclass where an example is many rows to the model, as in diffusion."""

    def passes(self, batch: Any, ids: Sequence[int] | None) -> Iterator[Any]:
        """Batches to run for one batch of examples; measures and gradients add up over them."""
        yield batch

    def portions(self, batch: Any) -> Iterator[tuple[slice, Any]]:
        """Parts of the batch that go through the model one after the other, each with the examples that it holds."""
        yield slice(None), batch

    def fit_memory(self, memory: int, example: Any, peak: Callable[[Any, int], int]) -> Batching:
        """The same with passes that fit into `memory` bytes.

        `example` is a batch of one; `peak(part, B)` is how many bytes a pass of B examples takes.
        """
        return self

    @property
    def examples_per_pass(self) -> int:
        """Examples in one pass, where an example is many rows."""
        return 1

    @property
    def row_limit(self) -> int | None:
        """Rows in a pass if `fit_memory` decided it; a build that goes on passes it to `with_rows`."""
        return None

    def with_rows(self, rows: int) -> Batching:
        return self

    def reduced(self) -> Batching:
        """The same code on less of an example, for checks."""
        return self

    def shorten(self, batch: Any) -> Any | None:
        """A batch of shorter examples that go through the same code, for checks; None if there is none."""
        return None

    def step(self, c: int, steps: int) -> Batching:
        """One step of a trajectory of `steps`, for methods that sum over steps."""
        raise UndeError(
            "the method sums over the steps of a sampler, and examples of this task have none: expected "
            "unde.tasks.Diffusion. Choose another method"
        )


def with_batching(task: AnyTask, batching: Batching) -> AnyTask:
    """A copy of the task with another batching."""
    if batching is task.batching:
        return task
    other = copy.copy(task)
    other.batching = batching
    return other


def even_slices(count: int, most: int) -> Iterator[slice]:
    """As few slices of at most `most` as possible, equally long.

    >>> list(even_slices(10, 8))
    [slice(0, 5, None), slice(5, 10, None)]
    """
    parts = -(-count // max(1, most))
    return (slice(count * i // parts, count * (i + 1) // parts) for i in range(parts))
