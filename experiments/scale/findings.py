"""What is found for each method, without and with weights, and the file it goes to.

LDS and its ablations are those of the small studies (`experiments.studies`), with all their columns; other measures are
taken with Algorithm 1 at the k and λ′ that are the same for all. Estimates stand beside the paired difference.
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
from unde import Index, Weights
from unde.evaluate import Bank, Estimate, TailPatch, mislabel_auc, mislabel_auc_interval, paired
from unde.methods import Method
from unde.scoring import GroupScores


@dataclass(frozen=True)
class Learned:
    """A method with its index and the weights of Algorithm 1 at the k and λ′ that are the same for all."""

    title: str
    method: Method
    index: Index
    weights: Weights

    def entry(self, unweighted: Any, estimate: Any, difference: Any) -> dict[str, Any]:
        """One method of a result; all ready for JSON."""
        weights = {"weights": self.weights.values.tolist(), "groups": list(self.weights.groups)}
        rules = {"fixed": {**weights, "estimate": estimate, "difference": difference}}
        return {"method": repr(self.method), "unweighted": unweighted, "rules": rules}


def patch_entry(
    learned: Learned, evaluate: GroupScores, k: int, patch: Callable[[Tensor, str], TailPatch]
) -> dict[str, Any]:
    """Tail-patch scores, in % a token, of the top k examples; `patch` is told whether they are weighted."""
    plain = patch(evaluate.top(k).indices, "unweighted").per_token
    found = patch(evaluate.top(k, learned.weights).indices, "fixed").per_token
    return learned.entry(plain.as_dict(), found.as_dict(), paired(plain, found).as_dict())


def mislabel_entry(learned: Learned, judged: np.ndarray, wrong: np.ndarray, top: int) -> dict[str, Any]:
    """AUC of normalised self-influence on the training examples `judged`, of which `wrong` (n,) are mislabelled."""

    def area(w: Weights | None) -> dict[str, Any]:
        some = judged.tolist()
        influence = learned.index.self_influence(w, normalize_top=top, subset=some, method=learned.method)
        low, high = mislabel_auc_interval(influence, wrong)
        interval = None if np.isnan(low) else [low, high]
        return {"auc": mislabel_auc(influence, wrong), "interval95": interval, "examples": len(some)}

    plain, found = area(None), area(learned.weights)
    return learned.entry(plain, found, {"auc": found["auc"] - plain["auc"]})


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
