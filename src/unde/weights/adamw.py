"""Algorithm 1 of the paper (app. B.4): weights by stochastic gradient steps, one for each query.

With w = softmax(v) of raw weights v, scores s = C_q w of one query, n = ‖s‖ and p the mean of the selected scores,

    L(w) = −p / n + λ ‖w‖₂,      ∂(p / n)/∂s = (1_selected / k − (p / n) s / n) / n,

and the gradient goes on to w by C_qᵀ and to v by the softmax: w ⊙ (g − ⟨w, g⟩). λ is that of Eq. 6; decoupled decay λ′
pulls v to 0, where w is uniform. Adam's steps do not depend on the size of the gradient, so v_j settles within
±1/λ′: the decay bounds the logarithm of the weights, whatever the problem.

What the listing leaves open is: v starts at N(0, 0.01²), near uniform weights; queries are shuffled in each epoch.
Candidates that differ in k, λ′ or λ take their steps together, in one pass over the contributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unde import console
from unde.devices import double_device, put
from unde.weights.contributions import Blocks
from unde.weights.objective import Fit, WeightProblem, selection, zero_contributions_error

INIT = 0.01  # standard deviation of the raw weights at the start
_BETAS = (0.9, 0.999)
_EPS = 1e-30  # far below any gradient, else the unit of the scores would matter without normalisation


def adamw(
    problems: Sequence[WeightProblem],
    weight_decays: Sequence[float],
    *,
    epochs: int,
    lr: float,
    penalties: Sequence[float] | None = None,
    seed: int = 0,
) -> list[Fit]:
    """Solve problems with the same queries and objective: AdamW on raw weights, cosine annealing over all steps."""
    first = problems[0]
    data, groups = first.data, first.data.groups
    ks = torch.tensor([p.k for p in problems])
    there = double_device(data.device)
    decay = torch.tensor(weight_decays, dtype=torch.float64)[:, None].to(there)
    cost = torch.tensor(penalties or [0.0] * len(problems), dtype=torch.float64)[:, None].to(there)
    unweighted = {
        k: p.values(torch.ones(groups)) for k, p in {p.k: p for p in problems}.items()
    }  # (Q',) each
    if not any(u.any() for u in unweighted.values()):
        raise zero_contributions_error()
    generator = torch.Generator().manual_seed(seed)
    start = INIT * torch.randn(groups, generator=generator, dtype=torch.float64)
    raw = start.repeat(len(problems), 1).to(there)  # (B, M)
    moments = torch.zeros(2, *raw.shape, dtype=torch.float64, device=there)
    steps, step, curves = epochs * len(first.queries), 0, []
    with console.progress("learning weights", steps, unit="steps") as advance:
        for _ in range(epochs):
            total = torch.zeros(len(problems), device=data.device)
            order = first.queries[torch.randperm(len(first.queries), generator=generator)]
            for query, blocks in data.each(order):
                w = raw.softmax(1)
                values, slope = _ascent(first, ks, query, blocks, w)
                gradient = cost * w / w.norm(dim=1, keepdim=True) - slope
                gradient = w * (gradient - (w * gradient).sum(1, keepdim=True))
                rate = lr / 2 * (1 + torch.cos(torch.tensor(step / steps * torch.pi, dtype=torch.float64)))
                step += 1
                raw *= 1 - rate * decay
                raw -= rate * _adam(moments, gradient, step)
                total += values
                advance(1)
            curves.append(total / len(first.queries))
    curve = torch.stack(curves).T.tolist()
    return [
        Fit(groups * w, unweighted[p.k].mean().item(), c)
        for w, p, c in zip(raw.softmax(1).cpu(), problems, curve, strict=True)
    ]


def _adam(moments: Tensor, gradient: Tensor, step: int) -> Tensor:
    """The direction of Adam; updates the (2, B, M) moments."""
    for moment, beta, value in zip(moments, _BETAS, (gradient, gradient**2)):
        moment.lerp_(value, 1 - beta)
    mean, square = (m / (1 - beta**step) for m, beta in zip(moments, _BETAS))
    return mean / (square.sqrt() + _EPS)


def _ascent(
    problem: WeightProblem, ks: Tensor, query: int, blocks: Blocks, w: Tensor
) -> tuple[Tensor, Tensor]:
    """The objective of one query under each of the weights (B, M), and its gradient in them: (B,), (B, M).

    The objective sees the weights only through the N scores. So one reading of the blocks gives the scores and the
    slope of the objective in them, a second one carries that slope to the weights, and the whole (N, M) matrix of a
    query need not be in memory.
    """
    data, positive = problem.data, None if problem.positives is None else int(problem.positives[query])
    groups, source, row = w.shape[1], data.source, slice(query, query + 1)
    weights = put(groups * w, data.device, torch.float32)  # of mean one

    def final(train: slice, c: Tensor, weights: Tensor) -> Tensor:
        linear = weights.to(c) @ c.T  # (B, n)
        if source.method.linear:
            return linear
        return torch.cat([source.finish(s[None], v.to(c), row, train) for s, v in zip(linear, weights)])

    with torch.no_grad():
        scores = torch.cat([final(train, c, weights) for train, c in blocks], dim=1)  # (B, N)
    values, pull, unit = ratio_slopes(scores, ks, problem.objective, positive)
    slope = torch.zeros(w.shape, device=data.device)
    for train, c in blocks:
        if source.method.linear:
            slope += pull[:, train] @ c
        else:
            v = weights.clone().requires_grad_()
            slope += torch.autograd.grad((final(train, c, v) * pull[:, train]).sum(), v)[0]
    slope, unit = (put(x, data.device, torch.float64) for x in (slope, unit))
    return values, groups * slope / unit


def ratio_slopes(
    scores: Tensor, ks: Tensor, name: str, positive: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective of scores (B, N), its slope in them times the unit (B, 1), and that unit."""
    chosen = selection(scores, ks, name, positive)  # (B, N)
    unit = scores.abs().amax(1, keepdim=True)  # squares of scores in it neither overflow nor vanish
    unit = torch.where(unit > 0, unit, 1.0)
    scaled = scores / unit
    mean = (chosen * scaled).sum(1, keepdim=True)
    if name == "no-norm":
        return (mean * unit)[:, 0], chosen, torch.ones_like(unit)
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    inverse = torch.where(norm > 0, 1 / norm, 0.0)
    value = mean * inverse
    return value[:, 0], (chosen - value * inverse * scaled) * inverse, unit
