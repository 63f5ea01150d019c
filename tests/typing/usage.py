"""Public names as users write them: checked by mypy, never run."""

from __future__ import annotations

from typing import Any

from torch import nn

import unde
from unde.evaluate import Bank, Estimate, lds, mislabel_auc, recall_at_k
from unde.tasks import CausalLM, Classification


def build(model: nn.Module, data: Any) -> unde.Index:
    groups: unde.Groups = unde.Groups.by_layer(model)
    task: unde.Task = Classification()
    return unde.Index.build(
        model, task, data, "runs/idx", method=unde.methods.TRAK(damping=0.1), groups=groups
    )


def ask(index: unde.Index, queries: Any) -> list[int]:
    scores: unde.GroupScores = index.score(queries)
    weights: unde.Weights = index.learn_weights()
    weights.save("weights.json")
    top = scores.top(10, unde.Weights.load("weights.json"), largest=True)
    return [int(i) for i in top.indices[0]]


def measure(scores: unde.GroupScores, bank: Bank) -> float:
    estimate: Estimate = lds(scores.total(), bank.masks, bank.utility["eval"])
    return estimate.mean + estimate.ci95


def tasks() -> list[unde.Task]:
    return [Classification(), CausalLM()]


METRICS = (mislabel_auc, recall_at_k)
