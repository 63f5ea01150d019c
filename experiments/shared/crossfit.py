"""Settings chosen on some retrained models and judged on others, and what groups predict of such models.

A bank's models are split in two; each half judges what was chosen on the other. Settings are chosen on the learning
queries and judged on the evaluation queries; where a bank has no utilities of learning queries (diffusion), every other
evaluation query chooses for the rest, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unde.evaluate import Bank, Estimate, lds
from unde.evaluate.calibration import spearman
from unde.evaluate.estimate import SubsetBootstrap
from unde.scoring import GroupScores

BOOTSTRAP = 200
ROWS = 32  # queries whose contributions are in memory at once


@dataclass(frozen=True, eq=False)
class Fold:
    """Models (S,) and queries that choose, and those that judge, as bool masks."""

    role: str  # of the queries that choose: "learn" or "eval"
    models: np.ndarray
    queries: np.ndarray
    judging_models: np.ndarray
    judging_queries: np.ndarray

    def choose(self, candidates: np.ndarray, utility: np.ndarray) -> int:
        """The candidate (C, S, Q) with the highest LDS on what chooses."""
        actual = utility[np.ix_(self.models, self.queries)]
        means = [np.nanmean(spearman(p[np.ix_(self.models, self.queries)], actual)) for p in candidates]
        return int(np.argmax(means))


def folds(bank: Bank, parts: int = 2, choosing: int = 1) -> list[Fold]:
    """`choosing` of `parts` parts of the models choose at a time."""
    models, queries = bank.utility["eval"].shape
    part = np.random.default_rng(0).permutation(models) % parts
    everything, even = np.ones(queries, dtype=bool), np.arange(queries) % 2 == 0
    if "learn" in bank.utility:
        sides = [("learn", np.ones(bank.utility["learn"].shape[1], dtype=bool), everything)]
    else:
        sides = [("eval", even, ~even), ("eval", ~even, even)]
    splits = [np.isin(part, [(p + i) % parts for i in range(choosing)]) for p in range(parts)]
    return [Fold(role, m, asked, ~m, judging) for role, asked, judging in sides for m in splits]


def estimate(predictions: Sequence[np.ndarray], utility: np.ndarray, over: Sequence[Fold]) -> Estimate:
    """LDS of the predictions (S, Q) of each fold on what judges there, averaged over folds, query by query.

    Folds draw their own bootstraps. A model that judges in n of them would seem to be n: deviations are scaled by √n.
    """
    values = np.full((len(over), utility.shape[1]), np.nan)
    means, keys = np.zeros(BOOTSTRAP), []
    for row, (predicted, fold) in enumerate(zip(predictions, over, strict=True)):
        some = np.ix_(fold.judging_models, fold.judging_queries)
        found = of_predictions(predicted[some], utility[some], seed=row)
        values[row, fold.judging_queries] = found.per_query
        assert found.subset_bootstrap is not None
        means += found.subset_bootstrap.means / len(over)
        keys.append(found.subset_bootstrap.key)
    judgements = np.mean(np.sum([fold.judging_models for fold in over], axis=0))
    means = means.mean() + np.sqrt(judgements) * (means - means.mean())
    return Estimate(np.nanmean(values, axis=0), SubsetBootstrap(means, len(utility), "".join(keys)))


def of_predictions(predicted: np.ndarray, utility: np.ndarray, seed: int = 0) -> Estimate:
    """LDS of predictions (S, Q) of models, as `unde.evaluate.lds` of scores that sum to them."""
    return lds(predicted.T, np.eye(len(predicted), dtype=bool), utility, bootstrap=BOOTSTRAP, seed=seed)


def resolved(scores: GroupScores, masks: np.ndarray) -> np.ndarray:
    """(S, Q, M): what each group predicts for each model; of scores that are sums over groups."""
    members = torch.from_numpy(masks).float()
    out = torch.zeros(len(masks), len(scores), len(scores.groups))
    for rows in _blocks(len(scores)):
        for train, part in scores.stream(rows):  # (q, n, M)
            out[:, rows] += torch.einsum("sn,qnj->sqj", members[:, train], part)
    return out.double().numpy()


def predicted(scores: GroupScores, masks: np.ndarray, weights: Tensor) -> np.ndarray:
    """(C, S, Q): what scores under each of the weights (C, M) predict, sums over groups or not."""
    members = torch.from_numpy(masks).float()
    out = torch.zeros(len(weights), len(masks), len(scores))
    for rows in _blocks(len(scores)):
        for train, part in scores.stream(rows):
            linear = part @ weights.T  # (q, n, C)
            for c, w in enumerate(weights):
                out[c, :, rows] += members[:, train] @ scores.finish(linear[..., c], w, rows, train).T
    return out.double().numpy()


def _blocks(queries: int) -> list[slice]:
    return [slice(start, min(start + ROWS, queries)) for start in range(0, queries, ROWS)]
