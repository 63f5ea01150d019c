"""Tail-patch: the change of a query's log-probability after one more training step on its top proponents."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unde.data import Collate, Rows, choose_collate, to_device
from unde.default_device import host_default, program_default
from unde.errors import UndeError, explain, require_positive
from unde.evaluate.arrays import Array, top_positions
from unde.evaluate.estimate import Estimate
from unde.gradients.model_state import frozen_eval
from unde.parallel import Executor, Job, close_workers, get_executor, run_with_progress
from unde.parallel.model_transport import BuildInputs
from unde.scoring import Top
from unde.scoring.data_splits import refuse_shared, shared
from unde.setup import Recipe
from unde.store.remote import StorePath, place
from unde.store.shards import Results
from unde.store.shards import scratch as scratch_in
from unde.tasks import Task
from unde.tasks.tokens import TokenTask

Factory = Callable[[list[nn.Parameter]], Optimizer]

# Entries of torch.optim states that have the shape of their parameter.
_LIKE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "ax"),
)


@dataclass(frozen=True, eq=False)
class TailPatch:
    """How much more likely each query became: positive is better.

    >>> unde.evaluate.paired(ours.per_token, theirs.per_token)  # query by query  # doctest: +SKIP

    Attributes:
        per_token: 100 × Δ log p / (number of target tokens of the query), the unit of the paper's tables.
        summed: Δ log p of the whole query.

    Example:
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


@host_default
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
    """Measure the change of each query's log-probability when the model takes one step on the query's proponents.

    The log-probability is −(sum of the token losses) for token tasks, and −loss for others, where a query counts as one
    token. The step minimizes the mean of `task.loss` over the proponents. Step and measurement run in eval mode (no
    dropout, fixed batch statistics). Afterwards, and after an error, the model, the random generators and
    `optimizer_state` are what they were. Memory is needed for weights, gradients and optimizer state once more.

    Args:
        model: The model.
        task: Its task, with the reduction of training.
        train_data: The training data.
        queries: The queries.
        top_indices: (Q, k) positions of each query's proponents: `scores.top(k)`, its indices, or `random_indices` as a
            baseline. The paper takes k as large as the batches of training, or 1.
        optimizer: Function that makes the optimizer of training from a list of parameters, such as `torch.optim.AdamW`.
        optimizer_state: Its `state_dict()` at the end of training; its settings replace those of `optimizer`.
        lr: Learning rate of all parameter groups; needed if training ended on a schedule, which leaves a rate of 0.
        micro_batch: Proponents that run through the model at a time; their gradients add up.
        max_grad_norm: Largest norm of the gradient; None for no clipping.
        collate: Function that makes a batch; default: that of the data, or else of the task.
        executor: Where queries run, such as "processes:4"; `optimizer` must then be importable.
        recipe: What makes the model in other processes, as in `Index.build`.
        scratch: Folder through which processes return results, such as that of the index; default: a temporary one.

    Returns:
        The change for each query, by token and summed.

    Raises:
        UndeError: Queries are training examples, the optimizer does not fit the model, or a loss is not finite.

    Example:
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
    require_positive(micro_batch=micro_batch)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UndeError(
            f"max_grad_norm is {max_grad_norm}: expected a positive norm, or None for no clipping"
        )
    train, query_rows = (
        Rows(data, collate or choose_collate(task.collate, data)) for data in (train_data, queries)
    )
    indices = top_indices.indices if isinstance(top_indices, Top) else top_indices
    top = top_positions(indices, len(query_rows), len(train))
    if not any(p.requires_grad for p in model.parameters()):
        raise UndeError("no parameter of the model requires grad: there is nothing that a step could change")
    if isinstance(top_indices, Top) and top_indices.trained_on is not None:
        refuse_shared(len(top_indices.trained_on()), "queries", "the training data")
    with frozen_eval(model):  # reading may draw random numbers
        common = shared(query_rows.digests(), train.digests(np.unique(top).tolist()))
    refuse_shared(len(common), "queries", "the training data")
    inputs = BuildInputs(model, task, train, recipe=Recipe(recipe) if isinstance(recipe, str) else recipe)
    job = PatchJob(inputs, query_rows, top, optimizer, optimizer_state, lr, micro_batch, max_grad_norm)
    _ = job.optimizer_and_weights  # raises before anything is sent to other processes
    change, tokens = np.empty(len(query_rows)), np.empty(len(query_rows))
    jobs: list[Job] = [(q,) for q in range(len(query_rows))]
    runner = get_executor(executor)
    with (
        close_workers(executor, runner),
        nullcontext()
        if runner.in_process
        else scratch_in(None if scratch is None else place(scratch)) as folder,
    ):
        job.results.folder = folder
        for (q,) in run_with_progress(
            runner, patch_query, job, jobs, "tail-patch", describe="query {0[0]}".format, unit="queries"
        ):
            change[q], tokens[q] = job.results.take((q,))["change"].tolist()
    return TailPatch(per_token=Estimate(100 * change / tokens), summed=Estimate(change))


# --- one query ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PatchJob:
    """What the jobs share, one for each query."""

    inputs: BuildInputs
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

    @cached_property
    def optimizer_and_weights(self) -> tuple[Callable[[], Optimizer], list[tuple[nn.Parameter, Tensor]]]:
        """A function that makes the optimizer, and the parameters that it changes with their present values."""
        model = self.inputs.model
        trainable = [p for p in model.parameters() if p.requires_grad]
        make, parameters = optimizer_factory(model, trainable, self.optimizer, self.state, self.lr)
        return make, [(p, p.detach().clone()) for p in parameters]


def patch_query(job: PatchJob, q: int) -> None:
    model, task = job.inputs.model, job.inputs.task
    make, weights = job.optimizer_and_weights
    with frozen_eval(model):  # reading may draw random numbers
        query = to_device(job.queries.batch([q]), weights[0][0].device)
    with explain(f"query {q}: {{e}}", UndeError):
        before, tokens = _measure(model, task, query)
    try:
        _step(job, make(), job.top[q].tolist())
        after = _loss(model, _with_reduction(task, "sum"), query)
    finally:
        with torch.no_grad():
            for p, value in weights:
                p.copy_(value)
    if not math.isfinite(after):
        raise UndeError(
            f"the loss of query {q} is {after} after the step on its proponents: the step diverged. "
            "Check that no loss of theirs is infinite, or pass a smaller lr="
        )
    job.results.put((q,), {"change": torch.tensor([before - after, tokens], dtype=torch.float64)})


def _measure(model: nn.Module, task: Task, query: Any) -> tuple[float, int]:
    """−log p of the query, and its number of target tokens."""
    total = _loss(model, _with_reduction(task, "sum"), query)
    if not math.isfinite(total):
        raise UndeError(f"the loss is {total} under the model as it is: leave that query out")
    if not isinstance(task, TokenTask):
        return total, 1
    if total == 0:
        raise UndeError(
            "the loss is exactly 0: there is no target token, or it cannot become more likely. Leave that query out"
        )
    return total, round(total / _loss(model, _with_reduction(task, "mean"), query))


def _with_reduction(task: Task, reduction: str) -> Task:
    """A token task with another reduction over the tokens of a sequence; other tasks as they are."""
    if not isinstance(task, TokenTask):
        return task
    changed = copy.copy(task)
    changed.reduction = reduction
    return changed


def _loss(model: nn.Module, task: Task, batch: Any) -> float:
    """The loss of a batch of one; every call starts from the same random numbers."""
    with frozen_eval(model), torch.no_grad(), program_default():
        return float(_check_losses(task.loss(model, batch), 1))


def _step(job: PatchJob, optimizer: Optimizer, proponents: list[int]) -> None:
    """One step on the mean loss of the proponents."""
    model, task, step = job.inputs.model, job.inputs.task, job.micro_batch
    trainable = [p for p in model.parameters() if p.requires_grad]
    with frozen_eval(model):
        for p in trainable:
            p.requires_grad_(True)
            p.grad = None
        for start in range(0, len(proponents), step):
            positions = proponents[start : start + step]
            batch = to_device(job.inputs.rows.batch(positions), trainable[0].device)
            with explain(f"training examples {positions}: {{e}}", UndeError), program_default():
                loss = _check_losses(task.loss(model, batch), len(positions))
            (loss.sum() / len(proponents)).backward()
        if job.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trainable, job.max_grad_norm)
        with explain_step_errors(optimizer):
            optimizer.step()


def _check_losses(loss: Tensor, examples: int) -> Tensor:
    if loss.shape != (examples,):
        raise UndeError(
            f"task.loss gave a tensor of shape {tuple(loss.shape)} for {examples} examples: expected "
            f"({examples},), one loss for each"
        )
    return loss


# --- the optimizer of the step, with the state of training ----------------------------------------------------


def optimizer_factory(
    model: nn.Module,
    trainable: list[nn.Parameter],
    factory: Factory,
    state: Mapping[str, Any] | None,
    lr: float | None,
) -> tuple[Callable[[], Optimizer], list[nn.Parameter]]:
    """A function that makes the optimizer of one step, and the parameters that it changes."""
    expected = (
        "expected a function that makes a new optimizer from a list of parameters, such as torch.optim.AdamW"
    )
    if isinstance(factory, Optimizer) or not callable(factory):
        raise UndeError(
            f"optimizer is a {type(factory).__name__}: {expected}. Pass the state of an existing optimizer as "
            "optimizer_state=optimizer.state_dict()"
        )
    first = factory(list(trainable))
    if not isinstance(first, Optimizer):
        raise UndeError(f"optimizer(parameters) gave a {type(first).__name__}: {expected}")
    if factory(list(trainable)) is first:
        raise UndeError(
            f"optimizer(parameters) gave the same optimizer twice, and steps would add up in it: {expected}. "
            "Pass the state to start from as optimizer_state="
        )
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in first.param_groups for p in group["params"]]
    foreign = next((p for p in parameters if id(p) not in names), None)
    if foreign is not None:
        raise UndeError(
            f"the optimizer holds a parameter of shape {tuple(foreign.shape)} that is not one of the model's: its step "
            "would not change the model. Make it from the parameters that the function is given"
        )
    if state is not None:
        _check_state(state, first, [names[id(p)] for p in parameters])
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
        optimizer = factory(list(trainable))
        if state is not None:
            with explain_step_errors(optimizer):  # torch keeps the tensors, and steps change them
                optimizer.load_state_dict(copy.deepcopy(dict(state)))
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        return optimizer

    return make, parameters


def _check_state(state: Mapping[str, Any], optimizer: Optimizer, names: list[str]) -> None:
    """Refuse a state that was saved for other parameters."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        what = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise UndeError(f"optimizer_state is {what}: expected what optimizer.state_dict() gives")
    parameters, keys = (
        [p for group in groups for p in group["params"]]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    expected, actual = (
        [len(g["params"]) for g in groups] for groups in (optimizer.param_groups, state["param_groups"])
    )
    problem = ""
    for name, p, key in zip(names, parameters, keys):
        for entry, value in state["state"].get(key, {}).items():
            if not problem and entry in _LIKE_PARAMETER and value.shape != p.shape:
                problem = (
                    f" Its {entry} of {name!r} has shape {tuple(value.shape)}, expected {tuple(p.shape)}."
                )
    if actual != expected or problem:
        raise UndeError(
            f"optimizer_state does not fit: it holds {len(keys)} parameters in groups of {actual}, the optimizer "
            f"{len(parameters)} in groups of {expected}.{problem} It was saved for another model, or for parameters "
            "in another order or grouping: `optimizer` must make the optimizer as training did"
        )


def explain_step_errors(optimizer: Optimizer) -> AbstractContextManager[None]:
    message = (
        f"{type(optimizer).__name__} cannot take a step ({{kind}}: {{e}}): expected an optimizer whose step() needs "
        "no argument, and an optimizer_state that this kind of optimizer has saved"
    )
    return explain(message, KeyError, IndexError, TypeError, ValueError, RuntimeError)
