"""Optimizers: the one of a further step, with the state of training, and copies for other parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from unde.errors import UndeError, explain

Factory = Callable[[list[nn.Parameter]], Optimizer]

# Entries of torch.optim states that have the shape of their parameter.
_LIKE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "ax"),
)


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


# Optimizers that step each number by itself, so that parameters of several models may lie in one tensor.
_ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad, Adadelta)
_FUSED = (SGD, Adam, AdamW, Adagrad)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is known to step each number by itself; subclasses are not."""
    return type(optimizer) in _ELEMENTWISE


def use_fused(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with a fused step, if torch has one and no implementation was chosen."""
    groups, chosen = optimizer.param_groups, ("fused", "foreach", "differentiable", "capturable")
    free = not any(
        group.get(name) not in (None, False) or group.get("fused") is False
        for group in groups
        for name in chosen
    )
    floating = all(p.is_floating_point() for group in groups for p in group["params"])
    if type(optimizer) not in _FUSED or optimizer.state or not free or not floating:
        return optimizer
    return rebuild(optimizer, lambda p: p, fused=True)


def rebuild(optimizer: Optimizer, replace: Callable[[Any], Any], **changes: Any) -> Optimizer:
    """An optimizer of the same kind and settings for other parameters, group by group."""
    groups = [
        {**group, "params": [replace(p) for p in group["params"]], **changes}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)  # ty: ignore[missing-argument]
