"""Tail-patch: does one more training step on a query's top proponents make the query more likely?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unde import console
from unde.data import Collate, Rows, own_collate, to_device
from unde.errors import UndeError
from unde.evaluate._arrays import Array, numbers
from unde.evaluate.estimate import Estimate
from unde.features.guard import untouched
from unde.tasks import CausalLM, Task

Factory = Callable[[list[nn.Parameter]], Optimizer]

# Entries of torch.optim states that have the shape of their parameter.
_LIKE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "ax"),
)


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
    top_indices: Array,
    *,
    optimizer: Factory,
    optimizer_state: Mapping[str, Any] | None = None,
    lr: float | None = None,
    micro_batch: int = 32,
    max_grad_norm: float | None = None,
    collate: Collate | None = None,
) -> TailPatch:
    """The change of each query's log-probability when the model takes one step on the query's proponents.

    Row q of `top_indices` (Q, k) names the k training examples of query q: `scores.top(k).indices`, or
    `random_indices` for the random baseline. They form one batch, whose loss is the mean of `task.loss` (so a
    `CausalLM` should have the reduction of training); `micro_batch` of them run at a time, and their gradients
    add up to those of the whole batch. The paper takes k as large as the batches of training, or 1.

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

    >>> from unde.tasks import Classification
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(3, 2), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> result = tail_patch(
    ...     model, Classification(), (x, y), (x[:2], y[:2]), [[0, 2], [1, 3]], optimizer=torch.optim.SGD, lr=0.1
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
    top = _checked(top_indices, len(asked), len(train))
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UndeError("no parameter of the model requires grad: there is nothing that a step could change")
    make, stepped = _optimizers(model, trainable, optimizer, optimizer_state, lr)
    saved = [(p, p.detach().clone()) for p in stepped]
    device = trainable[0].device

    change, tokens = np.empty(len(asked)), np.empty(len(asked))
    with console.progress("tail-patch", len(asked), unit="queries") as advance:
        for q, proponents in enumerate(top.tolist()):
            with untouched(model):  # reading may draw random numbers
                query = to_device(asked.batch([q]), device)
            pieces = [proponents[a : a + micro_batch] for a in range(0, len(proponents), micro_batch)]
            batches = ((piece, to_device(train.batch(piece), device)) for piece in pieces)
            with _about(f"query {q}"):
                before, tokens[q] = _measure(model, task, query)
            with _put_back(saved):
                _step(model, task, trainable, make(), batches, len(proponents), max_grad_norm)
                after = _loss(model, _summing(task), query)
            if not math.isfinite(after):
                raise UndeError(
                    f"the loss of query {q} is {after} after the step on its proponents: the step diverged. "
                    "Check that no loss of theirs is infinite, or pass a smaller lr="
                )
            change[q] = before - after
            advance(1)
    return TailPatch(per_token=Estimate(100 * change / tokens), summed=Estimate(change))


# --- one query ------------------------------------------------------------------------------------------


def _measure(model: nn.Module, task: Task, query: Any) -> tuple[float, int]:
    """−log p of the query, and its number of target tokens."""
    total = _loss(model, _summing(task), query)
    if not math.isfinite(total):
        raise UndeError(f"the loss is {total} under the model as it is: leave that query out")
    if not isinstance(task, CausalLM):
        return total, 1
    if total == 0:
        raise UndeError(
            "the loss is exactly 0: there is no target token, or it cannot become more likely. Leave that query out"
        )
    return total, round(total / _loss(model, _reducing(task, "mean"), query))


def _summing(task: Task) -> Task:
    return _reducing(task, "sum") if isinstance(task, CausalLM) else task


def _reducing(task: CausalLM, reduction: str) -> CausalLM:
    """The same task, with another reduction over the tokens of a sequence."""
    changed = copy.copy(task)
    changed.reduction = reduction
    return changed


def _loss(model: nn.Module, task: Task, batch: Any) -> float:
    """The loss of a batch of one. Every call starts from the same random numbers, should the task draw any."""
    with untouched(model), torch.no_grad():
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
    with untouched(model):
        for p in trainable:
            p.requires_grad_(True)
            p.grad = None
        for piece, batch in batches:
            with _about(f"training examples {piece}"):
                loss = _per_example(task.loss(model, batch), len(piece))
            (loss.sum() / examples).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trainable, max_grad_norm)
        with _explained(optimizer):
            optimizer.step()


@contextmanager
def _about(which: str) -> Generator[None]:
    """Names the examples in what a task says about its batch."""
    try:
        yield
    except UndeError as e:
        raise UndeError(f"{which}: {e}") from e


@contextmanager
def _explained(optimizer: Optimizer) -> Generator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as e:
        raise UndeError(
            f"{type(optimizer).__name__} cannot take a step ({type(e).__name__}: {e}): expected an optimizer whose "
            "step() needs no argument, and an optimizer_state that this kind of optimizer has saved"
        ) from e


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


# --- checks and the optimizer ---------------------------------------------------------------------------


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


def _optimizers(
    model: nn.Module,
    trainable: list[nn.Parameter],
    factory: Factory,
    state: Mapping[str, Any] | None,
    lr: float | None,
) -> tuple[Callable[[], Optimizer], list[nn.Parameter]]:
    """A function that makes the optimizer of one step, and the parameters that it changes."""
    one_each = (
        "expected a function that makes a new optimizer from a list of parameters, such as torch.optim.AdamW"
    )
    if isinstance(factory, Optimizer) or not callable(factory):
        raise UndeError(
            f"optimizer is a {type(factory).__name__}: {one_each}. The state of an optimizer that exists goes into "
            "optimizer_state=, as its state_dict()"
        )
    first = factory(list(trainable))
    if not isinstance(first, Optimizer):
        raise UndeError(f"optimizer(parameters) gave a {type(first).__name__}: {one_each}")
    if factory(list(trainable)) is first:
        raise UndeError(
            f"optimizer(parameters) gave the same optimizer twice, and steps would add up in it: {one_each}. "
            "Pass the state to start from as optimizer_state="
        )
    names = {id(p): name for name, p in model.named_parameters()}
    stepped = [p for group in first.param_groups for p in group["params"]]
    foreign = next((p for p in stepped if id(p) not in names), None)
    if foreign is not None:
        raise UndeError(
            f"the optimizer holds a parameter of shape {tuple(foreign.shape)} that is not one of the model's: its step "
            "would not change the model. Make it from the parameters that the function is given"
        )
    if state is not None:
        _check_state(state, first, [names[id(p)] for p in stepped])
    if lr is not None and not 0 < lr < math.inf:
        raise UndeError(f"lr is {lr}: expected a positive learning rate")
    groups = first.param_groups if state is None else state["param_groups"]
    if lr is None and all(float(group.get("lr", 1)) == 0 for group in groups):
        where = "the optimizer" if state is None else "optimizer_state"
        raise UndeError(
            f"the learning rate in {where} is 0, as a schedule leaves it at the end of training: the step would change "
            "nothing. Pass lr=, such as the peak learning rate of training"
        )

    def make() -> Optimizer:
        made = factory(list(trainable))
        if state is not None:
            # A copy, since torch takes over the tensors that it is given, and the step writes into them.
            with _explained(made):
                made.load_state_dict(copy.deepcopy(dict(state)))
        if lr is not None:
            for group in made.param_groups:
                group["lr"] = lr
        return made

    return make, stepped


def _check_state(state: Mapping[str, Any], optimizer: Optimizer, names: list[str]) -> None:
    """Refuses a state that was saved for other parameters."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        shown = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise UndeError(f"optimizer_state is {shown}: expected what optimizer.state_dict() gives")
    own = [p for group in optimizer.param_groups for p in group["params"]]
    theirs = [key for group in state["param_groups"] for key in group["params"]]
    sizes, found = (
        [len(g["params"]) for g in groups] for groups in (optimizer.param_groups, state["param_groups"])
    )
    cure = (
        "It was saved for another model, or for parameters in another order or grouping: `optimizer` must make "
        "the optimizer as training did"
    )
    counts = f"{len(theirs)} parameters in groups of {found}, the optimizer {len(own)} in groups of {sizes}"
    for name, p, key in zip(names, own, theirs):
        for entry, value in state["state"].get(key, {}).items():
            if entry in _LIKE_PARAMETER and isinstance(value, Tensor) and value.shape != p.shape:
                also = "" if found == sizes else f" It holds {counts}."
                raise UndeError(
                    f"optimizer_state does not fit parameter {name!r}: its {entry} has shape {tuple(value.shape)}, "
                    f"expected {tuple(p.shape)}.{also} {cure}"
                )
    if found != sizes:
        missing = f": the first without a state is {names[len(theirs)]!r}" if len(theirs) < len(own) else ""
        raise UndeError(f"optimizer_state holds {counts}{missing}. {cure}")
