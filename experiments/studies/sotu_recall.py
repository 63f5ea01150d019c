"""Does attribution find the right speaker? Recall@10 of addresses by the same president and of the same decade.

Queries are 256 evaluation passages of State of the Union addresses; a training passage counts if its address was
given by the same president (or in the same decade). Chance is the share of such passages in the training set.
Also kept: the paper's qualitative figure, the top-1 passage of EKFAC beside that of weighted EKFAC.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.shared.language import HEAD, METHODS, attributed, gains, row, ways_to_weigh
from unde.evaluate import Estimate, recall_at_k

PAPER = "Figures 8 and 9"
K, SHOWN = 10, 6


def run(variant: str | None) -> dict[str, Any]:
    there = attributed("sotu", study="sotu_recall")
    train, queries = there.data.about["train"], there.data.about["evaluate"]
    relevant = {
        "president": np.array([[a["president"] == b["president"] for b in train] for a in queries]),
        "decade": np.array([[a["year"] // 10 == b["year"] // 10 for b in train] for a in queries]),
    }
    learn, evaluate = (
        there.index.features({"input_ids": rows}) for rows in (there.data.learn, there.data.evaluate)
    )
    scored = {title: there.index.score(evaluate, method) for title, method in METHODS.items()}
    ways = {title: ways_to_weigh(there.index.score(learn, method)) for title, method in METHODS.items()}
    simple = there.baselines(there.data.evaluate)
    results: dict = {}
    for what, truth in relevant.items():
        print(row(f"same {what}, %", *HEAD))
        rows = results[what] = {"chance": 100 * float(truth.mean())}
        print(row("chance", f"{rows['chance']:.2f}"))
        for title, scores in simple.items():
            found = _percent(recall_at_k(scores.topk(K).indices, truth))
            rows[title] = found.as_dict()
            print(row(title, found))
        for title, scores in scored.items():
            tops = {kind: scores.top(K, w).indices for kind, w in ways[title].items()}
            found = {kind: _percent(recall_at_k(top, truth)) for kind, top in tops.items()}
            rows[title] = gains(title, found, found)
    plain, weighted = (
        scored["EKFAC"].top(1, ways["EKFAC"][w]).indices[:, 0] for w in ("unweighted", "weighted")
    )
    results["qualitative"] = [
        {
            "query": _shown(there, "evaluate", q),
            "EKFAC": _shown(there, "train", int(plain[q])),
            "weighted EKFAC": _shown(there, "train", int(weighted[q])),
        }
        for q in (plain != weighted).nonzero()[:SHOWN, 0].tolist()
    ]
    return results


def _percent(e: Estimate) -> Estimate:
    return Estimate(100 * e.per_query)


def _shown(there, role: str, i: int) -> str:
    return f"[{there.data.about[role][i]['title']}] {there.data.text(getattr(there.data, role)[i])}"
