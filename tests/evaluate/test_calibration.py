"""Choosing settings and weights by retrained models, on models whose truth is known."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import spearmanr

from unde.evaluate import calibration
from unde.evaluate.calibration import jackknife, large_sample_factor, spearman, standard_error
from unde.weights.fixed_point import fit_to_retrained

S, Q, M = 16, 60, 5


def bank(signal, noise=1.0, seed=0, models=S):
    """Utilities that a sum of groups predicts, `signal` (M,) of each, under noise."""
    rng = np.random.default_rng(seed)
    resolved = rng.normal(size=(models, Q, M))
    utility = resolved @ np.asarray(signal, dtype=float) + noise * rng.normal(size=(models, Q))
    return resolved, utility


def test_spearman_is_that_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, size=(2, 9, 7)).astype(float)  # with ties
    want = [spearmanr(x, y)[0] for x, y in zip(a.T, b.T)]
    np.testing.assert_allclose(spearman(a, b), want, atol=1e-12)


def test_constant_predictions_are_worth_nothing_and_constant_models_are_undefined():
    x = np.arange(5.0)[:, None]
    assert spearman(np.ones((5, 1)), x) == 0
    assert np.isnan(spearman(x, np.ones((5, 1))))


@pytest.mark.parametrize(("models", "r"), [(8, 0.6), (16, 0.3), (8, -0.4)])
def test_few_models_are_corrected_to_what_many_give(models, r):
    rng = np.random.default_rng(1)

    def mean(n, queries):
        x, z = rng.normal(size=(2, n, queries))
        return float(spearman(x, r * x + np.sqrt(1 - r * r) * z).mean())

    few, many = mean(models, 20_000), mean(2_000, 200)
    assert abs(few - many) > 0.01 if models == 8 else True  # there is something to correct
    assert few * large_sample_factor(few, models) == pytest.approx(many, abs=0.008)


def test_the_jackknife_has_the_spread_of_fresh_models():
    signal = [1.0, 1, 0, 0, 0]
    means, errors = [], []
    for seed in range(60):
        resolved, utility = bank(signal, noise=3.0, seed=seed)
        # what a model does on all queries alike
        common = np.random.default_rng(seed + 999).normal(size=(S, 1))
        total = resolved.sum(2) + common
        utility = utility + 2 * np.random.default_rng(seed + 555).normal(size=(S, 1))
        means.append(float(spearman(total, utility).mean()))
        errors.append(standard_error(jackknife(total, utility, spearman)))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.5)


def objective(w, resolved, utility, decay):
    """As its docstring has it, in a loop."""
    x, u = resolved - resolved.mean(0), utility - utility.mean(0)

    def mean(v):
        return np.mean([
            u[:, q] @ (x[:, q] @ v) / np.linalg.norm(u[:, q]) / np.linalg.norm(x[:, q] @ v) for q in range(u.shape[1])
        ])  # fmt: skip

    ones = np.ones(len(w))
    each = [
        abs(u[:, q] @ (x[:, q] @ ones)) / np.linalg.norm(u[:, q]) / np.linalg.norm(x[:, q] @ ones)
        for q in range(Q)
    ]
    w = w / w.mean()
    return mean(w) / np.mean(each) - decay / 2 * np.mean((w - 1) ** 2)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_fitted_weights_are_the_maximum_that_scipy_finds(decay):
    resolved, utility = bank([2.0, 1, 0.2, 0, 0])
    made = fit_to_retrained(resolved, utility, decay)
    assert made.min() >= 0 and made.mean() == pytest.approx(1)
    found = [
        minimize(lambda v: -objective(np.exp(v), resolved, utility, decay), start, method="Nelder-Mead",
                 options={"maxiter": 4000, "xatol": 1e-6, "fatol": 1e-9}).fun
        for start in np.random.default_rng(0).normal(size=(3, M)) * 0.3
    ]  # fmt: skip
    assert objective(np.maximum(made, 1e-12), resolved, utility, decay) >= -min(found) - 1e-5


def test_strong_decay_gives_uniform_weights():
    resolved, utility = bank([2.0, 1, 0.2, 0, 0])
    np.testing.assert_allclose(fit_to_retrained(resolved, utility, 1e6), np.ones(M), atol=1e-3)


def test_predictions_that_say_nothing_leave_weights_uniform():
    assert (
        fit_to_retrained(np.zeros((S, Q, M)), np.random.default_rng(0).normal(size=(S, Q)), 0.1).tolist()
        == [1.0] * M
    )


def settings(truth, noise):
    """Predictions of three settings: the truth under little, some and much noise of their own."""
    rng = np.random.default_rng(7)
    return {name: truth + n * rng.normal(size=truth.shape) for name, n in zip("abc", noise)}


def test_the_best_setting_is_chosen():
    truth, utility = bank(np.ones(M))
    predictions = settings(truth, (2.0, 0.2, 4.0))
    assert calibration.select_setting(predictions, utility) == "b"


def test_neighbours_on_a_curve_are_averaged():
    means = {"a": 0.1, "b": 0.5, "c": 0.1, "d": 0.4, "e": 0.41, "f": 0.4}
    smooth = calibration.smooth(means, [["a", "b", "c"], ["d", "e", "f"]])
    assert max(smooth, key=smooth.get) in "def"


def test_weights_are_used_where_groups_differ_and_not_where_they_do_not():
    resolved, utility = bank([3.0, 0, 0, 0, 0])
    chosen = calibration.select({"a": resolved}, utility)
    assert chosen.weights is not None and chosen.weights.argmax() == 0
    resolved, utility = bank(np.ones(M), noise=4.0)
    assert calibration.select({"a": resolved}, utility).weights is None


def test_few_models_fit_no_weights():
    resolved, utility = bank([3.0, 0, 0, 0, 0], models=8)
    assert calibration.select({"a": resolved}, utility).weights is None


def test_what_was_chosen_on_noise_is_not_praised():
    """All of a hundred settings are noise: the best looks good on its own models, the cross-fitted one does not."""
    rng = np.random.default_rng(3)
    utility = rng.normal(size=(S, Q))
    utility += 3 * rng.normal(size=(S, 1))
    predictions = {str(i): rng.normal(size=(S, Q, 1)) + 3 * rng.normal(size=(S, 1, 1)) for i in range(100)}
    best = calibration.select_setting(predictions, utility)
    on_itself = calibration.measure(predictions[best].sum(2), utility)
    held_out = calibration.measure(calibration.crossfit(predictions, utility), utility)
    assert on_itself.mean > 0.4
    assert abs(held_out.mean) < held_out.ci95_total


def test_expected_lds_covers_that_of_fresh_models(monkeypatch):
    monkeypatch.setattr(calibration, "DECAYS", calibration.DECAYS[::2])  # each is fitted in every fold
    hits = 0
    for seed in range(10):
        resolved, utility = (x[:, :20] for x in bank([2.0, 1, 0, 0, 0], noise=3.0, seed=seed, models=100))
        predictions = {
            "a": resolved,
            "b": resolved + 2 * np.random.default_rng(seed).normal(size=resolved.shape),
        }
        few = {n: p[:S] for n, p in predictions.items()}
        chosen = calibration.select(few, utility[:S])
        told = calibration.measure(calibration.crossfit(few, utility[:S]), utility[:S])
        judged = spearman(chosen.predict({n: p[S:] for n, p in predictions.items()}), utility[S:]).mean()
        hits += abs(told.mean - judged) <= told.ci95_total
    assert hits >= 9


def test_crossfit_shows_no_model_and_query_to_who_predicts_it(monkeypatch):
    resolved, utility = bank(np.ones(M))
    seen = []
    select = calibration.select

    def watched(predictions, truth, *rest):
        seen.append(truth.copy())
        return select(predictions, truth, *rest)

    monkeypatch.setattr(calibration, "select", watched)
    calibration.crossfit({"a": resolved}, utility)
    folds = calibration.crossfit_folds(S, Q, 0)
    assert len(seen) == len(folds)
    covered = np.zeros((S, Q), dtype=int)
    for (models, queries), truth in zip(folds, seen):
        np.testing.assert_array_equal(truth, utility[np.ix_(~models, ~queries)])
        covered[np.ix_(models, queries)] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("share", [0.9, 0.3])
def test_reliability_is_the_agreement_between_seeds(share):
    rng = np.random.default_rng(0)
    signal = np.sqrt(share) * rng.normal(size=(64, 300))
    one, two = (signal + np.sqrt(1 - share) * rng.normal(size=signal.shape) for _ in range(2))
    which = np.arange(2)
    assert calibration.reliability(one, two[which], which) == pytest.approx(share, abs=0.08)
