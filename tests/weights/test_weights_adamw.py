import pytest
import torch
from weights_fakes import CosineScores, FakeScores, random_scores

from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.objective import LOSSES, WeightProblem, objective

POSITIVES = torch.arange(12) * 3


def problem_of(source, loss="top-k", k=5) -> WeightProblem:
    positives = POSITIVES if loss == "supervised" else None
    return WeightProblem(Contributions(source), torch.arange(source.shape[0]), k, loss, positives)


def algorithm_1(source, loss, k, weight_decay, epochs, lr, seed) -> torch.Tensor:
    """The paper's listing, with autograd through everything."""
    queries, examples = source.shape
    groups = len(source.groups)
    start = torch.randn(groups, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    raw = (0.01 * start).requires_grad_()
    optimizer = torch.optim.AdamW([raw], lr=lr, weight_decay=weight_decay, eps=1e-30)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * queries)
    for _ in range(epochs):
        for i in range(queries):
            w = groups * raw.softmax(0).float()
            scores = source.finish((source.values[i] @ w)[None], w, slice(i, i + 1), slice(0, examples))
            optimizer.zero_grad()
            (-objective(scores, k, loss, POSITIVES[i : i + 1])).sum().backward()
            optimizer.step()
            schedule.step()
    return groups * raw.detach().softmax(0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", [FakeScores, CosineScores])
def test_weights_are_those_of_algorithm_1(loss, kind):
    source = kind(random_scores())
    expected = algorithm_1(source, loss, k=5, weight_decay=0.3, epochs=4, lr=0.05, seed=3)
    got = adamw(problem_of(source, loss), weight_decay=0.3, epochs=4, lr=0.05, seed=3)
    assert (expected - 1).abs().max() > 0.1
    torch.testing.assert_close(got.weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [FakeScores, CosineScores])
@pytest.mark.parametrize(("memory", "rows"), [(4 * 60 * 5 * 3, 60), (4 * 60 * 5 - 1, 17), (1, 7)])
def test_streamed_weights_are_those_in_memory(kind, memory, rows):
    values = random_scores()
    whole = adamw(problem_of(kind(values)), weight_decay=0.1, epochs=3, lr=0.05, seed=0)
    source = kind(values, memory=memory, rows=rows)
    streamed = adamw(problem_of(source), weight_decay=0.1, epochs=3, lr=0.05, seed=0)
    torch.testing.assert_close(streamed.weights, whole.weights, rtol=1e-4, atol=1e-5)
    assert source.largest <= max(memory, 4 * 5 * rows * 12)


def test_curve_starts_unweighted_and_rises():
    problem = problem_of(FakeScores(random_scores(seed=1)))
    fit = adamw(problem, weight_decay=0.0, epochs=6, lr=0.05, seed=0)
    assert fit.unweighted == pytest.approx(problem.values(torch.ones(5)).mean().item(), rel=1e-6)
    assert len(fit.curve) == 6
    assert fit.unweighted < fit.curve[0] < fit.curve[-1]
    at_the_end = problem.values(fit.weights.float()).mean().item()
    assert fit.curve[-1] == pytest.approx(at_the_end, rel=0.02)


def test_decay_pulls_to_uniform():
    problem = problem_of(FakeScores(random_scores()))
    spreads = [adamw(problem, decay, epochs=10, lr=0.05, seed=0).weights.std() for decay in (0.0, 1.0, 20.0)]
    assert spreads[0] > 1.5 * spreads[1] > 3 * spreads[2]
    assert spreads[2] < 0.05


@pytest.mark.parametrize("loss", ["top-k", "no-norm"])
def test_unit_of_the_scores_does_not_matter(loss):
    values = random_scores()
    fits = [
        adamw(problem_of(FakeScores(unit * values), loss), 0.1, epochs=3, lr=0.05, seed=0).weights
        for unit in (1.0, 1e-12)
    ]
    torch.testing.assert_close(fits[0], fits[1], rtol=1e-4, atol=1e-5)


def test_only_the_wanted_queries_are_learned_from():
    values = random_scores()
    wanted = torch.tensor([1, 2, 7, 11])
    some = WeightProblem(Contributions(FakeScores(values, memory=4 * 60 * 5 * 4, rows=9)), wanted, 5, "top-k")
    alone = problem_of(FakeScores(values[wanted]))
    for problem in (some, alone):
        assert len(problem.values(torch.ones(5))) == 4
    torch.testing.assert_close(
        adamw(some, 0.1, 3, 0.05, 0).weights, adamw(alone, 0.1, 3, 0.05, 0).weights, rtol=1e-4, atol=1e-5
    )
