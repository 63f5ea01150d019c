"""Mixtures of experts in one module: (experts, out, in) tensors, and a list of experts and weights for each token.

The rule recomputes the outputs of the experts: one more forward pass through them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unde.devices import mark
from unde.gradients.layers.base import CHUNK, Call, FeatureSink, Rule, register_where
from unde.projection import Projection

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def _is_experts(module: nn.Module) -> bool:
    both = [module._parameters.get(n) for n in ("down_proj", _up(module) or "")]
    return (
        all(p is not None and p.dim() == 3 for p in both)
        and len(inspect.signature(type(module).forward).parameters) == 1 + len(_ARGUMENTS)
        and not getattr(module, "has_post_expert_norm", False)
    )


def _up(module: nn.Module) -> str | None:
    return next((n for n in ("gate_up_proj", "up_proj") if module._parameters.get(n) is not None), None)


@register_where(_is_experts)
class Experts(Rule):
    """As transformers has them: experts of two layers with a gate or an activation between them."""

    whole = True

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        both = (_up(module), "down_proj")
        return tuple(n for k in both for n in (f"{k}", f"{k}_bias") if module._parameters.get(n) is not None)

    def forward(self, x: Any, y: Tensor, batch: int) -> Any:
        call: Call = x
        bound = inspect.signature(type(self.module).forward).bind(self.module, *call.args, **call.kwargs)
        hidden, index, weights = list(bound.arguments.values())[1:]
        if index.shape != weights.shape or len(index) != len(hidden.flatten(0, -2)) or len(index) % batch:
            raise NotImplementedError("tokens and the experts chosen for them are laid out in another way")
        return hidden.flatten(0, -2), weights.detach(), _Routes(index, len(self.module.down_proj), batch)

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        g, up = g.flatten(0, -2), str(_up(self.module))
        wanted = set(self.projections)
        sums = {n: _GradientSum(self.projections[n], batch) for n in wanted}
        for rows, x, z, grad_z, grad_y in self._experts(saved, g):
            for name, left, right in ((up, grad_z, x), ("down_proj", grad_y, z)):
                if f"{name}_bias" in wanted:
                    sums[f"{name}_bias"].add(rows, left, None)
                if name in wanted:
                    pair = (right, left) if getattr(self.module, "is_transposed", False) else (left, right)
                    sums[name].add(rows, *pair)
        for name, total in sums.items():
            out.add(name, total.feature())

    def _experts(
        self, saved: Any, g: Tensor
    ) -> Iterator[tuple[_ExpertTokens, Tensor, Tensor, Tensor, Tensor]]:
        """For every expert with tokens: these, inputs of its two layers, gradients of their outputs."""
        m, (hidden, weights, routes) = self.module, saved
        up = str(_up(m))
        for rows in routes.experts():
            e, x = rows.expert, hidden[rows.tokens]
            grad_y = (g[rows.tokens] * weights[rows.tokens, rows.choice, None]).to(x.dtype)
            a = self._linear(x, up, e)
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                z = m._apply_gate(a) if getattr(m, "has_gate", up == "gate_up_proj") else m.act_fn(a)
            down = m.down_proj[e]
            grad_z = grad_y @ (down.mT if getattr(m, "is_transposed", False) else down)
            yield rows, x, z.detach(), torch.autograd.grad(z, a, grad_z)[0], grad_y

    def _linear(self, x: Tensor, name: str, e: int) -> Tensor:
        m = self.module
        weight = m._parameters[name][e]
        y = x @ (weight if getattr(m, "is_transposed", False) else weight.mT)
        bias = m._parameters.get(f"{name}_bias")
        return y if bias is None else y + bias[e]


class _ExpertTokens(NamedTuple):
    """The tokens of one expert, in the order of their examples."""

    expert: int
    tokens: Tensor  # (m,)
    choice: Tensor  # (m,) which of its experts this is to each token
    example: Tensor  # (m,)
    place: Tensor  # (m,) among the tokens of its example
    counts: list[int]  # tokens of each example


class _Routes:
    """Tokens sorted by expert and example. Their counts are on their way to the host until they are needed: a device is
    waited for once, whatever the number of experts."""

    def __init__(self, index: Tensor, experts: int, batch: int) -> None:
        self.experts_of_token, self.batch, self.device = index.shape[1], batch, index.device
        each = len(index) // batch
        example = torch.arange(len(index), device=index.device) // each
        key = (index.clamp(max=experts) * batch + example[:, None]).flatten()  # beyond them: no expert
        self._order = torch.argsort(key, stable=True)
        self._counts = torch.zeros((experts + 1) * batch, dtype=torch.int64, device=index.device)
        self._counts.scatter_add_(0, key, torch.ones_like(key))
        self._first = self._counts.cumsum(0) - self._counts  # row of the first token of an expert and example
        self._key = key[self._order]
        self._on_host = self._counts.to("cpu", non_blocking=True)
        self._ready = mark(index.device)

    def experts(self) -> Iterator[_ExpertTokens]:
        self._ready()
        start = 0
        for e, counts in enumerate(self._on_host.view(-1, self.batch)[:-1].tolist()):
            stop = start + sum(counts)
            if stop > start:
                rows, key = self._order[start:stop], self._key[start:stop]
                place = torch.arange(start, stop, device=self.device) - self._first[key]
                tokens, choice = rows // self.experts_of_token, rows % self.experts_of_token
                yield _ExpertTokens(e, tokens, choice, key - e * self.batch, place, counts)
            start = stop


class _GradientSum:
    """Per-example gradients of one (experts, …) parameter, projected expert by expert where they can be."""

    def __init__(self, projection: Projection, batch: int) -> None:
        self.p, self.batch = projection, batch
        self.rows: dict[int, Tensor] = {}  # of each expert, (B, columns)

    def add(self, rows: _ExpertTokens, left: Tensor, right: Tensor | None) -> None:
        """Σ leftᵀ right over the tokens of each example, or Σ left."""
        parts = list[Tensor]()
        size = left.shape[-1] * (1 if right is None else right.shape[-1]) * left.element_size()
        step = max(1, CHUNK // size)
        for start in range(0, self.batch, step):
            counts = rows.counts[start : start + step]
            first = sum(rows.counts[:start])
            here = slice(first, first + sum(counts))
            where = (rows.example[here] - start, rows.place[here])
            a = _pad(left[here], where, counts)
            b = None if right is None else _pad(right[here], where, counts)
            whole = a.sum(1) if b is None else torch.bmm(a.mT, b).flatten(1)
            parts.append(self.p.cols(whole) if self.p.factored else whole)
        self.rows[rows.expert] = torch.cat(parts)

    def feature(self) -> Tensor:
        zero = torch.zeros_like(next(iter(self.rows.values())))
        if self.p.factored and self.p.row_matrix is not None:
            parts = (self.p.row_matrix[:, e, None] * rows[:, None] for e, rows in self.rows.items())
            return sum(parts, zero.new_zeros(())).flatten(1)
        whole = torch.stack([self.rows.get(e, zero) for e in range(self.p.R)], 1).flatten(1)
        return whole if self.p.factored else self.p.flat(whole)


def _pad(x: Tensor, where: tuple[Tensor, Tensor], counts: list[int]) -> Tensor:
    """(m, d) rows of several examples → (B, most, d), zeros where an example has fewer."""
    padded = x.new_zeros(len(counts), max(counts), x.shape[-1])
    padded[where] = x
    return padded
