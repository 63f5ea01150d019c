"""What is found for each method, without weights and with weights learned in two ways, and the file it goes to.

The two rules: "top-k", the paper's objective as it stands on queries that serve nothing else, and "self-retrieval",
which asks training examples to find themselves. Each estimate stands beside the paired difference to no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from experiments.runner import machine
from experiments.shared.paths import unfinished, write_json
from experiments.shared.sweep import objective
from unde import Index, Weights, console
from unde.errors import UndeError
from unde.evaluate import Bank, Estimate, TailPatch, compare, lds, mislabel_auc, mislabel_auc_interval, paired
from unde.methods import Method
from unde.scoring import GroupScores


@dataclass(frozen=True)
class Learned:
    """A method with its index and the weights of each rule; and why a rule has none, which loses no other."""

    title: str
    method: Method
    index: Index
    weights: dict[str, Weights]
    without: dict[str, str]

    @classmethod
    def of(cls, title: str, method: Method, index: Index, learn: Callable[[], GroupScores]) -> Learned:
        ways: dict[str, Callable[[], Weights]] = {
            "top-k": lambda: objective(learn()),
            "self-retrieval": lambda: index.learn_weights(method=method),
        }
        made = cls(title, method, index, {}, {})
        for rule, way in ways.items():
            try:
                made.weights[rule] = way()
            except UndeError as e:
                console.note(f"{method.name}: no weights by {rule} ({e})")
                made.without[rule] = str(e)
        return made

    def entry(self, unweighted: Any, measured: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        """One method of a result, from the estimate of each rule and its difference; all ready for JSON."""
        rules = {
            name: {
                "weights": self.weights[name].values.tolist(),
                "groups": list(self.weights[name].groups),
                "estimate": estimate,
                "difference": difference,
            }
            for name, (estimate, difference) in measured.items()
        }
        found = {"method": repr(self.method), "unweighted": unweighted, "rules": rules}
        return {**found, "not learned": dict(self.without)} if self.without else found


def lds_entry(learned: Learned, evaluate: GroupScores, bank: Bank) -> dict[str, Any]:
    truth = bank.masks, bank.utility["eval"]
    plain = lds(evaluate.total(), *truth, bootstrap=1000)
    found = {name: compare(evaluate, w, *truth) for name, w in learned.weights.items()}
    measured = {name: (c.weighted.as_dict(), c.difference.as_dict()) for name, c in found.items()}
    return learned.entry(plain.as_dict(), measured)


def patch_entry(
    learned: Learned, evaluate: GroupScores, k: int, patch: Callable[[Tensor, str], TailPatch]
) -> dict[str, Any]:
    """Tail-patch scores, in % a token, of the top k examples; `patch` is told which rule they come from."""
    plain = patch(evaluate.top(k).indices, "unweighted").per_token
    measured = {}
    for name, w in learned.weights.items():
        found = patch(evaluate.top(k, w).indices, name).per_token
        measured[name] = found.as_dict(), paired(plain, found).as_dict()
    return learned.entry(plain.as_dict(), measured)


def mislabel_entry(learned: Learned, judged: np.ndarray, wrong: np.ndarray, top: int) -> dict[str, Any]:
    """AUC of normalised self-influence on the training examples `judged`, of which `wrong` (n,) are mislabelled.

    Self-retrieval learns from training examples: its AUC is also given without those that it saw.
    """

    def area(w: Weights | None, rows: np.ndarray) -> dict[str, Any]:
        some, marks = judged[rows].tolist(), wrong[rows]
        influence = learned.index.self_influence(w, normalize_top=top, subset=some, method=learned.method)
        low, high = mislabel_auc_interval(influence, marks)
        interval = None if np.isnan(low) else [low, high]
        return {"auc": mislabel_auc(influence, marks), "interval95": interval, "examples": len(rows)}

    everything, measured = np.arange(len(judged)), {}
    plain = area(None, everything)
    for name, w in learned.weights.items():
        found = area(w, everything)
        measured[name] = found, {"auc": found["auc"] - plain["auc"]}
    made = learned.entry(plain, measured)
    for name, w in learned.weights.items():
        apart = np.flatnonzero(~np.isin(judged, seen(w)))
        if 0 < len(apart) < len(judged) and 0 < wrong[apart].sum() < len(apart):
            made["rules"][name]["unseen examples"] = {
                "unweighted": area(None, apart),
                "estimate": area(w, apart),
            }
    return made


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
    with unfinished(path) as part:
        np.savez(part, indices=rows, per_token=found.per_token.per_query, summed=found.summed.per_query)
    return found


def write(folder: Path, name: str, results: Mapping[str, Any], setting: Any) -> Path:
    """NAME.json, written anew after each method, so that what was found is never lost."""
    provenance = {"setting": repr(setting), **machine()}
    write_json(path := folder / f"{name}.json", {"results": dict(results), "provenance": provenance})
    return path
