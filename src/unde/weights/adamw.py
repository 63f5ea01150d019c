"""Algorithm 1 of the paper: weights by stochastic gradient steps, one for each query."""

from __future__ import annotations

import torch
from torch import Tensor

from unde import console
from unde.weights.contributions import Blocks
from unde.weights.objective import Fit, WeightProblem, objective, zero_contributions_error

_INIT = 0.01  # standard deviation of the raw weights at the start: near uniform, and no two alike


def adamw(problem: WeightProblem, weight_decay: float, epochs: int, lr: float, seed: int) -> Fit:
    """Raw weights v with w = M·softmax(v), moved by AdamW with cosine annealing.

    Queries are visited in their order, as the algorithm is written, which also lets them be read in blocks;
    the learning rate falls from `lr` to 0 over all steps. Decay pulls v to 0, where w is uniform. Adam's
    steps do not depend on the size of the gradient, so v_j settles within ±1/weight_decay: the decay bounds
    the logarithm of the weights, whatever the problem.
    """
    data = problem.data
    unweighted = problem.values(torch.ones(data.groups))  # (Q',)
    if not unweighted.any():
        raise zero_contributions_error()
    generator = torch.Generator().manual_seed(seed)
    raw = (_INIT * torch.randn(data.groups, generator=generator, dtype=torch.float64)).requires_grad_()
    # eps far below any gradient, else the unit of the scores would matter without normalisation.
    optimizer = torch.optim.AdamW([raw], lr=lr, weight_decay=weight_decay, eps=1e-30)
    steps = epochs * len(problem.queries)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    curve = []
    with console.progress("learning weights", steps, unit="steps") as advance:
        for _ in range(epochs):
            total = 0.0
            for place, (query, blocks) in enumerate(data.each(problem.queries)):
                weights = data.groups * raw.softmax(0)  # (M,)
                value, slope = _value_and_slope(problem, query, place, blocks, weights.detach().float())
                optimizer.zero_grad()
                weights.backward(-slope.double())
                optimizer.step()
                schedule.step()
                total += value
                advance(1)
            curve.append(total / len(problem.queries))
    return Fit(data.groups * raw.detach().softmax(0), unweighted.mean().item(), curve)


def _value_and_slope(
    problem: WeightProblem, query: int, place: int, blocks: Blocks, weights: Tensor
) -> tuple[float, Tensor]:
    """The objective of one query at `weights`, and its gradient (M,).

    The objective sees the weights only through the N scores. So one reading of the blocks gives the scores
    and the slope of the objective in them, a second one carries that slope to the weights, and the whole
    (N, M) matrix of a query need not be in memory.
    """
    rows = slice(query, query + 1)
    finish = problem.data.source.finish
    weights = weights.requires_grad_()
    with torch.no_grad():
        parts = [finish((c @ weights.to(c))[None], weights.to(c), rows, train)[0] for train, c in blocks]
    scores = torch.cat(parts).requires_grad_()  # (N,)
    positive = problem.positives_at(slice(place, place + 1))
    value = objective(scores[None], problem.k, problem.loss, positive)[0]
    (pull,) = torch.autograd.grad(value, scores)  # (N,)
    slope = torch.zeros(problem.data.groups)
    for train, c in blocks:
        if problem.data.source.method.linear:
            slope += (pull[train] @ c).cpu()
        else:
            part = finish((c @ weights.to(c))[None], weights.to(c), rows, train)[0]  # (n,)
            slope += torch.autograd.grad(part @ pull[train], weights)[0].cpu()
    return value.item(), slope
