"""LDS of every method of a bank, unweighted and with weights by Algorithm 1 of the paper and by calibration.

Three disjoint roles: training data, queries that learn weights, queries that evaluate. As in the paper, the kernel's
damping, k and λ′ are searched for each method; columns differ in what chooses them. "search": the LDS of learning
queries on half of the retrained models, judged on evaluation queries and the other half, and the other way round.
"fixed": one k and λ′ for all cells. "best": the highest LDS on the evaluation itself, as the paper seems to do. The
damping is chosen in the same way without weights, and is the same with and without them. "calibrated" are weights that
`unde calibrate` fits to 16 of the models, "fitted" to half of them, judged on the others. The grids are the paper's,
its dampings relative to the mean diagonal of what is inverted. On whole gradients the damping is the default.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.crossfit import Fold, estimate, folds, of_predictions, predicted, resolved
from experiments.shared.paths import RUNS, computed
from experiments.shared.sweep import DECAY, EVERY_BANK, K, candidates, grid
from unde.evaluate import Estimate, calibration, paired
from unde.evaluate.calibration import spearman
from unde.evaluate.search import DAMPINGS
from unde.methods import Damped, Method
from unde.scoring import GroupScores

PAPER = "Tables 1, 2, 5 and 9"
WHOLE = "_whole"  # after the name of a bank: its methods on whole gradients
VARIANTS = (*EVERY_BANK, *(bank + WHOLE for bank in ("finetuned-gpt2", "cifar10-resnet", "cifar10-vit")))
BANKS = {variant: (variant.removesuffix(WHOLE),) for variant in VARIANTS}
CALIBRATING = 16  # models


def run(variant: str) -> dict[str, Any]:
    """Methods that were measured are kept in experiments/runs until all are: an interrupted run goes on."""
    cell, whole = cells.get(variant.removesuffix(WHOLE)), variant.endswith(WHOLE)
    methods, folder = {}, RUNS / cell.name / f"lds{whole * WHOLE}"
    for name, method in (cell.defaults if whole else cell.methods).items():
        swept = isinstance(method, Damped) and not whole
        dampings = [replace(method, damping=d) for d in DAMPINGS] if swept else [method]
        methods[name] = computed(folder / f"{name}.json", partial(measure, cell, dampings))
        shown = {rule: f"{100 * r['difference']['mean']:+.2f}" for rule, r in methods[name]["rules"].items()}
        print(f"{variant} {name}: {100 * methods[name]['unweighted']['mean']:.2f} {shown}", flush=True)
    baselines = {} if whole else _baselines(cell)
    shutil.rmtree(folder)
    return {"methods": methods, "baselines": baselines}


@dataclass(frozen=True, eq=False)
class Scored:
    """A method at one damping, and what it predicts for the models of a bank, by the role of queries."""

    method: Method
    scores: dict[str, GroupScores]
    groups: dict[str, np.ndarray]  # (S, Q, M); empty if scores are no sums over groups
    plain: dict[str, np.ndarray]  # (S, Q)

    @classmethod
    def of(cls, cell: Cell, method: Method) -> Scored:
        scores = {role: cell.scores(method, role) for role in ("learn", "eval")}
        masks, groups, plain = cell.bank.masks, {}, {}
        for role in cell.bank.utility.keys() & scores.keys():
            if method.linear:
                groups[role] = resolved(scores[role], masks)
                plain[role] = groups[role].sum(2)
            else:
                uniform = torch.ones(1, len(scores[role].groups))
                plain[role] = predicted(scores[role], masks, uniform)[0]
        return cls(method, scores, groups, plain)

    def under(self, weights: Tensor, masks: np.ndarray) -> dict[str, np.ndarray]:
        """(C, S, Q) under each of the weights (C, M)."""
        if self.groups:
            w = weights.double().numpy()
            return {role: np.einsum("sqm,cm->csq", p, w, optimize=True) for role, p in self.groups.items()}
        return {role: predicted(self.scores[role], masks, weights) for role in self.plain}


def measure(cell: Cell, methods: list[Method]) -> dict[str, Any]:
    """One method at several dampings: the columns of the page."""
    utility, halves = cell.bank.utility, folds(cell.bank)
    scored = [Scored.of(cell, method) for method in methods]
    plain = {role: np.stack([s.plain[role] for s in scored]) for role in scored[0].plain}
    at = [fold.choose(plain[fold.role], utility[fold.role]) for fold in halves]  # dampings, by place
    by_damping = _means(plain["eval"], utility["eval"])
    top, usual = int(np.argmax(by_damping)), max(at, key=at.count)
    points = grid(scored[0].scores["learn"])
    weights = {d: candidates(scored[d].scores["learn"], points) for d in {*at, top}}  # (C, M)
    under = {d: scored[d].under(w, cell.bank.masks) for d, w in weights.items()}

    def judged(places: list[int]) -> Estimate:
        return estimate([under[d]["eval"][c] for d, c in zip(at, places)], utility["eval"], halves)

    unweighted = estimate([plain["eval"][d] for d in at], utility["eval"], halves)
    chosen = [f.choose(under[d][f.role], utility[f.role]) for f, d in zip(halves, at)]
    fixed, by_point = points.index((K, DECAY)), _means(under[top]["eval"], utility["eval"])
    best, on_all = int(np.argmax(by_point)), of_predictions(plain["eval"][top], utility["eval"])
    rules = {
        "search": _compared(unweighted, judged(chosen), chosen=[points[c] for c in chosen]),
        "fixed": _compared(unweighted, judged([fixed] * len(at)), weights=weights[usual][fixed].tolist()),
        "best": _compared(
            on_all, of_predictions(under[top]["eval"][best], utility["eval"]), chosen=points[best],
            unweighted=on_all.as_dict(),
        ),
    }  # fmt: skip
    if scored[0].groups:
        parts = {"calibrated": max(2, len(cell.bank.masks) // CALIBRATING), "fitted": 2}
        rules |= {rule: _calibrated(scored, utility, folds(cell.bank, n)) for rule, n in parts.items()}
    at_k = {k: under[top]["eval"][points.index((k, DECAY))] for k in dict(points)}
    return {
        "methods": list(map(str, methods)),
        "groups": scored[0].scores["eval"].groups,
        "dampings": [getattr(methods[d], "damping", None) for d in at],
        "unweighted": unweighted.as_dict(),
        "by damping": by_damping,
        "rules": rules,
        "by k": {k: _compared(on_all, of_predictions(p, utility["eval"])) for k, p in at_k.items()},
        "grid": [[*point, mean] for point, mean in zip(points, by_point)],
    }


def _means(candidates: np.ndarray, utility: np.ndarray) -> list[float]:
    return [float(np.nanmean(spearman(p, utility))) for p in candidates]


def _compared(plain: Estimate, weighted: Estimate, **more: Any) -> dict[str, Any]:
    return {"estimate": weighted.as_dict(), "difference": paired(plain, weighted).as_dict(), **more}


def _calibrated(scored: list[Scored], utility: Any, over: list[Fold]) -> dict[str, Any]:
    """Damping and weights as a calibration takes them from the models and queries that choose in each fold."""
    plain, weighted, used = [], [], 0
    for fold in over:
        some = np.ix_(fold.models, fold.queries)
        known = {str(at): s.groups[fold.role][some] for at, s in enumerate(scored)}
        found = calibration.select(known, utility[fold.role][some], [list(known)])
        everything = {str(at): s.groups["eval"] for at, s in enumerate(scored)}
        plain.append(replace(found, weights=None).predict(everything))
        weighted.append(found.predict(everything))
        used += found.weights is not None
    one, other = (estimate(p, utility["eval"], over) for p in (plain, weighted))
    return _compared(one, other, unweighted=one.as_dict(), used=used, of=len(over))


def _baselines(cell: Cell) -> dict[str, Any]:
    """For texts: BM25 and similarity of representations."""
    if cell.domain != "text":
        return {}
    from experiments.shared.language import baselines

    return {
        name: cell.lds(scores, 500).as_dict()
        for name, scores in baselines(cell.corpus(), cell.model, cell.corpus().evaluate).items()
    }
