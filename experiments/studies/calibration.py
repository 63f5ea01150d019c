"""Calibration on 8 and 16 halves drawn from each bank, judged on its other halves and queries.

For each draw `unde.evaluate.calibration` chooses a setting, fits weights and estimates the LDS to expect, all from the
drawn halves and the learning queries (those of diffusion models: every other query). The other halves and the
evaluation queries judge: how far the chosen setting is behind the best one there, what weights add, and whether the
LDS lies within the interval that was told. Nothing here was used to choose; the halves that judge differ by draw.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.paths import RUNS
from experiments.shared.sweep import EVERY_BANK
from unde import Index, UndeError
from unde.evaluate import calibration as statistics
from unde.evaluate.calibration import spearman
from unde.index.calibrate import Predictor
from unde.index.calibration import list_settings
from unde.methods import DAS, DTRAK, EKFAC, TRAK, Method

PAPER = ""
VARIANTS = EVERY_BANK
DRAWS, HALVES = 12, (8, 16)
NEAR = 0.015  # the goal: the chosen setting is within so much LDS of the best

# index → the method that it is built for
BUILT: dict[str, dict[str, Method]] = {
    "images": {"kron(16)": EKFAC("kron(16)", fisher="sampled")},
    "text": {"kron(16)": EKFAC("kron(16)", fisher="sampled")},
    "diffusion": {"loss": TRAK(), "D-TRAK": DTRAK(), "DAS": DAS()},
}
MORE: dict[str, dict[str, Method]] = {"finetuned-gpt2": {"kron(64)": EKFAC("kron(64)", fisher="sampled")}}


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    methods = BUILT[cell.domain] | MORE.get(variant, {})
    return {name: _index(cell, name, method) for name, method in methods.items()}


def _index(cell: Cell, name: str, method: Method) -> dict[str, Any]:
    folder = RUNS / cell.name / "calibration" / name.strip(")").replace("(", "-")
    built = "TRAK, damping 0.1" if method.measure == "loss" else f"{type(method).__name__}, damping 0.1"
    found = measure(cell, name, cell.build(folder, method), folder)
    return found | {"default": {"name": built, "lds": found["settings"][built]}}


def measure(cell: Cell, name: str, index: Index, folder: Path, draws: int = DRAWS) -> dict[str, Any]:
    """LDS of every setting of an index, and what calibrations on few halves get. Features of queries go beside it."""
    curves = list_settings(index._state.stored)
    bank = cell.bank
    learn, evaluate = (
        _predictions(cell, index, folder, role, bank.masks, curves) for role in ("learn", "eval")
    )
    if "learn" in bank.utility:
        roles = (learn, bank.utility["learn"]), (evaluate, bank.utility["eval"])
    else:  # utilities of the evaluation queries alone: every other one calibrates
        u = bank.utility["eval"]
        first, second = ({k: v[:, at::2] for k, v in evaluate.items()} for at in (0, 1))
        roles = (first, u[:, ::2]), (second, u[:, 1::2])
    names = [[s.name for s in curve if s.name in evaluate] for curve in curves]
    by_query = {n: spearman(p.sum(2), roles[1][1]) for n, p in roles[1][0].items()}
    everything = {n: float(np.nanmean(values)) for n, values in by_query.items()}
    best = max(everything, key=lambda n: everything[n])
    out: dict[str, Any] = {
        "settings": everything,
        "ci95": {n: _ci95(values) for n, values in by_query.items()},  # over queries
        "best": best,
    }
    for halves in HALVES:
        out[str(halves)] = _draws(bank.masks, *roles, [c for c in names if c], halves, draws)
        shown = {k: v for k, v in out[str(halves)].items() if not isinstance(v, list)}
        print(f"{cell.name} {name}, {halves} halves: {shown}", flush=True)
    return out


def _predictions(
    cell: Cell, index: Index, folder: Path, role: str, masks: np.ndarray, curves: Any
) -> dict[str, np.ndarray]:
    """Of the settings that the index does not refuse."""
    features = index.features(cell.queries(role), folder.with_name(f"{folder.name}-{role}.safetensors"))
    predictor = Predictor(index._state.scorer, features.features, features.digests, masks)
    stored = index._state.stored
    out = {}
    for s in chain.from_iterable(curves):
        with suppress(UndeError):  # a kernel beyond the memory budget, a damping that rounding decides
            out[s.name] = predictor.predict(s.method, s.terms(stored)).astype(np.float32)
    return out


def _draws(
    masks: np.ndarray, calibrate: Any, judge: Any, names: list[list[str]], halves: int, draws: int
) -> dict[str, Any]:
    rows = [_draw(masks, calibrate, judge, names, halves, d) for d in range(draws)]
    behind = np.array([r["behind"] for r in rows])
    gains = np.array([r["gain"] for r in rows])
    return {
        "draws": rows,
        "behind": float(behind.mean()),
        "behind most": float(behind.max()),
        "near": float((behind <= NEAR).mean()),
        "weighted": float(np.mean([r["weighted"] for r in rows])),
        "gain": float(gains.mean()),
        "gain least": float(gains.min()),
        "worse": sum(r["worse"] for r in rows),
        "expected": float(np.mean([r["expected"] for r in rows])),
        "half width": float(np.mean([r["half width"] for r in rows])),
        "judged": float(np.mean([r["judged"] for r in rows])),
        "covered": float(np.mean([abs(r["expected"] - r["judged"]) <= r["half width"] for r in rows])),
    }


def _draw(
    masks: np.ndarray, calibrate: Any, judge: Any, names: Any, halves: int, draw: int
) -> dict[str, Any]:
    (learn, learned), (evaluate, judged) = calibrate, judge
    order = np.random.default_rng([draw, halves]).permutation(len(masks))
    drawn, rest = order[:halves], order[halves:]
    predictions, utility = {n: p[drawn] for n, p in learn.items()}, learned[drawn]
    chosen = statistics.select(predictions, utility, names)
    expected = statistics.measure(statistics.crossfit(predictions, utility, names), utility)
    there = {n: _lds(p[rest].sum(2), judged[rest]) for n, p in evaluate.items()}
    resolved = evaluate[chosen.setting][rest].astype(np.float64)
    weights = np.ones(resolved.shape[2]) if chosen.weights is None else chosen.weights
    plain, weighted = (spearman(resolved @ w, judged[rest]) for w in (np.ones(len(weights)), weights))
    difference = weighted - plain
    return {
        "setting": chosen.setting,
        "behind": max(there.values()) - there[chosen.setting],
        "weighted": chosen.weights is not None,
        "gain": float(np.nanmean(difference)),
        "worse": bool(np.nanmean(difference) + _ci95(difference) < 0),
        "expected": expected.mean,
        "half width": float(expected.ci95_total or 0.0),
        "judged": float(np.nanmean(weighted)),
    }


def _ci95(values: np.ndarray) -> float:
    """Half width."""
    return 1.96 * float(np.nanstd(values, ddof=1)) / float(np.sqrt(len(values)))


def _lds(predicted: np.ndarray, utility: np.ndarray) -> float:
    return float(np.nanmean(spearman(predicted, utility)))
