"""Labels drawn from a model's own predictions, the same for an example wherever it stands.

The gradients of such labels have the Fisher information of the model as their second moment; those of the
labels of the data do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unde.devices import double_device
from unde.errors import UndeError

SEED = 20240229  # fixed: a label is a function of the model and the example alone
CHUNK = 2**26  # bytes of probabilities held at once


def uniforms(ids: Sequence[int] | None, count: int) -> Tensor:
    """(B, count) numbers in [0, 1), those of each example from a generator of its own; more only adds more."""
    if ids is None or any(i < 0 for i in ids):
        raise UndeError(
            f"labels are drawn for each example by its number, got ids={ids}: pass the positions of the examples "
            "in the data, as in measure(model, batch, name='sampled', ids=[0, 1, 2])"
        )
    rows = [np.random.Generator(np.random.Philox(key=[SEED, int(i)])).random(count) for i in ids]
    return torch.from_numpy(np.stack(rows))


def draw(logits: Tensor, u: Tensor, where: Tensor | None = None) -> Tensor:
    """(N,) classes: u falls in their part of [0, 1) when the softmax of a row of `logits` is laid out along it.

    `where` are the rows to draw for, all (R, V) of them by default.
    """
    where = torch.arange(len(logits), device=logits.device) if where is None else where
    place = double_device(logits.device)
    step = max(1, CHUNK // (8 * logits.shape[-1]))
    parts = [where.new_empty(0)]
    for rows, x in zip(where.split(step), u.to(place).split(step)):
        edges = logits.detach()[rows].to(place).double().softmax(-1).cumsum(-1)
        # Rounding may leave the last edge below one; right=True never picks a class of probability zero.
        found = torch.searchsorted(edges, (x * edges[:, -1]).unsqueeze(1), right=True)[:, 0]
        parts.append(found.clamp(max=logits.shape[-1] - 1).to(where.device))
    return torch.cat(parts)
