"""The metric of an Adam-like optimizer: gradients are divided by (√v̂ + ε)^1/2, on both sides of a score.

A step of Adam is −g / (√v̂ + ε), so a training example moves the loss of a query by ⟨g(q), g(n) / (√v̂ + ε)⟩: v^−1/4 on
each side. Without an optimizer, v is the mean of squared gradients of training examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, to_device
from unde.errors import UndeError
from unde.gradients.fallback import compute_measures
from unde.gradients.model_state import frozen_eval
from unde.tasks.base import Task

EPS = 1e-8
GRADIENTS = "gradients"  # second moments of training examples
SAMPLE = 256  # of them
_KEY = "exp_avg_sq"
_HELP = "pass the optimizer itself, or {parameter name: second moments}"


def scales(second_moments: Any, model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """ "scale/<name>" for every attributed parameter: (√v̂ + ε)^−1/2, and 0 where v is 0.

    `second_moments` is a torch optimizer, its state_dict(), or {parameter name: v}.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> scales({"weight": torch.tensor([[16.0, 0.0]])}, layer, ["weight"])["scale/weight"]
    tensor([[0.5000, 0.0000]])
    """
    moments = moments_by_name(second_moments, model)
    parameters = dict(model.named_parameters())
    out = {}
    for name in names:
        if name not in moments:
            raise UndeError(
                f"the optimizer state has no second moments for parameter {name!r}: is it of another model? "
                f"It has them for {len(moments)} parameters; {_HELP}, or exclude the parameter"
            )
        v, eps = moments[name]
        if v.shape != parameters[name].shape:
            raise UndeError(
                f"the optimizer state is of another model: parameter {name!r} has shape "
                f"{tuple(parameters[name].shape)}, its second moments {tuple(v.shape)}; {_HELP}"
            )
        if not (v.isfinite() & (v >= 0)).all():
            raise UndeError(f"the second moments of parameter {name!r} hold NaN or negative entries")
        v = v.detach().float().cpu()
        out[f"scale/{name}"] = torch.where(v > 0, (v.sqrt() + eps).rsqrt(), 0.0)
    return out


def of_gradients(model: nn.Module, task: Task, rows: Rows, names: Sequence[str]) -> dict[str, Tensor]:
    """{parameter: mean g²} over training examples that are spread over the data, one at a time."""
    by_name = dict(model.named_parameters())
    parameters = [by_name[name] for name in names]
    where = evenly(len(rows), SAMPLE)
    total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    with frozen_eval(model):
        for p in parameters:
            p.requires_grad_(True)
        for i in where:
            batch = to_device(rows.batch([i]), parameters[0].device)
            loss = compute_measures(task, model, batch, ["loss"], [i])["loss"].sum()
            for square, g in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True)):
                if g is not None and g.isfinite().all():
                    square += g.float().square()
    return {name: square / len(where) for name, square in zip(names, total)}


def moments_by_name(source: Any, model: nn.Module) -> dict[str, tuple[Tensor, float]]:
    """(v̂, ε) of each parameter."""
    if isinstance(source, torch.optim.Optimizer):
        names = {id(p): n for n, p in model.named_parameters()}
        pairs = [(g, p) for g in source.param_groups for p in g["params"]]
        if not any(id(p) in names for _, p in pairs):
            raise UndeError("the optimizer holds none of the model's parameters: it is of another model")
        return {
            names[id(p)]: _correct_bias(source.state[p], g)
            for g, p in pairs
            if id(p) in names and _KEY in source.state.get(p, {})
        }
    if isinstance(source, Mapping) and {"state", "param_groups"} <= set(source):
        return _from_state_dict(source, model)
    if isinstance(source, Mapping) and all(isinstance(v, Tensor) for v in source.values()):
        return {str(n): (v, EPS) for n, v in source.items()}
    raise UndeError(
        f"second_moments is a {type(source).__name__}: expected an optimizer, its state_dict(), "
        "{parameter name: second moments}, or 'gradients'"
    )


def _from_state_dict(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, tuple[Tensor, float]]:
    """State dicts number parameters in the order of the model's, unless they have names."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    numbers = [(i, g) for g in state_dict["param_groups"] for i in g["params"]]
    names = [n for g in state_dict["param_groups"] for n in g.get("param_names", ())]
    if names and len(names) != len(numbers):
        raise UndeError(f"the optimizer state names {len(names)} of its {len(numbers)} parameters; {_HELP}")
    if not names and len(numbers) != len(trained):
        raise UndeError(
            f"the optimizer state is of another model: it has {len(numbers)} parameters, the model "
            f"{len(trained)} that are trained; {_HELP}"
        )
    moments = {}
    for (i, group), name in zip(numbers, names or trained, strict=True):
        state = state_dict["state"].get(i, {})
        if _KEY in state:
            moments[name] = _correct_bias(state, group)
    if not moments:
        raise UndeError(
            f"the optimizer state holds no second moments ({_KEY!r}): expected that of Adam, AdamW or alike, "
            "after at least one step"
        )
    return moments


def _correct_bias(state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, float]:
    """v / (1 − β₂ᵗ) as Adam corrects it, and its ε."""
    step, betas = float(state.get("step", 0)), group.get("betas")
    correction = 1 - betas[1] ** step if betas is not None and step > 0 else 1.0
    return state[_KEY] / correction, float(group.get("eps", EPS))
