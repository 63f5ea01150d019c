"""Tail-patch of TracIn, TRAK, LoGRA and EKFAC with and without learned weights (the paper's WikiText table).

One AdamW step from the end of training on the top 128 sequences of each query, at a tenth of the peak learning
rate (the schedule itself ends at 0). The first 48 (24) evaluation sequences are the queries. "weighted" are weights of
the paper's objective on the learning sequences, "self-retrieval" those that the index learns from its own training
sequences. Printed: 100 × Δ log p a token, 95 % interval over queries.
"""

from __future__ import annotations

from typing import Any

from experiments.shared.corpora import PEAK_LR
from experiments.shared.language import METHODS, attributed, gains, patch_baselines, ways_to_weigh

PAPER = "Table 4"
VARIANTS = ("sotu", "wikitext")
DATA = {"wikitext": ("wikitext-2",)}
K = 128
QUERIES = {"sotu": 48, "wikitext": 24}


def run(variant: str) -> dict[str, Any]:
    there, count = attributed(variant, study="language_tail_patch"), QUERIES[variant]
    queries = there.data.evaluate[:count]
    patch = there.patch({"input_ids": queries}, micro_batch=64)
    results: dict[str, dict] = {"setting": {"k": K, "queries": count, "lr": PEAK_LR / 10}}
    results |= patch_baselines(there, patch, queries, K)
    learn, evaluate = (there.index.features({"input_ids": rows}) for rows in (there.data.learn, queries))
    for title, method in METHODS.items():
        scores = there.index.score(evaluate, method)
        ways = ways_to_weigh(there.index, learn, method)
        found = {kind: patch(scores.top(K, w).indices) for kind, w in ways.items()}
        results[title] = {"method": str(method)} | {kind: f.as_dict() for kind, f in found.items()}
        results[title] |= gains(title, {kind: f.per_token for kind, f in found.items()})
    return results
