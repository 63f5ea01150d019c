"""What smaller stores cost: bytes of an example against LDS, Recall and the error of scores.

Every index in float32 is repacked, not computed again, and every method of the bank is scored from it. Differences of
LDS are paired by query with those from float32, over the same draws of retrained models. "error" is relative to the
norm of a query's scores (median), "spearman" their rank correlation, "shared" the share of the ten best examples that
stay the same. "recall" is that of the ten best where contributors are known: images of the query's class, robots that
show what it names. Stores "matrices, …" are without biases and
norms, as an index built with `exclude=` is: vectors are of no low rank, and most of what factored(1) keeps.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.paths import RUNS
from experiments.shared.sweep import EVERY_BANK
from unde import Index, UndeError
from unde.evaluate import Estimate, paired, recall_at_k
from unde.index import QueryFeatures
from unde.methods import Method

PAPER = ""
VARIANTS = EVERY_BANK
USUAL = "float32"
MATRICES = "matrices, "
STORES = (
    "int8",
    "int4",
    "factored(1)",
    "factored(4)",
    *(f"{MATRICES}{s}" for s in ("int4", "factored(2)", "factored(1)", "factored(4)", "float32")),
)
K = 10
DRAWS = 200  # of retrained models: there are many estimates, and their intervals need few digits


def run(variant: str) -> dict[str, Any]:
    return measured(variant, (USUAL, *STORES))


def measured(variant: str, stores: Sequence[str]) -> dict[str, Any]:
    """What is known of a bank, row by row: what an interrupted run has found is not computed again."""
    cell = cells.get(variant)
    path = RUNS / f"storage-{variant}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    judge = _Judge(cell)
    for store in stores:
        row = found.setdefault(store, {"bytes": {}, "methods": {}})
        with tempfile.TemporaryDirectory(prefix="storage-") as folder:
            held: dict[str, Index] = {}
            for name, method in cell.methods.items():
                if name in row["methods"]:
                    continue
                measure = method.measure
                if measure not in held:
                    given, packed = judge.index(method, store), store.removeprefix(MATRICES)
                    held[measure] = given if packed == USUAL else given.repack(Path(folder, measure), packed)
                m = held[measure].manifest
                row["bytes"][measure] = m.codec.nbytes(1, m.columns)
                made = row["methods"][name] = judge(name, held[measure], method, store)
                path.write_text(json.dumps(found))
                print(variant, store, name, _brief(made), flush=True)
    m = judge.index(next(iter(cell.methods.values()))).manifest
    rows = {s: found[s] | {"bytes": float(np.mean([*found[s]["bytes"].values()]))} for s in stores}
    return {"stores": rows, "examples": m.examples, "width": m.width}


class _Judge:
    """What scores are worth, and how far they are from those in float32."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.relevant = _relevant(cell)
        self.truth: dict[str, tuple[Tensor, Estimate]] = {}

    def index(self, method: Method, store: str = USUAL) -> Index:
        """In float32; for matrices alone, without parameters that are vectors."""
        if not store.startswith(MATRICES):
            return self.cell.index_for(method)
        units = self.index(method).manifest.units
        vectors = [f"^{re.escape(unit['name'])}$" for unit in units if len(unit["shape"]) < 2]
        folder = RUNS / self.cell.name / method.measure / "matrices"
        return self.cell.build(folder, self.cell.built_for[method.measure], exclude=vectors)

    def features(self, method: Method, store: str) -> QueryFeatures:
        if not store.startswith(MATRICES):
            return self.cell.features(method, "eval")
        path = self.cell.features_path(method, "eval-matrices")
        return self.index(method, store).features(self.cell.asked(method, "eval"), path)

    def __call__(self, name: str, index: Index, method: Method, store: str) -> dict[str, Any]:
        usual = self.cell.methods[name]
        if name not in self.truth:
            exact = self.index(usual).score(self.features(usual, USUAL), usual).total()
            self.truth[name] = exact, self.cell.lds(exact, DRAWS)
        features = replace(self.features(usual, store), index=index.manifest.lineage)
        try:
            total = index.score(features, method).total()
        except UndeError as e:  # rounding would decide the scores
            return {"refused": str(e)}
        judged = self.cell.lds(total, DRAWS)
        true, exact = self.truth[name]
        out = {"lds": judged.as_dict(), "difference": paired(exact, judged).as_dict()}
        if self.relevant is not None:
            out["recall"] = _recall(total, self.relevant)
        return out | _error(total, true)


def _error(total: Tensor, true: Tensor) -> dict[str, float]:
    off = (total - true).double().norm(dim=1) / true.double().norm(dim=1)
    ranks = [spearmanr(a, b).statistic for a, b in zip(total.numpy(), true.numpy())]
    best = zip(total.topk(K).indices.tolist(), true.topk(K).indices.tolist())
    return {
        "error": float(off.median()),
        "spearman": float(np.mean(ranks)),
        "shared": float(np.mean([len(set(a) & set(b)) / K for a, b in best])),
    }


def _recall(total: Tensor, relevant: list[np.ndarray]) -> float:
    """Of the ten best, the mean over what is asked for."""
    best = total.topk(K).indices
    return float(np.mean([recall_at_k(best, marks).mean for marks in relevant]))


def _relevant(cell: Cell) -> list[np.ndarray] | None:
    """(Q, N) marks of the contributors of evaluation queries, for each attribute; None where nobody knows them."""
    if cell.domain == "images":
        labels = torch.as_tensor(cell.queries("eval")[1]).unsqueeze(1)
        return [(labels == torch.as_tensor(cell.train()[1])).numpy()]
    if cell.name == "robots":
        from experiments.shared import robots

        asked = {a: np.array([row[a] for row in robots.asked("eval")]) for a in robots.data().categories}
        return [robots.data().contributors(asked, a) for a in asked]
    return None


def _brief(found: dict[str, Any]) -> str:
    if "refused" in found:
        return found["refused"]
    d = found["difference"]
    return f"{100 * d['mean']:+.3f} ± {100 * (d['ci95_total'] or 0):.3f}, error {found['error']:.4f}"
