"""What each rule of learning weights by self-retrieval would have done, on every bank.

Copies of 200 training examples at four fixed strengths are scored once; all rules are then read off them: the share
that the unweighted method should find (which strength), the weight decay, how many copies are learned from, the kind of
perturbation, and whether the guard may refuse. 60 of the examples are held out for the guard. What the package does is
in `unde.weights.retrieval`; it searches strengths more finely than four.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.sweep import EVERY_BANK
from unde.evaluate import paired
from unde.index.self_retrieval import Copier
from unde.scoring.arrays import ArrayScores
from unde.weights.retrieval import Copies, JudgedWeights, StrengthSearch, Trial

PAPER = ""
VARIANTS = EVERY_BANK
LEARN, HELD_OUT = 140, 60
STRENGTHS = 4
TARGETS, DECAYS, COUNTS, GUARDS = (0.1, 0.25, 0.5), (0.1, 1.0, 10.0), (70, 140), (True, False)


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    out: dict[str, Any] = {}
    for name in cell.methods:
        evaluate = cell.eval_scores(name)
        before = cell.lds(evaluate.total())
        known: dict[bytes, dict] = {}
        rows: dict[str, dict] = {}
        grid = _Grid(cell, name)
        for kind, target, decay, count, guard in product(grid.kinds, TARGETS, DECAYS, COUNTS, GUARDS):
            w = grid.weights(kind, target, decay, count, guard)
            key = w.numpy().tobytes()
            if key not in known:
                after = cell.lds(evaluate.total(w))
                known[key] = {
                    k: v for k, v in paired(before, after).as_dict().items() if k in ("mean", "ci95")
                }
            rule = f"{kind}, target {target:g}, decay {decay:g}, {count} copies, guard {'on' if guard else 'off'}"
            rows[rule] = known[key]
        out[name] = {"unweighted": before.mean, "found": grid.found, "rules": rows}
        print(variant, name, {k: f"{100 * v['mean']:+.2f}" for k, v in list(rows.items())[12:13]}, flush=True)
    return out


class _Grid:
    """Contributions of copies at every strength, held in memory."""

    def __init__(self, cell: Cell, name: str) -> None:
        method = cell.methods[name]
        index = cell.index_for(method)
        copier = Copier(index._state, method, None, seed=0)
        which = torch.from_numpy(np.random.default_rng(0).permutation(len(index))[: LEARN + HELD_OUT])
        self.groups, self.content = index.groups.names, copier.content
        self.kinds = [kind.name for kind in copier.kinds]
        self.found: dict[str, list[list[float]]] = {}
        self._copies: dict[tuple[str, int], Tensor] = {}
        self._which = which
        self._learned: dict[Any, Tensor] = {}
        self._parts: dict[Any, Copies] = {}
        for kind in copier.kinds:
            steps = np.geomspace(kind.least, kind.most, STRENGTHS)
            for i, strength in enumerate(steps):
                made = copier.copies(kind, which, float(strength))
                share = float(made.retrieved().float().mean())
                self.found.setdefault(kind.name, []).append([float(strength), share])
                self._copies[kind.name, i] = made.scores.contributions(slice(0, len(which)))

    def weights(self, kind: str, target: float, decay: float, count: int, guard: bool) -> Tensor:
        at = self._strength(kind, target)
        key = (kind, at, decay, count)
        if key not in self._learned:
            [self._learned[key]] = self._part(kind, at, slice(0, count)).learn(decay)
        w = self._learned[key]
        if not guard:
            return w
        trials = []
        for other in self.kinds:
            held_out = slice(LEARN, None)
            hard = self._part(other, self._strength(other, target), held_out)
            weak = self._part(other, 0, held_out)
            trials.append(Trial(other, StrengthSearch(0.0, []), hard, weak))
        accepted = JudgedWeights({}, w, [t.gains(w) for t in trials]).objection is None
        return w if accepted else torch.ones_like(w)

    def _strength(self, kind: str, target: float) -> int:
        return min(range(STRENGTHS), key=lambda i: (abs(self.found[kind][i][1] - target), i))

    def _part(self, kind: str, i: int, rows: slice) -> Copies:
        key = (kind, i, rows.start, rows.stop)
        if key not in self._parts:
            scores = ArrayScores(self._copies[kind, i][rows], self.groups, memory=2**32)
            self._parts[key] = Copies(scores, self._which[rows], self.content)
        return self._parts[key]
