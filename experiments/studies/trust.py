"""How many training examples find themselves, by strength; and whether that ranks methods and dampings as LDS does.

60 training examples that no weights were learned from, perturbed at five fixed strengths. Curves are before and after
weights by self-retrieval. Then the mean share over strengths ("trust"), of each method at each damping, unweighted, is
compared with LDS: Spearman's correlation over the settings of a bank. "damping" says what choosing the damping of
each method by trust would have gained or lost against the default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from scipy.stats import spearmanr

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.sweep import BOOTSTRAP, EVERY_BANK
from unde import Weights
from unde.data import Rows
from unde.evaluate import Estimate, paired
from unde.index import QueryFeatures
from unde.index.retrieval_curve import SHOWN, strengths
from unde.index.self_retrieval import EXAMPLES, Copier, Parts
from unde.methods import Method
from unde.weights.retrieval import Copies

PAPER = ""
VARIANTS = EVERY_BANK
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    curves: dict[str, Any] = {}
    settings: dict[str, dict[str, float]] = {}
    choice: dict[str, Any] = {}
    for name, method in cell.methods.items():
        copied = _Copied(cell, method)
        weights = cell.index_for(method).learn_weights(method=method)
        curves[name] = copied.curve(method, weights)
        found: dict[float | None, tuple[float, Estimate]] = {}
        for title, (damping, chosen) in cell.damped(name, DAMPINGS).items():
            judged = cell.lds(cell.scores(chosen, "eval").total(), BOOTSTRAP)
            found[damping] = (copied.trust(chosen), judged)
            settings[title] = {"trust": found[damping][0], "lds": judged.mean}
        if len(found) > 1:
            best = max(found, key=lambda d: found[d][0])
            choice[name] = {"damping": best, "difference": paired(found[0.1][1], found[best][1]).as_dict()}
        print(variant, name, curves[name]["before"], curves[name]["after"], choice.get(name), flush=True)
    pairs = [(s["trust"], s["lds"]) for s in settings.values()]
    return {
        "curves": curves,
        "settings": settings,
        "spearman": float(spearmanr(*zip(*pairs))[0]),
        "damping": choice,
    }


class _Copied:
    """Features of copies at every strength: methods that differ in their kernel alone share them."""

    def __init__(self, cell: Cell, method: Method) -> None:
        self.index = cell.index_for(method)
        self.copier = Copier(self.index._state, method, None, seed=0)
        kinds = self.copier.kinds
        parts = Parts.draw(self.index._state, self.copier.content, EXAMPLES, len(kinds), 0)
        self.which = parts.rest[:SHOWN] if len(parts.rest) >= SHOWN else parts.report[:SHOWN]
        self.kind = kinds[0]
        self.strengths = strengths(self.kind)
        self._features: list[QueryFeatures] = []
        for strength in self.strengths:
            rows = Rows(
                [self.copier.copy(self.kind, int(i), strength) for i in self.which], self.index._state.collate
            )
            self._features.append(self.index.features(rows))

    def shares(self, method: Method, weights: Weights | None = None) -> list[float]:
        chosen = replace(method, projection=self.index.method.projection).signed
        out = []
        for features in self._features:
            scores = self.index._state.scorer.scores(chosen, features.features, features.digests)
            copies = Copies(scores, self.which, self.copier.content)
            found = copies.retrieved(None if weights is None else weights.values)
            out.append(float(found.float().mean()))
        return out

    def trust(self, method: Method) -> float:
        return float(torch.tensor(self.shares(method)).mean())

    def curve(self, method: Method, weights: Weights) -> dict[str, Any]:
        told = {"kind": self.kind.name, "strengths": self.strengths, "examples": len(self.which)}
        return {**told, "before": self.shares(method), "after": self.shares(method, weights)}
