"""Passes to compare with: one of training, and the floor under any feature pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import to_device
from unde.gradients.activations import quick_activations
from unde.gradients.collector import GraphStart
from unde.gradients.layers import rule_for
from unde.gradients.linear_maps import quick_linears
from unde.gradients.memory_format import channels_last
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.tasks.base import Task


def plain(model: nn.Module, task: Task, batches: Iterable[Any]) -> None:
    """Forward and backward with all weights requiring grad: what training costs at least."""
    device, _ = placement(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with frozen_eval(model):
        for p in trained:
            p.requires_grad_(True)
        for batch in batches:
            for p in trained:
                p.grad = None
            for part in task.batching.passes(to_device(batch, device), None):
                task.loss(model, part).sum().backward()


def frozen(model: nn.Module, task: Task, batches: Iterable[Any]) -> None:
    """The same with frozen weights and no features: the floor under any feature pass."""
    device, _ = placement(model)
    anchor = torch.zeros((), device=device, requires_grad=True)

    def start_graph(_module: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
        return None if out.requires_grad else GraphStart.apply(out, anchor)

    held = [
        m
        for m in model.modules()
        if any(p.requires_grad for p in m.parameters(recurse=False)) and rule_for(m)
    ]
    handles = [m.register_forward_hook(start_graph) for m in held]
    try:
        # The floor under the pass that the build really runs.
        with frozen_eval(model), quick_linears(model), quick_activations(model), channels_last(model):
            for batch in batches:
                for part in task.batching.passes(to_device(batch, device), None):
                    loss = task.loss(model, part).sum()
                    torch.autograd.grad(loss, anchor, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
