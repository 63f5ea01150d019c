from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from weights_fakes import FakeScores, random_scores

from unde.errors import UndeError
from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.fixed_point import fixed_point, nonnegative_minimum, units
from unde.weights.objective import WeightProblem, objective, select

OBJECTIVES = ["top-k", "supervised", "bottom-k", "top-k-bottom-k"]
POSITIVES = torch.arange(12) * 3


def problem_of(values, name="top-k", k=5, **options) -> WeightProblem:
    positives = POSITIVES if name == "supervised" else None
    data = Contributions(FakeScores(values, **options))
    return WeightProblem(data, torch.arange(len(values)), k, name, positives)


def regularised(values, w, name, weight_decay, k=5) -> torch.Tensor:
    """J of the module's docstring, from the scores, in float64: F/F₁ − λ′/2 · (squared variation of w)."""
    values = values.double()

    def each(weights):
        return objective(values @ weights, k, name, POSITIVES)

    variation = w.var(correction=0) / w.mean() ** 2
    return each(w).mean() / each(torch.ones_like(w)).abs().mean() - weight_decay / 2 * variation


def violation(values, w, name, weight_decay) -> float:
    """How far w is from the first-order conditions, in units in which all groups have the same size."""
    size = values.double().flatten(0, 1).norm(dim=0)
    u = (w * size).requires_grad_()
    (slope,) = torch.autograd.grad(regularised(values, u / size, name, weight_decay), u)
    u, slope = u.detach() / u.norm(), slope * u.norm()
    return ((u + slope).clamp_min(0) - u).abs().max().item()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 3.0])
def test_first_order_conditions_of_the_true_objective_hold(name, weight_decay):
    values = random_scores(groups=8)
    fit = fixed_point(problem_of(values, name), weight_decay)
    uniform = torch.ones(8, dtype=torch.float64)
    assert fit.converged
    assert violation(values, uniform, name, weight_decay) > 1e-3
    assert violation(values, fit.weights, name, weight_decay) < 1e-7
    risen = regularised(values, fit.weights, name, weight_decay)
    assert risen > regularised(values, uniform, name, weight_decay) + 0.001


def test_some_weights_are_zero_and_the_conditions_hold_there():
    fits = [(seed, fixed_point(problem_of(random_scores(groups=8, seed=seed)), 0.0)) for seed in range(4)]
    assert any((fit.weights == 0).any() for _, fit in fits)
    for seed, fit in fits:
        assert (fit.weights >= 0).all()
        assert violation(random_scores(groups=8, seed=seed), fit.weights, "top-k", 0.0) < 1e-7


@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 3.0])
def test_no_general_optimiser_finds_better(weight_decay):
    values = random_scores(groups=6)  # supervised: the selection is given, so both solve the same problem
    fit = fixed_point(problem_of(values, "supervised"), weight_decay)

    def negative(x):
        w = torch.from_numpy(x).requires_grad_()
        value = -regularised(values, w, "supervised", weight_decay)
        value.backward()
        return value.item(), w.grad.numpy()

    found = [
        minimize(negative, start, jac=True, bounds=[(0, None)] * 6, options={"maxiter": 2000, "ftol": 1e-15})
        for start in (np.ones(6), fit.weights.numpy(), np.random.default_rng(0).random(6))
    ]
    ours = regularised(values, fit.weights, "supervised", weight_decay).item()
    assert ours > max(-result.fun for result in found) - 1e-7


@pytest.mark.parametrize("rows", [7, 60, 1000])
def test_of_equal_examples_the_earlier_are_selected_however_they_stream(rows):
    values = random_scores(examples=4)[:, torch.arange(200) % 4]  # each example has 49 equal ones
    indices, means = select(problem_of(values, k=25, rows=rows), torch.ones(values.shape[2]))
    order = (-values.sum(2)).sort(dim=1, stable=True).indices[:, :25].sort(1).values
    assert torch.equal(indices, order)
    wanted = values.take_along_dim(order[..., None], dim=1).double().mean(1)
    torch.testing.assert_close(means, wanted)


def test_reaches_what_algorithm_1_converges_to():
    problem = problem_of(random_scores(queries=30, examples=200, groups=8), k=10)
    long = adamw([problem], [0.0], epochs=60, lr=0.05)[0]
    fit = fixed_point(problem, 0.0)
    reached, goal = (problem.values(f.weights.float()).mean().item() for f in (fit, long))
    assert goal > 1.02 * fit.unweighted
    assert reached > 0.999 * goal
    assert fit.curve[-1] == pytest.approx(reached, rel=1e-5)


def test_objective_never_falls():
    for seed in range(5):
        fit = fixed_point(problem_of(random_scores(seed=seed), k=20), 0.0)
        curve = [fit.unweighted, *fit.curve]
        assert len(curve) > 2
        assert all(after >= before - 1e-12 for before, after in pairwise(curve))


def test_queries_that_score_below_zero_do_no_harm():
    values = random_scores(groups=6)
    values[:9] -= 3 * values[:9].std((0, 1))  # most positives score negative, so most ρ_q are
    problem = problem_of(values, "supervised")
    assert (problem.values(torch.ones(6)) < 0).sum() > 6
    fit = fixed_point(problem, 0.1)
    assert violation(values, fit.weights, "supervised", 0.1) < 1e-7
    assert fit.curve[-1] > fit.unweighted


def test_decay_pulls_to_uniform_step_by_step():
    problem = problem_of(random_scores())
    fit = fixed_point(problem, 1e9)
    assert fit.weights.float().tolist() == [1.0] * 5
    assert fit.curve[-1] == pytest.approx(fit.unweighted, rel=1e-9)
    spreads = [fixed_point(problem, decay).weights.std().item() for decay in (0.0, 0.1, 1.0, 10.0, 100.0)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] > 0.5
    assert spreads[-1] < 0.05


def test_size_of_a_group_only_moves_its_weight():
    values = random_scores(groups=6)
    factors = torch.tensor([1e-9, 1.0, 1e4, 1.0, 1e7, 1e-3])
    plain = fixed_point(problem_of(values, "supervised"), 0.0).weights
    resized = fixed_point(problem_of(values * factors, "supervised"), 0.0).weights * factors
    torch.testing.assert_close(resized / resized.mean(), plain / plain.mean(), rtol=1e-5, atol=1e-6)


def test_dead_and_equal_groups_and_queries_without_contributions():
    values = random_scores(groups=5)
    plain = fixed_point(problem_of(values), 0.0).weights
    doubled = torch.cat([values / torch.tensor([1, 1, 1, 1, 2.0]), values[:, :, 4:] / 2], dim=2)
    with_dead = torch.cat([doubled, torch.zeros(12, 60, 1)], dim=2)
    fit = fixed_point(problem_of(with_dead), 0.0)
    assert fit.converged
    live = torch.cat([fit.weights[:4], fit.weights[4:6].mean(0, keepdim=True)])
    torch.testing.assert_close(live / live.mean(), plain / plain.mean(), rtol=1e-5, atol=1e-6)
    assert fit.weights[4] == pytest.approx(fit.weights[5].item(), rel=1e-4)
    more = torch.cat([values, torch.zeros(2, 60, 5)])
    expected = fixed_point(problem_of(values), 0.0).weights
    torch.testing.assert_close(fixed_point(problem_of(more), 0.0).weights, expected, rtol=1e-6, atol=1e-8)


def test_all_zero_contributions_are_refused():
    for solve in (lambda p: fixed_point(p, 0.1), lambda p: adamw([p], [0.1], epochs=1, lr=0.01)):
        with pytest.raises(UndeError, match="all contributions are zero"):
            solve(problem_of(torch.zeros(3, 20, 2)))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("memory", "rows"), [(12 * 16 * 64, 13), (2 * 16 * 64, 25)])
def test_streamed_weights_are_those_in_memory(name, memory, rows):
    values = random_scores(groups=8)  # the smaller budget does not hold the matrices G_q of all queries
    whole = problem_of(values, name)
    tight = problem_of(values, name, memory=memory, rows=rows)
    expected, got = fixed_point(whole, 0.1), fixed_point(tight, 0.1)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-6, atol=1e-8)
    assert tight.data.source.largest <= 4 * 12 * rows * 8 < whole.data.source.largest
    assert tight.data.source.passes >= len(got.curve) + 1 > 1
    assert whole.data.source.passes == 0


def test_only_the_wanted_queries_are_learned_from():
    values = random_scores()
    wanted = torch.tensor([0, 5, 6, 10])
    expected = fixed_point(problem_of(values[wanted]), 0.1).weights
    for options in ({}, {"memory": 8 * 5 * 7, "rows": 9}):
        data = Contributions(FakeScores(values, **options))
        got = fixed_point(WeightProblem(data, wanted, 5, "top-k"), 0.1).weights
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def test_quadratic_minimum_is_that_of_scipy():
    from scipy.optimize import nnls

    random = np.random.default_rng(0)
    for _ in range(20):
        a, right = random.standard_normal((30, 9)), random.standard_normal(30)
        h, b, w = map(torch.from_numpy, (a.T @ a, a.T @ right, np.maximum(random.standard_normal(9), 0)))
        found = nonnegative_minimum(h, b, w, units(h), 1e-12)
        np.testing.assert_allclose(found.numpy(), nnls(a, right)[0], atol=1e-8)
