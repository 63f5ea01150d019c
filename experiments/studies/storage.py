"""What smaller stores cost: bytes of an example against LDS, Recall and the error of scores.

Every index is built in float32 and in int8, and every method of the bank is scored from both. Differences of LDS are
paired by query with those from float32, over the same draws of retrained models. "error" is relative to the
norm of a query's scores (median), "spearman" their rank correlation, "shared" the share of the ten best examples that
stay the same. "recall" is that of the ten best where contributors are known: images of the query's class, robots that
show what it names.
"""

from __future__ import annotations

import json
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
from unde.methods import Method

PAPER = ""
VARIANTS = EVERY_BANK
USUAL = "float32"
STORES = ("int8",)
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
                    held[measure] = judge.index(method, store, Path(folder, measure))
                m = held[measure].manifest
                row["bytes"][measure] = m.codec.nbytes(1, m.columns)
                made = row["methods"][name] = judge(name, held[measure], method)
                path.write_text(json.dumps(found))
                print(variant, store, name, _brief(made), flush=True)
    m = cell.index_for(next(iter(cell.methods.values()))).manifest
    rows = {s: found[s] | {"bytes": float(np.mean([*found[s]["bytes"].values()]))} for s in stores}
    return {"stores": rows, "examples": m.examples, "width": m.width}


class _Judge:
    """What scores are worth, and how far they are from those in float32."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.relevant = _relevant(cell)
        self.truth: dict[str, tuple[Tensor, Estimate]] = {}

    def index(self, method: Method, store: str, folder: Path) -> Index:
        if store == USUAL:
            return self.cell.index_for(method)
        return self.cell.build(folder, self.cell.built_for[method.measure], store_dtype=store)

    def __call__(self, name: str, index: Index, method: Method) -> dict[str, Any]:
        usual = self.cell.methods[name]
        if name not in self.truth:
            exact = self.cell.index_for(usual).score(self.cell.features(usual, "eval"), usual).total()
            self.truth[name] = exact, self.cell.lds(exact, DRAWS)
        features = replace(self.cell.features(usual, "eval"), index=index.manifest.lineage)
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
