"""Choose a setting and weights by retrained models, and estimate the LDS to expect of them, cross-fitted.

A setting is a method with its damping and whatever else an index can give. For each of them `predictions` holds what
its scores predict for S retrained models and Q queries, resolved into M groups. `select` takes the setting that
correlates best with the models and fits weights to the same models; weights stay uniform unless they gain on models
and queries that they were not fitted to. `crossfit` repeats the whole selection without each fold of models and
queries and predicts that fold, so what it estimates was not chosen on.

Selection goes by Pearson's correlation, averaged over queries: over eight models it is less noisy than that of ranks.
Along a grid of dampings it is averaged over neighbours too, since it changes little from one to the next. What is
reported is Spearman's, as LDS is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unde.evaluate.estimate import Estimate, SubsetBootstrap, quantile
from unde.weights.fixed_point import fit_to_retrained

MODEL_FOLDS, QUERY_FOLDS = 4, 2
DECAYS = (0.1, 0.3, 1.0)  # pulls towards uniform weights to choose from
LEVEL = 0.95  # confidence that weights gain before they are used
FEWEST_FOR_WEIGHTS = 12  # models

Predictions = Mapping[str, np.ndarray]  # setting → (S, Q, M)


@dataclass(frozen=True, eq=False)
class ChosenSetting:
    """A setting with its weights; None for uniform ones."""

    setting: str
    weights: np.ndarray | None = None
    weight_decay: float | None = None

    def predict(self, predictions: Predictions) -> np.ndarray:
        """(S, Q) predictions, of unit spread over the models for each query."""
        resolved = predictions[self.setting].astype(np.float64)
        total = resolved.sum(2) if self.weights is None else resolved @ self.weights
        return standardize(total)


def standardize(predicted: np.ndarray) -> np.ndarray:
    """Predictions (S, Q) of mean 0 and unit spread over the models for each query."""
    centred = predicted - predicted.mean(0)
    spread = centred.std(0)
    return centred / np.where(spread > 0, spread, 1.0)


def measure(predicted: np.ndarray, utility: np.ndarray) -> Estimate:
    """The LDS over many models of predictions (S, Q), estimated from few; its interval covers models and queries."""
    models = len(utility)
    rho, left_out = spearman(predicted, utility), jackknife(predicted, utility, spearman)
    factor = large_sample_factor(float(np.nanmean(rho)), models)
    # Replicates of the jackknife, spread so that their standard deviation is its standard error.
    replicates = left_out.mean() + (left_out - left_out.mean()) * (models - 1) / np.sqrt(models)
    return Estimate(factor * rho, SubsetBootstrap(factor * replicates, models, "jackknife"))


def select(
    predictions: Predictions,
    utility: np.ndarray,
    curves: Sequence[Sequence[str]] | None = None,
    seed: int = 0,
) -> ChosenSetting:
    """Choose a setting, and weights for it if they gain on what they were not fitted to.

    `curves` are settings that differ in their damping alone, in ascending order; `seed` is that of the folds.
    """
    setting = select_setting(predictions, utility, curves)
    resolved = predictions[setting].astype(np.float64)
    few = resolved.shape[2] == 1 or len(utility) < FEWEST_FOR_WEIGHTS
    decay = None if few else choose_decay(resolved, utility, seed)
    if decay is None:
        return ChosenSetting(setting)
    return ChosenSetting(setting, fit_to_retrained(resolved, ranks(utility), decay), decay)


def select_setting(
    predictions: Predictions, utility: np.ndarray, curves: Sequence[Sequence[str]] | None = None
) -> str:
    """The setting whose unweighted predictions correlate best with what the models did."""
    means = {name: float(pearson(p.sum(2), utility).mean()) for name, p in predictions.items()}
    means = smooth(means, curves or [[name] for name in predictions])
    return max(means, key=means.__getitem__)


def smooth(means: Mapping[str, float], curves: Sequence[Sequence[str]]) -> dict[str, float]:
    """Averages over neighbours on each curve."""
    out = {}
    for curve in curves:
        for i, name in enumerate(curve):
            near = curve[max(0, i - 1) : i + 2]
            out[name] = sum(means[n] for n in near) / len(near)
    return out


def choose_decay(resolved: np.ndarray, utility: np.ndarray, seed: int = 0) -> float | None:
    """The weight decay that gains most on models and queries left out; None if none surely gains."""
    ranked, plain = ranks(utility), ChosenSetting("").predict({"": resolved})
    gains = {}
    for decay in DECAYS:
        weighted = np.empty_like(plain)
        for models, queries in crossfit_folds(*utility.shape, seed):
            fit, rest = np.ix_(~models, ~queries), np.ix_(models, queries)
            fitted = fit_to_retrained(resolved[fit], ranked[fit], decay)
            weighted[rest] = ChosenSetting("", fitted).predict({"": resolved})[rest]
        gain = float((pearson(weighted, utility) - pearson(plain, utility)).mean())
        left_out = jackknife(weighted, utility) - jackknife(plain, utility)
        gains[decay] = (gain, standard_error(left_out))
    decay, (gain, error) = max(gains.items(), key=lambda item: item[1][0])
    return decay if gain > quantile(LEVEL, len(utility) - 1) * error else None


def crossfit(
    predictions: Predictions,
    utility: np.ndarray,
    curves: Sequence[Sequence[str]] | None = None,
    seed: int = 0,
    weighted: bool = True,
) -> np.ndarray:
    """(S, Q) predictions of every model and query by a selection that saw neither; without weights if so asked."""
    out = np.empty(utility.shape)
    for models, queries in crossfit_folds(*utility.shape, seed):
        fit = np.ix_(~models, ~queries)
        seen = {n: p[fit] for n, p in predictions.items()}
        if weighted:
            chosen = select(seen, utility[fit], curves, seed + 1)
        else:
            chosen = ChosenSetting(select_setting(seen, utility[fit], curves))
        out[np.ix_(models, queries)] = chosen.predict(predictions)[np.ix_(models, queries)]
    return out


def reliability(utility: np.ndarray, again: np.ndarray, which: np.ndarray) -> float:
    """How far the ranks of models (S, Q) agree with those of subsets `which` trained anew (R, Q): from 0 to 1.

    The rank of a model is taken among those of the other subsets. Two ranks that have nothing to do with each other
    differ by 2 Var in square, with Var = (S² − 1) / 12 the variance of a rank.
    """
    models, squares = len(utility), []
    for subset, second in zip(which, again):
        others = np.delete(utility, subset, axis=0)
        first, other = (
            (others < value).sum(0) + (others == value).sum(0) / 2 for value in (utility[subset], second)
        )
        squares.append(np.square(first - other).mean())
    return float(np.clip(1 - np.mean(squares) / (2 * (models**2 - 1) / 12), 0, 1))


def pearson(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Pearson's correlation over the first axis of (S, Q) and (S, Q); 0 where one of them is constant."""
    x, y = (v - v.mean(0) for v in (predicted.astype(np.float64), actual))
    scale = np.sqrt((x * x).sum(0) * (y * y).sum(0))
    return (x * y).sum(0) / np.where(scale > 0, scale, np.inf)


def jackknife(
    predicted: np.ndarray,
    actual: np.ndarray,
    correlation: Callable[[np.ndarray, np.ndarray], np.ndarray] = pearson,
) -> np.ndarray:
    """(S,) means over queries with each model left out in turn."""
    others = ~np.eye(len(actual), dtype=bool)
    return np.array([np.nanmean(correlation(predicted[s], actual[s])) for s in others])


def crossfit_folds(models: int, queries: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(S,) and (Q,) bool masks: every pair of a fold of models and a fold of queries."""
    rng = np.random.default_rng(seed)
    of_model = rng.permutation(np.arange(models) % max(1, min(MODEL_FOLDS, models)))
    of_query = rng.permutation(np.arange(queries) % min(QUERY_FOLDS, queries))
    return [
        (of_model == a, of_query == b)
        for a in range(of_model.max(initial=0) + 1)
        for b in range(of_query.max() + 1)
    ]


# --- rank correlation over few models ---------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks over the first axis of (S, Q); equal values share the mean of theirs."""
    from scipy.stats import rankdata  # slow to import

    return rankdata(values, axis=0)


def spearman(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Spearman's ρ over the first axis of (S, Q) and (S, Q); nan where the actual values are all equal."""
    return np.where(np.ptp(actual, axis=0) > 0, pearson(ranks(predicted), ranks(actual)), np.nan)


def large_sample_factor(mean: float, models: int) -> float:
    """What a mean ρ over few models is multiplied with to estimate the one over many.

    For normal variables with correlation r, Spearman's ρ over n pairs has the mean
    6/(π(n + 1)) · (asin r + (n − 2) asin(r/2)), which tends to 6/π · asin(r/2) (Moran, 1948).

    >>> round(large_sample_factor(0.0, 8), 3), round(large_sample_factor(0.5, 16), 3)
    (1.125, 1.057)
    """
    from scipy.optimize import brentq  # slow to import

    if abs(mean) < 1e-6:
        return (models + 1) / models
    least = min(abs(mean), 1 - 1e-9)
    r = brentq(lambda r: _mean_of_sample(r, models) - least, 0.0, 1.0)
    return 6 / math.pi * math.asin(r / 2) / _mean_of_sample(r, models)


def _mean_of_sample(r: float, n: int) -> float:
    return 6 / (math.pi * (n + 1)) * (math.asin(r) + (n - 2) * math.asin(r / 2))


def standard_error(left_out: np.ndarray) -> float:
    """The jackknife's standard error from the values with each model left out."""
    return math.sqrt((len(left_out) - 1) * float(np.var(left_out)))
