"""Does the share of training examples that find themselves rank projections as LDS does?

An index for each of four ranks; of each method the mean share over strengths ("trust", as in the study of that name),
and LDS, unweighted. "choice" says what taking the rank by trust would have gained or lost against rank 16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scipy.stats import spearmanr

from experiments.shared import cells
from experiments.shared.sweep import BOOTSTRAP
from experiments.studies.trust import _Copied
from unde.evaluate import Estimate, paired

PAPER = ""
VARIANTS = ("mnist-resnet", "mnist-vit", "cifar10-resnet", "sotu-gpt2", "finetuned-gpt2")
RANKS, USUAL = (4, 8, 16, 32), 16


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    results: dict[str, Any] = {}
    found: dict[str, dict[int, tuple[float, Estimate]]] = {name: {} for name in cell.methods}
    for rank in RANKS:
        built_for = {"loss": replace(cell.built_for["loss"], projection=f"kron({rank})")}
        ranked = replace(cell, name=f"{variant}-rank-{rank}", built_for=built_for, _built={})
        for name, method in cell.methods.items():
            judged = cell.lds(ranked.scores(method, "eval").total(), BOOTSTRAP)
            found[name][rank] = (_Copied(ranked, method).trust(method), judged)
            print(variant, name, rank, found[name][rank][0], f"{100 * judged.mean:.2f}", flush=True)
    for name, ranks in found.items():
        best = max(ranks, key=lambda rank: ranks[rank][0])
        results[name] = {
            "ranks": {str(r): {"trust": t, "lds": judged.as_dict()} for r, (t, judged) in ranks.items()},
            "spearman": float(spearmanr(*zip(*((t, judged.mean) for t, judged in ranks.values())))[0]),
            "choice": {"rank": best, "difference": paired(ranks[USUAL][1], ranks[best][1]).as_dict()},
        }
    return results
