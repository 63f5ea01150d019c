"""Defaults of small models: they can afford whole gradients under any kernel, and the right curvature."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from unde.data import Rows, to_device
from unde.default_device import program_default
from unde.devices import double_device
from unde.errors import UndeError
from unde.gradients.hooks import FAILURES
from unde.gradients.model_state import frozen_eval
from unde.groups import trainable
from unde.methods import PROJECTION, Damped, Method
from unde.methods.builtin import MOST_LABELS
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec, feature_size
from unde.tasks.base import Task

SMALL = 5_000  # parameters of a model whose gradients are kept whole
FACTOR = 2  # so many times the projected features, too
DISK = 2**28  # bytes of gradients with every label, at most
STATIONARY = 0.95  # cosine of the summed gradients with −θ from which on they are those of L2 regularization
_BATCH = 256


def default_projection(model: nn.Module, names: Sequence[str] | None = None) -> str:
    """Features of methods that mix them: "none" for small models, and where kron(16) would not keep much less; else
    kron(16). `names` are those of the parameters.

    >>> default_projection(nn.Linear(64, 10)), default_projection(nn.Linear(512, 512))
    ('none', 'kron(16)')
    """
    shapes = dict(model.named_parameters())
    names = trainable(model) if names is None else names
    whole, projected = (
        sum(feature_size(Spec.parse(p), tuple(shapes[n].shape)) for n in names) for p in ("none", PROJECTION)
    )
    return "none" if whole <= SMALL or whole <= FACTOR * projected else PROJECTION


def regularized(method: Method, inputs: BuildInputs, exclude: Sequence[str] = ()) -> Damped | None:
    """The method with the true Fisher matrix and the λ of a small model at its minimum, if it leaves both open."""
    if not isinstance(method, Damped) or inputs.checkpoints is not None or method.measure != "loss":
        return None
    if method.damping != "auto" or getattr(method, "fisher", "") not in ("auto", "true"):
        return None
    decay = weight_decay(inputs.model, inputs.task, inputs.rows, exclude)
    if decay is None:
        return None
    damping = decay / (len(inputs.rows) if method.per_example else 1)
    return replace(method, damping=damping, relative=False, fisher="true")


def weight_decay(model: nn.Module, task: Task, rows: Rows, exclude: Sequence[str] = ()) -> float | None:
    """λ of the L2 regularization that a small model is at the minimum of, as an addition to the sum of all losses.

    At such a minimum Σ_n g_n = −λ θ. None where the gradients of matrices do not point there, or the model is not
    small, or has too many labels: then nothing is known about λ.
    """
    names = trainable(model, exclude)
    parameters = [p for n, p in model.named_parameters() if n in set(names)]
    count = sum(p.numel() for p in parameters)
    decayed = [p for p in parameters if p.dim() > 1]
    if count > SMALL or not decayed:
        return None
    with suppress(UndeError, *FAILURES):  # the build that follows says what is wrong, and with which example
        total = _total(model, task, rows, parameters, decayed)
        if total is not None:
            return _strength(_flat(total), _flat([p.detach().cpu().double() for p in decayed]))
    return None


def _total(
    model: nn.Module, task: Task, rows: Rows, parameters: list[nn.Parameter], decayed: list[nn.Parameter]
) -> list[Tensor] | None:
    """Summed gradients of all examples; None where fisher="true" is not for this task."""
    device, count = parameters[0].device, sum(p.numel() for p in parameters)
    with frozen_eval(model):
        with torch.no_grad(), program_default():
            labels = task.outputs(model, to_device(rows.batch([0]), device))
        if labels is None or labels > MOST_LABELS or 4 * len(rows) * labels * count > DISK:
            return None
        for p in parameters:
            p.requires_grad_(True)
        total = [torch.zeros_like(p, dtype=torch.float64, device=double_device(p.device)) for p in decayed]
        for start in range(0, len(rows), _BATCH):
            batch = to_device(rows.batch(range(start, min(start + _BATCH, len(rows)))), device)
            with program_default():
                loss = task.loss(model, batch).sum()
            grads = torch.autograd.grad(loss, decayed, allow_unused=True)
            for sum_, g in zip(total, grads):
                if g is not None:
                    sum_ += g.to(sum_.device)
    return total


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten().cpu() for t in tensors])


def _strength(total: Tensor, theta: Tensor) -> float | None:
    along = -float(total @ theta)
    sizes = float(total.norm() * theta.norm())
    return along / float(theta @ theta) if sizes > 0 and along >= STATIONARY * sizes else None
