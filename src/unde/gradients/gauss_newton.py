"""Products of the Gauss-Newton matrix with vectors, G v = mean over examples of Jᵀ H J v.

J is the Jacobian of what the model returns, H the second derivative of the loss with respect to that. J v takes a
forward pass in forward mode, H one more derivative of the loss alone, Jᵀ an ordinary backward pass: there is no matrix.
The loss may be any function of the model's outputs, such as logits; G is defined where nothing else of the model
enters it, and positive where it is convex in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from unde import console
from unde.data import Rows, evenly, map_tensors, to_device
from unde.errors import UndeError
from unde.gradients.fallback import MeasureModule
from unde.gradients.feature_pass import split_range
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import Unit, placement
from unde.gradients.statistics import SAMPLE
from unde.tasks.base import Task


@dataclass(frozen=True)
class GaussNewton:
    """The Gauss-Newton matrix of up to `SAMPLE` training examples, evenly spaced.

    Args:
        units: The parameters, whole: their columns are those of the vectors.
        size: Examples in a pass.
    """

    model: nn.Module
    task: Task
    rows: Rows
    units: Sequence[Unit]
    size: int

    def times(self, vectors: Tensor, title: str) -> Tensor:
        """(Q, D): G times each of the vectors (Q, D)."""
        where, out = evenly(len(self.rows), SAMPLE), torch.zeros_like(vectors)
        cuts = [where[r.start : r.stop] for r in split_range(range(len(where)), self.size)]
        device = placement(self.model)[0]
        measure = MeasureModule(self.model, self.task, "loss")
        with (
            frozen_eval(self.model),
            sdpa_kernel(SDPBackend.MATH),  # the only one that has second derivatives
            console.progress(title, len(cuts), unit="passes") as advance,
        ):
            for cut, batch, _ in self.rows.batches(cuts):
                numbers = list(cut)
                for which, portion in self.task.batching.portions(to_device(batch, device)):
                    for part in self.task.batching.passes(portion, numbers[which]):
                        self._add(out, vectors, measure, part, numbers[which])
                advance(1)
        return out.div_(len(where))

    def _add(
        self, out: Tensor, vectors: Tensor, measure: MeasureModule, part: Any, numbers: Sequence[int]
    ) -> None:
        parameters = dict(self.model.named_parameters())
        inputs = {u.name: parameters[u.name].detach().requires_grad_() for u in self.units}
        outputs, leaves, slopes = _differentiate(self.model, measure, inputs, part, numbers)
        for v, total in zip(vectors, out):
            tangents = {u.name: v[u.columns].view(u.shape).to(inputs[u.name]) for u in self.units}
            moved = _push_forward(self.model, measure, inputs, tangents, part, numbers)
            bent = torch.autograd.grad(slopes, leaves, moved, retain_graph=True, allow_unused=True)
            pairs = [(z, h) for z, h in zip(outputs, bent) if h is not None]
            gradients = torch.autograd.grad(
                [z for z, _ in pairs], list(inputs.values()), [h for _, h in pairs], True, allow_unused=True
            )
            for u, g in zip(self.units, gradients):
                if g is not None:
                    total[u.columns] += g.flatten().to(total)


def _differentiate(
    model: nn.Module, measure: MeasureModule, inputs: dict[str, Tensor], part: Any, numbers: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The model's outputs, leaves in their place, and the gradients of the loss with respect to these."""
    outputs, leaves = list[Tensor](), list[Tensor]()

    def cut(_module: nn.Module, _args: Any, result: Any) -> Any:
        def leaf(z: Tensor) -> Tensor:
            if not z.requires_grad:
                return z
            outputs.append(z)
            leaves.append(z.detach().requires_grad_())
            return leaves[-1]

        return map_tensors(result, leaf)

    hook = model.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            loss = measure.values(inputs, part, numbers)[0].sum()
    finally:
        hook.remove()
    tensors = [*leaves, *inputs.values()]
    found = (
        torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True) if loss.requires_grad else ()
    )
    if any(g is not None for g in found[len(leaves) :]):
        raise _undefined("the loss depends on the parameters in other ways than by what the model returns")
    used = [(z, x, g) for z, x, g in zip(outputs, leaves, found) if g is not None and g.requires_grad]
    if not used:
        raise _undefined("the loss is no curved function of what the model returns")
    return [z for z, _, _ in used], [x for _, x, _ in used], [g for _, _, g in used]


def _push_forward(
    model: nn.Module,
    measure: MeasureModule,
    inputs: dict[str, Tensor],
    tangents: dict[str, Tensor],
    part: Any,
    numbers: Sequence[int],
) -> list[Tensor]:
    """J v of the outputs that need a gradient, in the order of `_differentiate`."""
    moved = list[Tensor]()

    def record(_module: nn.Module, _args: Any, result: Any) -> None:
        def tangent(z: Tensor) -> Tensor:
            if (t := forward_ad.unpack_dual(z).tangent) is not None:
                moved.append(t.detach())
            return z

        map_tensors(result, tangent)

    hook = model.register_forward_hook(record)
    try:
        with torch.no_grad(), forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(x.detach(), tangents[name]) for name, x in inputs.items()}
            measure.values(duals, part, numbers)
    except (RuntimeError, NotImplementedError) as e:
        raise UndeError(
            f"conjugate gradients need forward-mode derivatives, and the model has an operation without: "
            f"{str(e).splitlines()[0]}. Leave cg out"
        ) from e
    finally:
        hook.remove()
    return moved


def _undefined(why: str) -> UndeError:
    return UndeError(
        f"conjugate gradients need the Gauss-Newton matrix, which is not defined here: {why}. Expected a task that "
        "calls the model and computes its loss from what that returns, as unde.tasks do. Leave cg out"
    )
