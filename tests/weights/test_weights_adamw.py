import pytest
import torch
from weights_fakes import CosineScores, FakeScores, random_scores

from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.objective import OBJECTIVES, Fit, WeightProblem, objective

POSITIVES = torch.arange(12) * 3


def problem_of(source, name="top-k", k=5) -> WeightProblem:
    positives = POSITIVES if name == "supervised" else None
    return WeightProblem(Contributions(source), torch.arange(source.shape[0]), k, name, positives)


def solve(problem, weight_decay=0.1, epochs=3, lr=0.05, seed=0) -> Fit:
    return adamw([problem], [weight_decay], epochs=epochs, lr=lr, seed=seed)[0]


def algorithm_1(source, name, k, weight_decay, epochs, lr, seed, penalty=0.0) -> torch.Tensor:
    """The paper's listing, with autograd through everything and the optimizer and schedule of torch."""
    queries, examples = source.shape
    groups = len(source.groups)
    generator = torch.Generator().manual_seed(seed)
    raw = (0.01 * torch.randn(groups, generator=generator, dtype=torch.float64)).requires_grad_()
    optimizer = torch.optim.AdamW([raw], lr=lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * queries)
    for _ in range(epochs):
        for i in torch.randperm(queries, generator=generator).tolist():
            w = raw.softmax(0)
            x = (groups * w).float()
            scores = source.finish((source.values[i] @ x)[None], x, slice(i, i + 1), slice(0, examples))
            loss = -objective(scores, k, name, POSITIVES[i : i + 1]).sum() + penalty * w.norm()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return groups * raw.detach().softmax(0)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", [FakeScores, CosineScores])
def test_weights_are_those_of_algorithm_1(name, kind):
    source = kind(random_scores())
    options = {"epochs": 4, "lr": 0.05, "seed": 3}
    asked = [
        (5, 0.3, 0.0),
        (2, 0.0, 0.0),
        (20, 1.0, 0.0),
        (5, 0.0, 0.02),
    ]  # k, decay, penalty: all in one pass
    problems = [problem_of(source, name, k) for k, _, _ in asked]
    problems = [WeightProblem(problems[0].data, p.queries, p.k, name, p.positives) for p in problems]
    fits = adamw(problems, [d for _, d, _ in asked], penalties=[p for _, _, p in asked], **options)
    for (k, decay, penalty), fit in zip(asked, fits):
        expected = algorithm_1(source, name, k, decay, penalty=penalty, **options)
        assert (expected - 1).abs().max() > 0.05
        torch.testing.assert_close(fit.weights, expected, rtol=1e-4, atol=1e-5)


def test_penalty_of_equation_6_pulls_to_uniform():
    problem = problem_of(FakeScores(random_scores()))
    fits = adamw([problem] * 3, [0.0] * 3, penalties=[0.0, 0.3, 30.0], epochs=10, lr=0.05)
    spreads = [fit.weights.std().item() for fit in fits]
    assert spreads[0] > 1.5 * spreads[1] > 3 * spreads[2]


@pytest.mark.parametrize("kind", [FakeScores, CosineScores])
@pytest.mark.parametrize(("memory", "rows"), [(4 * 60 * 5 * 3, 60), (4 * 60 * 5 - 1, 17), (1, 7)])
def test_streamed_weights_are_those_in_memory(kind, memory, rows):
    values = random_scores()
    whole = solve(problem_of(kind(values)), 0.1, 3, 0.05)
    source = kind(values, memory=memory, rows=rows)
    streamed = solve(problem_of(source), 0.1, 3, 0.05)
    torch.testing.assert_close(streamed.weights, whole.weights, rtol=1e-4, atol=1e-5)
    assert source.largest <= max(memory, 4 * 5 * rows * 12)


def test_curve_starts_unweighted_and_rises():
    problem = problem_of(FakeScores(random_scores(seed=1)))
    fit = solve(problem, 0.0, 6, 0.05)
    assert fit.unweighted == pytest.approx(problem.values(torch.ones(5)).mean().item(), rel=1e-6)
    assert len(fit.curve) == 6
    assert fit.unweighted < fit.curve[0] < fit.curve[-1]
    at_the_end = problem.values(fit.weights.float()).mean().item()
    assert fit.curve[-1] == pytest.approx(at_the_end, rel=0.02)


def test_decay_pulls_to_uniform():
    problem = problem_of(FakeScores(random_scores()))
    spreads = [solve(problem, decay, 10).weights.std() for decay in (0.0, 1.0, 20.0)]
    assert spreads[0] > 1.5 * spreads[1] > 3 * spreads[2]
    assert spreads[2] < 0.05


@pytest.mark.parametrize("name", ["top-k", "no-norm"])
def test_unit_of_the_scores_does_not_matter(name):
    values = random_scores()
    fits = [solve(problem_of(FakeScores(unit * values), name)).weights for unit in (1.0, 1e-12)]
    torch.testing.assert_close(fits[0], fits[1], rtol=1e-4, atol=1e-5)


def test_only_the_wanted_queries_are_learned_from():
    values = random_scores()
    wanted = torch.tensor([1, 2, 7, 11])
    some = WeightProblem(Contributions(FakeScores(values, memory=4 * 60 * 5 * 4, rows=9)), wanted, 5, "top-k")
    alone = problem_of(FakeScores(values[wanted]))
    for problem in (some, alone):
        assert len(problem.values(torch.ones(5))) == 4
    torch.testing.assert_close(solve(some).weights, solve(alone).weights, rtol=1e-4, atol=1e-5)
