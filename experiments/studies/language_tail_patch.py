"""Tail-patch of TracIn, TRAK, LoGRA and EKFAC with and without learned weights (the paper's WikiText table).

One AdamW step from the end of training on the top sequences of each query, as many as a training batch has, at a tenth
of the peak learning rate (the schedule itself ends at 0). All 256 evaluation sequences are queries. "weighted" are
weights by Algorithm 1 on the learning sequences. Printed: 100 × Δ log p a token, 95 % interval over queries.
"""

from __future__ import annotations

from typing import Any

from experiments.shared.corpora import BATCH, PEAK_LR
from experiments.shared.language import METHODS, attributed, patch_baselines, patched

PAPER = "Table 4"
VARIANTS = ("sotu", "wikitext")
DATA = {"wikitext": ("wikitext-2",)}


def run(variant: str) -> dict[str, Any]:
    there = attributed(variant, study="language_tail_patch")
    queries = there.data.evaluate
    patch = there.patch({"input_ids": queries})
    results: dict[str, dict] = {"setting": {"k": BATCH, "queries": len(queries), "lr": PEAK_LR / 10}}
    results |= patch_baselines(there, patch, queries, BATCH)
    learn, evaluate = (there.index.features({"input_ids": rows}) for rows in (there.data.learn, queries))
    for title, method in METHODS.items():
        scores = (there.index.score(features, method) for features in (learn, evaluate))
        results[title] = {"method": str(method)} | patched(title, *scores, patch, BATCH)[0]
    return results
