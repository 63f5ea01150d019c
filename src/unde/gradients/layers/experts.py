"""Mixtures of experts in one module: (experts, out, in) tensors, and a list of experts and weights for each token.

The rule recomputes the outputs of the experts: one more forward pass through them. Tokens are sorted by expert and
example. Experts with about as many tokens are multiplied together, padded to the most tokens of one. The host needs the
counts of tokens for that, and reads those of all layers of a pass in one copy.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unde.gradients.layers.base import CHUNK, Call, FeatureSink, Rule, register_where
from unde.projection import Projection

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_PADDING = 2  # rows of experts that are multiplied together, at most so many times those with tokens


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
        for some, x, z, grad_z, grad_y in self._experts(saved, g):
            for name, left, right in ((up, grad_z, x), ("down_proj", grad_y, z)):
                if f"{name}_bias" in wanted:
                    sums[f"{name}_bias"].add(some, left, None)
                if name in wanted:
                    pair = (right, left) if getattr(self.module, "is_transposed", False) else (left, right)
                    sums[name].add(some, *pair)
        for name, total in sums.items():
            out.add(name, total.feature())

    def _experts(
        self, saved: Any, g: Tensor
    ) -> Iterator[tuple[_NeighbouringExperts, Tensor, Tensor, Tensor, Tensor]]:
        """For experts that are multiplied together: their tokens, inputs of both layers, gradients of their outputs."""
        m, (hidden, weights, routes) = self.module, saved
        up = str(_up(m))
        each = 2 * (hidden.shape[1] + max(m._parameters[up].shape[1:])) * hidden.element_size()
        for some in routes.split(CHUNK // each):
            x = hidden[some.tokens]
            grad_y = (g[some.tokens] * weights[some.tokens, some.choice, None]).to(x.dtype)
            a = self._linear(x, up, some)
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                z = m._apply_gate(a) if getattr(m, "has_gate", up == "gate_up_proj") else m.act_fn(a)
            down = m.down_proj[some.experts]
            grad_z = some.times(grad_y, down.mT if getattr(m, "is_transposed", False) else down)
            yield some, x, z.detach(), torch.autograd.grad(z, a, grad_z)[0], grad_y

    def _linear(self, x: Tensor, name: str, some: _NeighbouringExperts) -> Tensor:
        m = self.module
        weight = m._parameters[name][some.experts]
        y = some.times(x, weight if getattr(m, "is_transposed", False) else weight.mT)
        bias = m._parameters.get(f"{name}_bias")
        return y if bias is None else y + bias[some.expert]


_unread: list[weakref.ref[_Routes]] = []  # of this pass, and of passes that were given up


class _Routes:
    """Rows, one for each expert of a token, sorted by expert and example; what the host knows of them are counts."""

    def __init__(self, index: Tensor, experts: int, batch: int) -> None:
        self.experts, self.batch, each = experts, batch, len(index) // batch
        example = torch.arange(len(index), device=index.device) // each
        key = (index.clamp(max=experts) * batch + example[:, None]).flatten()  # beyond them: no expert
        self._counts = torch.zeros((experts + 1) * batch, dtype=torch.int64, device=index.device)
        self._counts.scatter_add_(0, key, torch.ones_like(key))
        self.first = self._counts.cumsum(0) - self._counts  # row of the first token of an expert and example
        order = torch.argsort(key, stable=True)
        self.key, self.tokens, self.choice = key[order], order // index.shape[1], order % index.shape[1]
        self._on_host: Tensor | None = None
        _unread.append(weakref.ref(self))

    def _read(self) -> Tensor:
        """(experts, batch) counts of tokens, on the host; those of other layers come with the same copy."""
        if self._on_host is not None:
            return self._on_host
        alive = [r for ref in _unread if (r := ref()) is not None and r._on_host is None and r is not self]
        together = [self, *(r for r in alive if r._counts.device == self._counts.device)]
        counts = torch.cat([r._counts for r in together]).cpu().split([len(r._counts) for r in together])
        for r, part in zip(together, counts):
            r._on_host = part.view(-1, r.batch)[:-1]
        _unread[:] = [weakref.ref(r) for r in alive if r._on_host is None]
        return counts[0].view(-1, self.batch)[:-1]

    def split(self, most: int) -> Iterator[_NeighbouringExperts]:
        """Neighbouring experts that are multiplied together: not many more rows than tokens, and at most `most`."""
        counts = self._read()
        tokens, start = counts.sum(1).tolist(), 0
        while start < len(tokens):
            stop, largest, total = start + 1, tokens[start], tokens[start]
            for e in range(start + 1, len(tokens)):
                largest, total = max(largest, tokens[e]), total + tokens[e]
                rows = (e + 1 - start) * largest
                if rows > _PADDING * total or rows > most:
                    break
                stop = e + 1
            if any(tokens[start:stop]):
                yield _NeighbouringExperts(self, slice(start, stop), tokens, counts)
            start = stop


class _NeighbouringExperts:
    """The tokens of some experts: their positions, which of its experts these are to each, and how many there are."""

    def __init__(self, routes: _Routes, experts: slice, tokens: list[int], counts: Tensor) -> None:
        self.experts, self.most = experts, max(tokens[experts])  # tokens of an expert
        start, batch = sum(tokens[: experts.start]), routes.batch
        rows = slice(start, start + sum(tokens[experts]))
        self.tokens, self.choice, key = routes.tokens[rows], routes.choice[rows], routes.key[rows]
        row = torch.arange(rows.start, rows.stop, device=key.device)
        self.expert, example = key // batch, key % batch
        self._place = row - routes.first[self.expert * batch]  # among the tokens of the expert
        self.pair = example * routes.experts + self.expert
        self.place = row - routes.first[key]  # among the tokens of the pair
        self.number = (self.place == 0).cumsum(0) - 1  # of the pair, among those that have tokens
        self.sizes = [n for n in counts[experts].flatten().tolist() if n]
        self.pairs = batch * routes.experts

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows (n, d) times the matrix (d, f) of their expert."""
        if len(weight) == 1:
            return x @ weight[0]
        at = (self.expert - self.experts.start, self._place)
        return _pad(x, at, len(weight), self.most).bmm(weight)[at]


class _GradientSum:
    """Per-example gradients of one (experts, …) parameter, projected expert by expert where they can be."""

    def __init__(self, projection: Projection, batch: int) -> None:
        self.p, self.batch = projection, batch
        self._parts: Tensor | None = None  # (B · experts, columns)

    def add(self, some: _NeighbouringExperts, left: Tensor, right: Tensor | None) -> None:
        """Σ leftᵀ right over the tokens of each expert and example, or Σ left."""
        wide = left.shape[-1] * (1 if right is None else right.shape[-1])
        sides = max(some.sizes) * (left.shape[-1] + (0 if right is None else right.shape[-1]))
        step = max(1, CHUNK // ((wide + sides) * left.element_size()))
        for start in range(0, len(some.sizes), step):
            sizes = some.sizes[start : start + step]
            first = sum(some.sizes[:start])
            rows = slice(first, first + sum(sizes))
            at, shape = (some.number[rows] - start, some.place[rows]), (len(sizes), max(sizes))
            a = _pad(left[rows], at, *shape)
            whole = a.sum(1) if right is None else torch.bmm(a.mT, _pad(right[rows], at, *shape)).flatten(1)
            part = self.p.cols(whole) if self.p.factored else whole
            if self._parts is None:
                self._parts = part.new_zeros(some.pairs, part.shape[1])
            pairs = at[0].new_empty(len(sizes)).scatter_(0, at[0], some.pair[rows])
            self._parts[pairs] = part

    def feature(self) -> Tensor:
        if self._parts is None:  # no token has an expert
            return torch.zeros(self.batch, self.p.size, device=self.p.device, dtype=self.p.dtype)
        parts = self._parts.unflatten(0, (self.batch, -1))
        if self.p.factored and self.p.row_matrix is not None:
            parts = self.p.row_matrix.to(parts.dtype) @ parts
        return parts.flatten(1) if self.p.factored else self.p.flat(parts.flatten(1))


def _pad(x: Tensor, at: tuple[Tensor, Tensor], count: int, most: int) -> Tensor:
    """(n, d) rows at their places in (count, most, d), the rest zeros."""
    padded = x.new_zeros(count, most, x.shape[-1])
    padded[at] = x
    return padded
