"""Tail-patch: does one more training step on a query's top proponents make the query more likely?"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unde.data import Collate, Rows, own_collate, to_device
from unde.errors import UndeError
from unde.evaluate.arrays import Array, numbers
from unde.evaluate.estimate import Estimate
from unde.evaluate.optimizers import Factory, explain_step_errors, optimizer_factory
from unde.gradients.model_state import frozen_eval
from unde.parallel import Executor, Job, close_workers, get_executor, run_with_progress
from unde.parallel.model_transport import BuildInputs
from unde.scoring import Top
from unde.scoring.data_splits import refuse_shared, shared
from unde.setup import Recipe
from unde.store.job_results import Results
from unde.store.job_results import scratch as scratch_in
from unde.store.remote import StorePath, place
from unde.tasks import Task
from unde.tasks.tokens import TokenTask


@dataclass(frozen=True, eq=False)
class TailPatch:
    """How much more likely each query became: positive is better.

    `per_token` is 100 × Δ log p / (number of target tokens of the query), the unit of the paper's tables;
    `summed` is Δ log p of the whole query. Two rankings are compared query by query, with
    `unde.evaluate.paired(a.per_token, b.per_token)`, which is b − a.

    >>> from unde.evaluate import paired
    >>> a = TailPatch(per_token=Estimate(np.array([1.0, 4.0])), summed=Estimate(np.array([0.1, 0.4])))
    >>> b = TailPatch(per_token=Estimate(np.array([2.0, 5.5])), summed=Estimate(np.array([0.2, 0.55])))
    >>> paired(a.per_token, b.per_token).mean
    1.25
    """

    per_token: Estimate
    summed: Estimate

    def as_dict(self) -> dict[str, object]:
        """Both summaries, ready for JSON."""
        return {"per_token": self.per_token.as_dict(), "summed": self.summed.as_dict()}


def tail_patch(
    model: nn.Module,
    task: Task,
    train_data: Any,
    queries: Any,
    top_indices: Array | Top,
    *,
    optimizer: Factory,
    optimizer_state: Mapping[str, Any] | None = None,
    lr: float | None = None,
    micro_batch: int = 32,
    max_grad_norm: float | None = None,
    collate: Collate | None = None,
    executor: str | Executor = "serial",
    recipe: str | Recipe | None = None,
    scratch: str | StorePath | None = None,
) -> TailPatch:
    """The change of each query's log-probability when the model takes one step on the query's proponents.

    Row q of `top_indices` (Q, k) names the k training examples of query q: `scores.top(k)` or its indices, or
    `random_indices` for the random baseline. They form one batch, whose loss is the mean of `task.loss` (so a
    `CausalLM` should have the reduction of training); `micro_batch` of them run at a time, and their gradients
    add up to those of the whole batch. The paper takes k as large as the batches of training, or 1. Queries that are
    training examples are refused: by what the index of a `scores.top(k)` knows, and where a proponent is the same.

    The step should be the one that training would have taken next. `optimizer` makes the optimizer from the
    list of trainable parameters (`torch.optim.AdamW`, or a function that also sets betas and weight decay);
    `optimizer_state` is its `state_dict()` at the end of training, whose hyper-parameters replace those of
    `optimizer`, as in `load_state_dict`. `lr` replaces the learning rate of every parameter group: give
    it if training ended on a schedule, which leaves a rate of 0. `max_grad_norm` clips as training did.

    The log-probability is −(sum of the token losses) for `CausalLM`, whatever its reduction, and −loss for
    other tasks, where a query counts as one token. Both the step and the measurement run in eval mode
    (no dropout, fixed batch statistics), so that a score depends on the proponents alone. Afterwards, and
    after an error, the model, the generators and `optimizer_state` are bit for bit what they were. Beside
    the model, memory is taken for its weights, gradients and optimizer state once more.

    With an `executor` such as "processes:4" queries are shared out to processes that make the model by the `recipe`,
    as in `Index.build`; `optimizer` must then be a function that can be imported. What they find goes through a folder
    that all of them must see: `scratch`, such as that of the index, or else the one for temporary files.

    >>> from unde.tasks import Classification
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(3, 2), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> near = (x[:2] + 0.1, y[:2])
    >>> result = tail_patch(
    ...     model, Classification(), (x, y), near, [[0, 2], [1, 3]], optimizer=torch.optim.SGD, lr=0.1
    ... )
    >>> bool((result.summed.per_query > 0).all())
    True
    """
    if micro_batch < 1:
        raise UndeError(f"micro_batch is {micro_batch}: expected at least 1")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UndeError(
            f"max_grad_norm is {max_grad_norm}: expected a positive norm, or None for no clipping"
        )
    train, asked = (Rows(data, collate or own_collate(task.collate, data)) for data in (train_data, queries))
    top = _checked(
        top_indices.indices if isinstance(top_indices, Top) else top_indices, len(asked), len(train)
    )
    if not any(p.requires_grad for p in model.parameters()):
        raise UndeError("no parameter of the model requires grad: there is nothing that a step could change")
    _refuse_trained_on(top_indices, model, asked, train, top)
    given = BuildInputs(model, task, train, recipe=Recipe(recipe) if isinstance(recipe, str) else recipe)
    patch = Patch(given, queries=asked, top=top, optimizer=optimizer, state=optimizer_state, lr=lr,
                  micro_batch=micro_batch, max_grad_norm=max_grad_norm)  # fmt: skip
    patch.check()
    change, tokens = np.empty(len(asked)), np.empty(len(asked))
    jobs: list[Job] = [(q,) for q in range(len(asked))]
    runs = get_executor(executor)
    with (
        close_workers(executor, runs),
        nullcontext() if runs.in_process else _folder(scratch) as folder,
    ):
        patch.results.folder = folder
        for (q,) in run_with_progress(
            runs, patch_one, patch, jobs, "tail-patch", describe="query {0[0]}".format, unit="queries"
        ):
            change[q], tokens[q] = patch.results.take((q,))["found"].tolist()
    return TailPatch(per_token=Estimate(100 * change / tokens), summed=Estimate(change))


@contextmanager
def _folder(scratch: str | StorePath | None) -> Generator[StorePath]:
    """Where results are handed over, gone afterwards."""
    if scratch is not None:
        with scratch_in(place(scratch)) as made:
            yield made
        return
    with tempfile.TemporaryDirectory(prefix="unde-") as temporary:
        yield Path(temporary)


def _refuse_trained_on(top: Any, model: nn.Module, asked: Rows, train: Rows, indices: np.ndarray) -> None:
    """Raises if queries are training examples: a step on a query itself says nothing about its proponents."""
    if isinstance(top, Top) and top.trained_on is not None:
        refuse_shared(len(top.trained_on()), "queries", "the training data")
    with frozen_eval(model):  # reading may draw random numbers
        found = shared(asked.digests(), train.digests(np.unique(indices).tolist()))
    refuse_shared(len(found), "queries", "the training data")


# --- one query ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Patch:
    """What the jobs share, one for each query."""

    given: BuildInputs
    queries: Rows
    top: np.ndarray
    optimizer: Factory
    state: Mapping[str, Any] | None
    lr: float | None
    micro_batch: int
    max_grad_norm: float | None
    results: Results = field(default_factory=lambda: Results("tail-patch"))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self.__init__(**sent)

    @cached_property
    def made(self) -> tuple[list[nn.Parameter], Callable[[], Optimizer], list[tuple[nn.Parameter, Tensor]]]:
        """The trainable parameters, what makes the optimizer, and the weights as they are."""
        trainable = [p for p in self.given.model.parameters() if p.requires_grad]
        make, stepped = optimizer_factory(self.given.model, trainable, self.optimizer, self.state, self.lr)
        return trainable, make, [(p, p.detach().clone()) for p in stepped]

    def check(self) -> None:
        """Raises for an optimizer that does not fit, before it is sent anywhere."""
        _ = self.made


def patch_one(patch: Patch, q: int) -> None:
    model, task, train = patch.given.model, patch.given.task, patch.given.rows
    trainable, make, saved = patch.made
    device, proponents = trainable[0].device, patch.top[q].tolist()
    with frozen_eval(model):  # reading may draw random numbers
        query = to_device(patch.queries.batch([q]), device)
    step = patch.micro_batch
    pieces = [proponents[a : a + step] for a in range(0, len(proponents), step)]
    batches = ((piece, to_device(train.batch(piece), device)) for piece in pieces)
    with _about(f"query {q}"):
        before, tokens = _measure(model, task, query)
    with _put_back(saved):
        _step(model, task, trainable, make(), batches, len(proponents), patch.max_grad_norm)
        after = _loss(model, _summing(task), query)
    if not math.isfinite(after):
        raise UndeError(
            f"the loss of query {q} is {after} after the step on its proponents: the step diverged. "
            "Check that no loss of theirs is infinite, or pass a smaller lr="
        )
    patch.results.put((q,), {"found": torch.tensor([before - after, tokens], dtype=torch.float64)})


def _measure(model: nn.Module, task: Task, query: Any) -> tuple[float, int]:
    """−log p of the query, and its number of target tokens."""
    total = _loss(model, _summing(task), query)
    if not math.isfinite(total):
        raise UndeError(f"the loss is {total} under the model as it is: leave that query out")
    if not isinstance(task, TokenTask):
        return total, 1
    if total == 0:
        raise UndeError(
            "the loss is exactly 0: there is no target token, or it cannot become more likely. Leave that query out"
        )
    return total, round(total / _loss(model, _reducing(task, "mean"), query))


def _summing(task: Task) -> Task:
    return _reducing(task, "sum") if isinstance(task, TokenTask) else task


def _reducing(task: TokenTask, reduction: str) -> TokenTask:
    """The same task, with another reduction over the tokens of a sequence."""
    changed = copy.copy(task)
    changed.reduction = reduction
    return changed


def _loss(model: nn.Module, task: Task, batch: Any) -> float:
    """The loss of a batch of one. Every call starts from the same random numbers, should the task draw any."""
    with frozen_eval(model), torch.no_grad():
        return float(_per_example(task.loss(model, batch), 1))


def _step(
    model: nn.Module,
    task: Task,
    trainable: Sequence[nn.Parameter],
    optimizer: Optimizer,
    batches: Iterable[tuple[list[int], Any]],
    examples: int,
    max_grad_norm: float | None,
) -> None:
    """One step on the mean loss of all `examples`, which come in batches with their positions."""
    with frozen_eval(model):
        for p in trainable:
            p.requires_grad_(True)
            p.grad = None
        for piece, batch in batches:
            with _about(f"training examples {piece}"):
                loss = _per_example(task.loss(model, batch), len(piece))
            (loss.sum() / examples).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trainable, max_grad_norm)
        with explain_step_errors(optimizer):
            optimizer.step()


@contextmanager
def _about(which: str) -> Generator[None]:
    """Names the examples in what a task says about its batch."""
    try:
        yield
    except UndeError as e:
        raise UndeError(f"{which}: {e}") from e


def _per_example(loss: Tensor, examples: int) -> Tensor:
    if loss.shape != (examples,):
        raise UndeError(
            f"task.loss gave a tensor of shape {tuple(loss.shape)} for {examples} examples: expected "
            f"({examples},), one loss for each"
        )
    return loss


@contextmanager
def _put_back(saved: Sequence[tuple[nn.Parameter, Tensor]]) -> Generator[None]:
    """After: the parameters hold what was saved, whatever happened."""
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)


def _checked(top_indices: Array, queries: int, examples: int) -> np.ndarray:
    """(Q, k) positions of training examples, each at most once for a query."""
    top = numbers(top_indices, "top_indices", "(Q, k)")
    if top.dtype.kind not in "iu":
        raise UndeError(f"top_indices must hold whole numbers, not {top.dtype}: pass positions, not scores")
    if len(top) != queries:
        raise UndeError(
            f"top_indices (Q, k) has {len(top)} rows for {queries} queries: expected one for each"
        )
    outside = np.argwhere((top < 0) | (top >= examples))
    if len(outside):
        q, rank = outside[0]
        raise UndeError(
            f"top_indices[{q}, {rank}] is {top[q, rank]}: expected positions in the {examples} training examples, "
            f"0 to {examples - 1}. If query {q} has fewer proponents, use a smaller k for all queries"
        )
    repeated = (np.diff(np.sort(top, axis=1), axis=1) == 0).any(axis=1)  # (Q,)
    if repeated.any():
        raise UndeError(
            f"top_indices names a training example twice for query {int(np.argmax(repeated))}: "
            "expected k different proponents, of equal weight in the batch"
        )
    return top
