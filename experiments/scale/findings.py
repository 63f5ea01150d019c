"""What is found for each method, without weights and with weights learned in two ways, and the file it goes to.

The two rules: "top-k", the paper's objective as it stands on queries that serve nothing else, and "self-retrieval",
which asks training examples to find themselves. Each estimate stands beside the paired difference to no weights.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import unde
from experiments.shared.sweep import objective
from unde import Index, Weights, console
from unde.errors import UndeError
from unde.evaluate import Bank, Estimate, TailPatch, compare, mislabel_auc, mislabel_auc_interval, paired
from unde.methods import Method
from unde.scoring import GroupScores

RULES = ("top-k", "self-retrieval")


def learned(
    index: Index, method: Method, learn: Callable[[], GroupScores]
) -> tuple[dict[str, Weights], dict[str, str]]:
    """The weights of each rule; and why a rule has none, which must not lose what the others found."""
    ways: dict[str, Callable[[], Weights]] = {
        "top-k": lambda: objective(learn()),
        "self-retrieval": lambda: index.learn_weights(method=method),
    }
    weights, without = {}, {}
    for rule in RULES:
        try:
            weights[rule] = ways[rule]()
        except UndeError as e:
            console.note(f"{method.name}: no weights by {rule} ({e})")
            without[rule] = str(e)
    return weights, without


def entry(
    method: Method, unweighted: Any, rules: Mapping[str, Mapping[str, Any]], without: Mapping[str, str]
) -> dict[str, Any]:
    """One method of a result; estimates are ready for JSON."""
    found = {"method": repr(method), "unweighted": unweighted, "rules": dict(rules)}
    return {**found, "not learned": dict(without)} if without else found


def rule(weights: Weights, estimate: Any, difference: Any) -> dict[str, Any]:
    listed = {"weights": weights.values.tolist(), "groups": list(weights.groups)}
    return {**listed, "estimate": estimate, "difference": difference}


def lds_entry(
    method: Method,
    evaluate: GroupScores,
    weights: Mapping[str, Weights],
    without: Mapping[str, str],
    bank: Bank,
) -> dict[str, Any]:
    """LDS against a bank whose queries are called "eval"."""
    utility, rules = bank.utility["eval"], {}
    plain: Any = None
    for name, w in {**weights, **({} if weights else {"": Weights.uniform(evaluate.groups)})}.items():
        found = compare(evaluate, w, bank.masks, utility).as_dict()
        plain = found["unweighted"]
        if name:
            rules[name] = rule(w, found["weighted"], found["difference"])
    return entry(method, plain, rules, without)


def patch_entry(
    method: Method,
    evaluate: GroupScores,
    weights: Mapping[str, Weights],
    without: Mapping[str, str],
    k: int,
    patch: Callable[[Tensor, str], TailPatch],
) -> dict[str, Any]:
    """Tail-patch scores, in % a token, of the top k examples; `patch` is told which rule they come from."""
    plain = patch(evaluate.top(k).indices, "unweighted").per_token
    rules = {}
    for name, w in weights.items():
        found = patch(evaluate.top(k, w).indices, name).per_token
        rules[name] = rule(w, found.as_dict(), paired(plain, found).as_dict())
    return entry(method, plain.as_dict(), rules, without)


def mislabel_entry(
    index: Index,
    method: Method,
    weights: Mapping[str, Weights],
    without: Mapping[str, str],
    judged: np.ndarray,
    wrong: np.ndarray,
    top: int,
) -> dict[str, Any]:
    """AUC of normalised self-influence on the training examples `judged`, of which `wrong` (n,) are mislabelled.

    Self-retrieval learns from training examples: its AUC is also given without those that it saw.
    """

    def area(w: Weights | None, rows: np.ndarray) -> dict[str, Any]:
        influence = index.self_influence(w, normalize_top=top, subset=judged[rows].tolist(), method=method)
        low, high = mislabel_auc_interval(influence, wrong[rows])
        finite = None if np.isnan(low) else [low, high]
        return {"auc": mislabel_auc(influence, wrong[rows]), "interval95": finite, "examples": len(rows)}

    everything, rules = np.arange(len(judged)), {}
    plain = area(None, everything)
    for name, w in weights.items():
        found = area(w, everything)
        rules[name] = rule(w, found, {"auc": found["auc"] - plain["auc"]})
        apart = np.flatnonzero(~np.isin(judged, seen(w)))
        if 0 < len(apart) < len(judged) and 0 < wrong[apart].sum() < len(apart):
            rules[name]["unseen examples"] = {"unweighted": area(None, apart), "estimate": area(w, apart)}
    return entry(method, plain, rules, without)


def seen(weights: Weights) -> list[int]:
    """The training examples that weights were learned from: self-retrieval lists its own, part by part."""
    asked = weights.provenance.get("examples")  # of other rules: how many there are
    return sorted({i for part in asked.values() for i in part}) if isinstance(asked, dict) else []


def bank_entry(bank: Bank) -> dict[str, Any]:
    return {
        "subsets": len(bank.masks),
        "examples": int(bank.masks.shape[1]),
        "in each": int(bank.masks[0].sum()),
        "seconds for each model": float(bank.seconds.mean()),
        "name": bank.provenance["plan"]["name"],
    }


def kept(path: Path, indices: Tensor, make: Callable[[], TailPatch]) -> TailPatch:
    """A tail-patch that takes hours is made once: the file is used again for the same proponents."""
    rows = np.asarray(indices)
    if path.exists():
        with np.load(path, allow_pickle=False) as file:
            if np.array_equal(file["indices"], rows):
                return TailPatch(Estimate(file["per_token"]), Estimate(file["summed"]))
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, indices=rows, per_token=found.per_token.per_query, summed=found.summed.per_query)
    unfinished.replace(path)
    return found


def write(folder: Path, name: str, results: Mapping[str, Any], setting: Any) -> Path:
    """NAME.json, written anew after each method, so that what was found is never lost."""
    folder.mkdir(parents=True, exist_ok=True)
    provenance = {
        "setting": repr(setting),
        "unde": unde.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }
    path = folder / f"{name}.json"
    unfinished = folder / f"{name}.json.unfinished"
    unfinished.write_text(json.dumps({"results": dict(results), "provenance": provenance}, indent=1) + "\n")
    unfinished.replace(path)
    return path
