"""The solver on a sample against the exact one and against what is true of its parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from weights_fakes import FakeScores, random_scores

from unde.errors import UndeError
from unde.gradients.meter import Meter
from unde.weights import contributions, sampled
from unde.weights.contributions import Contributions
from unde.weights.fixed_point import fixed_point
from unde.weights.looks import Ask, Draw, looks
from unde.weights.nnls import nonnegative_minimum, units
from unde.weights.objective import objective
from unde.weights.problem import Problem

LOSSES = ["top-k", "supervised", "bottom-k", "top-k-bottom-k"]
QUERIES, EXAMPLES, GROUPS = 24, 700, 12
POSITIVES = torch.arange(QUERIES) * 7 % EXAMPLES
UNIFORM = np.ones(GROUPS)


@pytest.fixture(scope="module")
def values():
    return random_scores(QUERIES, EXAMPLES, GROUPS)


@pytest.fixture
def always(monkeypatch):
    """As if every problem were large."""
    monkeypatch.setattr(sampled, "_WORTH", 0)
    monkeypatch.setattr(sampled, "_GROUPS", 1)
    monkeypatch.setattr(sampled, "_ROWS", 40)


def problem_of(values, loss="top-k", k=5, **options) -> Problem:
    positives = POSITIVES if loss == "supervised" else None
    return Problem(
        Contributions(FakeScores(values, **options)), torch.arange(len(values)), k, loss, positives
    )


def reached(values, w, loss="top-k", k=5, weight_decay=0.0) -> float:
    """J from the scores, in float64."""
    w = torch.as_tensor(w).double()

    def each(weights):
        return objective(values.double() @ weights, k, loss, POSITIVES)

    variation = w.var(correction=0) / w.mean() ** 2
    return float(each(w).mean() / each(torch.ones_like(w)).abs().mean() - weight_decay / 2 * variation)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"memory": 300_000, "rows": 111}])
def test_a_look_gives_the_value_and_slope_that_autograd_gives(values, loss, options):
    problem = problem_of(values, loss, **options)
    w = np.linspace(0.2, 2.0, GROUPS)
    random = torch.randint(EXAMPLES, (QUERIES, 9), generator=torch.Generator().manual_seed(1))
    plain, now = looks([Ask(problem, UNIFORM), Ask(problem, w, Draw(1, 16, 8, random))])
    x = torch.from_numpy(w).requires_grad_()
    each = objective(values.double() @ x, 5, loss, POSITIVES)
    (slope,) = torch.autograd.grad(each.mean(), x)
    np.testing.assert_allclose(now.rho, each.detach().numpy(), rtol=1e-5)
    unweighted = objective(values.double().sum(2), 5, loss, POSITIVES)
    np.testing.assert_allclose(plain.rho, unweighted.numpy(), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(now.slope, slope.numpy(), rtol=1e-4, atol=1e-7)


def test_rows_are_those_at_the_ends_and_the_random_ones(values):
    w = np.linspace(0.2, 2.0, GROUPS)
    random = torch.randint(EXAMPLES, (QUERIES, 9), generator=torch.Generator().manual_seed(1))
    rows = looks([Ask(problem_of(values, k=20), w, Draw(3, 14, 8, random))])[0].rows
    scores = values @ torch.from_numpy(w).float()
    order = scores.argsort(1, descending=True)
    picks = torch.cat([order[:, 1:42:3], order.flip(1)[:, :8], random], dim=1)
    wanted = values.take_along_dim(picks[..., None], 1) / scores.norm(dim=1)[:, None, None]
    torch.testing.assert_close(rows.values, wanted)
    rank = order.argsort(1).gather(1, random)
    assert torch.equal(rows.between, (rank >= 42) & (rank < EXAMPLES - 8))
    assert rows.rest == EXAMPLES - 50


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"memory": 300_000, "rows": 111}])
def test_a_draw_knows_how_many_rows_it_is(values, loss, options):
    problem, draw = problem_of(values, loss, **options), Draw(1, 16, 8, torch.zeros(QUERIES, 9).long())
    rows = looks([Ask(problem, UNIFORM, draw)])[0].rows
    assert rows.values.shape == (QUERIES, draw.rows(loss), GROUPS)


def test_what_is_asked_twice_is_looked_at_once(values):
    problem, draw = problem_of(values), Draw(1, 16, 8, torch.zeros(QUERIES, 9).long())
    same, other = replace(problem), replace(problem, k=6)
    asked = [(problem, draw), (same, draw), (problem, None), (other, draw)]
    first, again, plain, more = looks([Ask(p, UNIFORM.copy(), d) for p, d in asked])
    assert first is again
    assert plain.rows is None and first.rows is not None
    assert (more.rho < first.rho).all()


def test_spans_of_kept_contributions_hold_wanted_queries_only(values):
    wanted = torch.arange(1, QUERIES, 8)
    kept, streamed = (
        problem_of(values, memory=m, rows=111).data for m in (4 * values.nbytes, values.nbytes // 2)
    )
    for data, count in ((kept, 1), (streamed, 3)):
        assert data.kept == (data is kept)
        spans = list(data.spans("", wanted, data.memory // 16))  # four queries, or four neighbours
        assert torch.equal(torch.cat([span.which for span in spans]), wanted)
        assert len(spans) == count


@pytest.mark.parametrize(
    "near", [1, 10_000, 100_000, 2**23]
)  # bytes: a few rows, many, a query, many queries
@pytest.mark.parametrize("wanted", [range(QUERIES), [1, 2, 3, 9, 17, 18]])
@pytest.mark.parametrize("count", [1, 3])
def test_kept_contributions_give_plain_sums(values, near, wanted, count, monkeypatch):
    monkeypatch.setattr(contributions, "_NEAREST", near)
    data, which = problem_of(values).data, torch.tensor(list(wanted))
    weights = torch.rand(count, GROUPS, generator=torch.Generator().manual_seed(1))
    (span,) = data.spans("", which, 0)
    scores, sums = data.turned(span, list(weights), 1)
    plain = torch.einsum("qnm,cm->cqn", values[which].double(), weights.double())
    for found in (scores, data.scores(span, list(weights))):
        torch.testing.assert_close(torch.stack(found).double(), plain, rtol=1e-5, atol=1e-5)
    (back,) = sums
    turned = torch.einsum("qn,qnm->qm", plain[0], values[which].double())
    torch.testing.assert_close(back.double(), turned, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
def test_reaches_what_the_exact_solver_reaches(values, always, loss, weight_decay):
    exact = fixed_point_exactly(problem_of(values, loss), weight_decay)
    found = climb(problem_of(values, loss), weight_decay)
    assert found.converged
    best, got = (reached(values, w, loss, 5, weight_decay) for w in (exact.weights, found.weights))
    assert best > reached(values, UNIFORM, loss) + 0.005
    assert got > best - 1e-3
    assert found.weights.mean() == pytest.approx(1)
    assert found.curve[-1] == pytest.approx(
        float(objective(values @ torch.from_numpy(found.weights).float(), 5, loss, POSITIVES).mean()),
        rel=1e-5,
    )


def fixed_point_exactly(problem, weight_decay):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "pays", lambda *_: False)
        return fixed_point(problem, weight_decay)


def climb(problem, weight_decay):
    return sampled.climb([problem], [weight_decay])[0]


@pytest.mark.parametrize("k", [30, 60])
def test_many_selected_are_told_by_some_of_them(values, always, k):
    assert sampled._draw(problem_of(values, k=k), 40).stride > 1
    exact = fixed_point_exactly(problem_of(values, k=k), 0.1)
    found = climb(problem_of(values, k=k), 0.1)
    assert reached(values, found.weights, k=k, weight_decay=0.1) > (
        reached(values, exact.weights, k=k, weight_decay=0.1) - 1e-3
    )


def test_h_softens_where_rows_are_selected_anew(always, monkeypatch):
    """Of many selected ones that are noise for the most part, the model's top is far from where H puts it."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40, 700, 30, generator=generator) * torch.linspace(0.2, 2.0, 30)
    influence = torch.randn(40, 700, 1, generator=generator).relu() ** 3
    problem = problem_of(noise + 0.5 * influence * torch.rand(30, generator=generator), k=100)
    draw = sampled._draw(problem, 40)
    (now,) = looks([Ask(problem, np.ones(30), draw)])
    goal = sampled.Goal(float(np.abs(now.rho).mean()), 0.0)
    _, softened = sampled.Model(problem, goal, draw, now).top()
    monkeypatch.setattr(sampled, "_BEND", 1.0)
    _, stiff = sampled.Model(problem, goal, draw, now).top()
    assert softened > 1.1 * stiff


def test_streamed_weights_are_those_in_memory(values, always):
    whole = climb(problem_of(values), 0.1)
    tight = problem_of(values, memory=1_500_000, rows=111)
    assert not tight.data.picks_queries
    np.testing.assert_allclose(climb(tight, 0.1).weights, whole.weights, rtol=1e-3, atol=1e-4)


def test_fixed_point_takes_it_where_it_pays_and_goes_on_where_it_got_stuck(values, always, monkeypatch):
    exact = fixed_point_exactly(problem_of(values), 0.1)
    assert fixed_point(problem_of(values), 0.1).curve == climb(problem_of(values), 0.1).curve
    stuck = sampled.Climb(np.linspace(0.1, 1.9, GROUPS), np.ones(QUERIES), [0.5], False)
    monkeypatch.setattr(sampled, "climb", lambda *_: [stuck])
    after = fixed_point(problem_of(values), 0.1)
    assert reached(values, after.weights, weight_decay=0.1) == pytest.approx(
        reached(values, exact.weights, weight_decay=0.1), abs=2e-3
    )
    assert after.unweighted == pytest.approx(exact.unweighted)


def test_candidates_side_by_side_find_what_each_finds_alone(values, always):
    first = problem_of(values)
    problems, decays = [replace(first, k=k) for k in (3, 3, 30)], [0.0, 0.3, 0.1]
    together = sampled.climb(problems, decays)
    for problem, decay, found in zip(problems, decays, together):
        alone = climb(problem, decay)
        np.testing.assert_allclose(found.weights, alone.weights, rtol=1e-3, atol=1e-4)
        assert found.converged and alone.converged
    tight = problem_of(values, memory=1_500_000, rows=111)
    first, second = sampled.climb(
        [tight, tight], [0.1, 0.1]
    )  # one after the other: rows of both have no room
    np.testing.assert_array_equal(first.weights, second.weights)


def test_rows_of_candidates_are_there_one_after_the_other():
    """Looked at together, eight take little more than one: kept contributions are read when a model is made."""
    first, peaks = problem_of(random_scores(QUERIES, 400, 64)), []
    for count in (1, 8):
        with Meter() as meter:
            sampled.climb([replace(first, k=3 + i) for i in range(count)], [0.1] * count)
        peaks.append(meter.peak)
    rows = 4 * QUERIES * sampled._draw(first, sampled._ROWS).rows("top-k") * 64
    assert peaks[1] - peaks[0] < 2 * rows


def test_a_short_last_step_is_told_by_one_query_in_eight(always, monkeypatch):
    many, k = random_scores(400, 500, GROUPS), 3
    counts = []
    looks = sampled.looks

    def counted(asked):
        counts.append(len(asked[0].problem.queries))
        return looks(asked)

    monkeypatch.setattr(sampled, "looks", counted)
    found = climb(problem_of(many, k=k), 0.0)
    exact = fixed_point_exactly(problem_of(many, k=k), 0.0)
    monkeypatch.undo()
    assert found.converged and counts[-1] == 50 and 400 in counts
    scores = many @ torch.from_numpy(found.weights).float()
    assert found.curve[-1] == pytest.approx(float(objective(scores, k, "top-k").mean()), rel=2e-4)
    last, best = (
        float(objective(many.double() @ torch.as_tensor(w), k, "top-k").mean())
        for w in (found.weights, exact.weights)
    )
    assert last > 0.999 * best


def test_small_problems_are_solved_exactly(values):
    assert not sampled.pays(problem_of(values), kept=True)


def test_unit_of_the_scores_does_not_matter(values, always):
    plain, tiny = (climb(problem_of(unit * values), 0.1).weights for unit in (1.0, 1e-30))
    np.testing.assert_allclose(tiny, plain, rtol=1e-3, atol=1e-4)


def test_dead_groups_and_queries_change_nothing(values, always):
    plain = climb(problem_of(values), 0.1)
    noise = 1e-16 * torch.randn(QUERIES, EXAMPLES, 1, generator=torch.Generator().manual_seed(0))
    more = torch.cat([values, torch.zeros(QUERIES, EXAMPLES, 1), noise], dim=2)
    more = torch.cat([more, torch.zeros(2, EXAMPLES, GROUPS + 2)])
    found = climb(problem_of(more), 0.0)
    assert np.isfinite(found.weights).all()
    assert found.weights[GROUPS + 1] < 10  # of rounding alone
    assert reached(values, found.weights[:GROUPS]) > reached(values, plain.weights) - 1e-3


def test_all_zero_contributions_are_refused(always):
    with pytest.raises(UndeError, match="all contributions are zero"):
        climb(problem_of(torch.zeros(20, 700, 3)), 0.1)


def test_a_model_that_is_wrong_is_taken_back(values, always, monkeypatch):
    """Whatever the model says, no look is kept that is lower than the one before."""
    alone = GROUPS * np.eye(GROUPS)
    worst = min(alone, key=lambda w: reached(values, w))
    monkeypatch.setattr(sampled.Model, "top", lambda self: (worst, 1.0))
    found = climb(problem_of(values), 0.0)
    assert not found.converged
    assert found.curve == sorted(found.curve)
    assert reached(values, found.weights) >= 1 > reached(values, worst)


def test_quadratic_minimum_is_that_of_scipy():
    from scipy.optimize import nnls

    random = np.random.default_rng(0)
    for _ in range(20):
        a, right = random.standard_normal((30, 9)), random.standard_normal(30)
        h, b = a.T @ a, a.T @ right
        found = nonnegative_minimum(h, b, np.maximum(random.standard_normal(9), 0), units(h), 1e-12)
        np.testing.assert_allclose(found, nnls(a, right)[0], atol=1e-8)
