"""Slow and obvious: what the fast paths are compared with."""

import torch

from unde.gradients import Collector, make_units, plan_coverage

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def slow_gradients(model, task, rows):
    """{parameter: (N, *shape)}: one example, one backward pass at a time."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = {n: [] for n in named}
    for i in range(len(rows)):
        value = task.loss(model, rows.batch([i]))
        grads = torch.autograd.grad(value.sum(), list(named.values()), allow_unused=True)
        for (n, p), g in zip(named.items(), grads):
            found[n].append(torch.zeros_like(p) if g is None else g.detach().to_dense())
    return {n: torch.stack(g) for n, g in found.items()}


def plan(model, task, rows, projection="none", seed=0):
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    units = make_units(model, names, projection, seed)
    return units, plan_coverage(model, task, rows, units)


def collect(model, task, rows, units, coverage, batch_size):
    """(N, D) features of all rows, in batches."""
    ranges = [range(a, min(a + batch_size, len(rows))) for a in range(0, len(rows), batch_size)]
    with Collector(model, task, units, coverage) as collector:
        return torch.cat([collector(rows.batch(r), list(r))[0] for r in ranges])


def ways(units, coverage):
    """{parameter: way}, after checking that every parameter went exactly one way."""
    found = {u.name: [] for u in units}
    for name in {u.name for use in coverage.modules for u in use.units.values() if use.layout is not None}:
        found[name].append("hook")
    for way, names in [
        ("expanded", coverage.expanded),
        ("deferred", coverage.deferred),
        ("vmap", coverage.vmapped),
        ("loop", coverage.looped),
    ]:
        for name in names:
            found[name].append(way)
    for name in coverage.unused:
        found[name] = ["unused"]
    assert all(len(w) == 1 for w in found.values()), found
    return {name: w[0] for name, w in found.items()}


def check(model, task, rows, projection="none", tolerance=1e-10, batch_size=5, *, seed=0, truth=None):
    """Features of all rows are the gradients of single examples, projected. Returns the way of each parameter, and the
    coverage."""
    truth = slow_gradients(model, task, rows) if truth is None else truth
    units, coverage = plan(model, task, rows, projection, seed)
    features = collect(model, task, rows, units, coverage, batch_size)
    assert_features(
        features, {u.name: explicit(u.projection, truth[u.name]) for u in units}, units, tolerance
    )
    return ways(units, coverage), coverage


def explicit(projection, gradient):
    """The projection of whole gradients (N, *shape), written out with its matrices, one example at a time."""
    rows = []
    for g in gradient.reshape(len(gradient), projection.R, projection.C):
        if projection.factored:
            left = torch.eye(projection.R) if projection.row_matrix is None else projection.row_matrix
            right = torch.eye(projection.C) if projection.col_matrix is None else projection.col_matrix
            rows.append((left.to(g) @ g @ right.to(g).T).flatten())
        else:
            matrix = projection.flat(torch.eye(g.numel(), dtype=g.dtype)).T  # (size, R·C)
            rows.append(matrix @ g.flatten())
    return torch.stack(rows)


def assert_features(features, truth, units, tolerance):
    """‖Δ‖ ≤ tol · max(‖g_unit‖, 1e-3 ‖g‖) for every example and unit; `truth` is {parameter: (N, size)}."""
    whole = torch.cat([truth[u.name].reshape(len(features), -1) for u in units], 1)
    floor = 1e-3 * whole.norm(dim=1)
    assert floor.max() > 0
    for u in units:
        t = truth[u.name].reshape(len(features), -1)
        error, allowed = (features[:, u.columns] - t).norm(dim=1), torch.maximum(t.norm(dim=1), floor)
        worst = int((error - tolerance * allowed).argmax())
        assert (error <= tolerance * allowed).all(), (
            f"{u.name}, example {worst}: off by {error[worst]:.3g} at a norm of {allowed[worst]:.3g}"
        )
