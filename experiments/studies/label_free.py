"""Weights without labels: which rule is least often worse, on banks that can tell.

Each rule is fixed beforehand, and no LDS chooses anything in it. With queries: "A", Algorithm 1 at k = 5 and λ′ = 0.5;
"T", the top-k objective with hubs divided out, k = 10, fixed point with λ′ = 0.1; "S", self-retrieval; "J", the mean
of the objectives of T and S, each in units of its unweighted value, λ′ = 0.1. Without queries: "S", and "A" and "T"
with the perturbed copies of S as queries. Banks are those with a reliability of 0.6 or more. The rule is chosen leaving
one data set out: that which is worse in the fewest cells of the other data sets, then the one with the larger mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.label_free_objectives import divide_hubs, learn_retrieval
from experiments.shared.paths import RESULTS, RUNS, computed
from experiments.studies.quality import name_of
from unde import Index
from unde.evaluate import paired
from unde.index.label_free import EXAMPLES, Copier, Retrieval
from unde.methods import EKFAC, TRAK, LoGRA, Method, TracIn
from unde.scoring import GroupScores
from unde.scoring.base import Scores
from unde.weights.contributions import Contributions
from unde.weights.fixed_point import Grams, RatioObjective
from unde.weights.learn import FIXED_POINT, Settings, fit
from unde.weights.objective import WeightProblem, select
from unde.weights.retrieval import describe

PAPER = ""
RELIABLE = 0.6  # least reliability of a bank
BOOTSTRAP = 200
DAMPING = 0.1  # of all methods with a kernel
FEATURES = ("kron(64)", "factored(4)")
WITH_QUERIES, WITHOUT = ("A", "T", "S", "J"), ("S", "A on copies", "T on copies")
K_HUBS, DECAY = 10, 0.1  # of T and J


def reliable_banks() -> list[str]:
    """Banks whose models, trained twice, agree: as `reliability` has measured."""
    found = []
    for path in sorted(RESULTS.glob("reliability_*.json")):
        name = path.stem.removeprefix("reliability_")
        if name in cells.CELLS and json.loads(path.read_text())["results"]["r"] >= RELIABLE:
            found.append(name)
    return found


MEASURED = {name_of(bank, f): (bank, f) for bank in reliable_banks() for f in FEATURES}
VARIANTS = tuple(MEASURED)
BANKS = {variant: (bank,) for variant, (bank, _) in MEASURED.items()}


def run(variant: str) -> dict[str, Any]:
    bank, features = MEASURED[variant]
    cell, folder = cells.get(bank), RUNS / "label_free" / variant
    codec = "auto" if features.startswith("factored") else "int8"
    index = cell.build(folder / "index", EKFAC(features, damping=DAMPING), store_dtype=codec)
    methods: dict[str, Method] = {"EKFAC": EKFAC(damping=DAMPING)}
    if not features.startswith("factored"):  # whitened features serve EKFAC alone
        methods = {
            "TracIn": TracIn(),
            "TRAK": TRAK(damping=DAMPING),
            "LoGRA": LoGRA(damping=DAMPING),
            **methods,
        }
    out = {}
    for name, method in methods.items():
        out[name] = computed(folder / f"{name}.json", partial(_cell, cell, index, folder, method))
        shown = {r: f"{100 * v['difference']['mean']:+.1f}" for r, v in out[name]["rules"].items()}
        print(f"{variant} {name}: {100 * out[name]['unweighted']['mean']:.1f} {shown}", flush=True)
    return {"bank": bank, "features": features, "methods": out}


def _cell(cell: Cell, index: Index, folder: Any, method: Method) -> dict[str, Any]:
    learn, evaluate = (
        index.score(index.features(cell.queries(role), folder / f"{role}.safetensors"), method)
        for role in ("learn", "eval")
    )
    retrieval = Retrieval(Copier(index._state, learn.method, None, 0), EXAMPLES)
    weights = {rule: w / w.mean() for rule, w in learn_all(learn, retrieval).items()}
    plain = cell.lds(evaluate.total(), BOOTSTRAP)
    ones = torch.ones(len(learn.groups))
    rules = {}
    print(f"{cell.name} {method}: learned", flush=True)
    for rule, w in weights.items():
        weighted = cell.lds(evaluate.total(w), BOOTSTRAP)
        rules[rule] = {
            "weights": w.tolist(),
            "estimate": weighted.as_dict(),
            "difference": paired(plain, weighted).as_dict(),
            "effect": describe(learn, w),
            "found": _found(retrieval, w),
        }
    return {
        "unweighted": plain.as_dict(),
        "effect": describe(learn, ones),
        "found": _found(retrieval, ones),
        "strength": {kind: s.strength for kind, s in retrieval.searches.items()},
        "rules": rules,
    }


def _found(retrieval: Retrieval, w: Tensor) -> float:
    """The share of copies to learn from that find their original."""
    return float(np.mean([float(c.retrieved(w).float().mean()) for c in retrieval.learning.values()]))


# --- rules ---------------------------------------------------------------------------------------------------


def learn_all(learn: GroupScores, retrieval: Retrieval) -> dict[str, Tensor]:
    """Weights by every rule."""
    copies = [c.scores for c in retrieval.learning.values()]
    return {
        "A": _solve(learn, Settings()),
        "T": _solve(divide_hubs(learn), Settings(K_HUBS, DECAY, solver=FIXED_POINT)),
        "S": torch.stack([learn_retrieval(c) for c in retrieval.learning.values()]).mean(0),
        "J": joint(learn, retrieval),
        "A on copies": torch.stack([_solve(c, Settings()) for c in copies]).mean(0),
        "T on copies": torch.stack(
            [_solve(divide_hubs(c), Settings(K_HUBS, DECAY, solver=FIXED_POINT)) for c in copies]
        ).mean(0),
    }


def _solve(source: Scores, settings: Settings) -> Tensor:
    data = Contributions(source)
    problem = WeightProblem(data, torch.arange(data.queries), settings.k, settings.objective)
    return fit([problem], [settings])[0].weights.float()


def joint(learn: GroupScores, retrieval: Retrieval) -> Tensor:
    """½ T(w) / T(1) + ½ S(w) / S(1) less the penalty: one mean of ratios, by turns of selection and ascent."""
    problems = [_problem(divide_hubs(learn), K_HUBS, None)]
    problems += [_problem(c.scores, 1, c.originals) for c in retrieval.learning.values()]
    shares = [0.5, *([0.5 / (len(problems) - 1)] * (len(problems) - 1))]
    grams = Grams(partial(chain, *(Grams.of(p.data, p.queries) for p in problems)), keep=False)
    unweighted = [float(p.values(torch.ones(p.data.groups)).mean()) for p in problems]
    count = sum(len(p.queries) for p in problems)
    factors = [s / u * count / len(p.queries) for s, u, p in zip(shares, unweighted, problems)]
    objective = RatioObjective(grams, scale=1.0, weight_decay=DECAY)
    w = torch.ones(problems[0].data.groups, dtype=torch.float64)
    for _ in range(20):
        chosen = [select(p, w)[1] * f for p, f in zip(problems, factors)]
        before, (w, _, _) = w, objective.ascend(torch.cat(chosen), w)
        if (w - before).abs().max() < 1e-4:
            break
    return w.float()


def _problem(source: Scores, k: int, positives: Tensor | None) -> WeightProblem:
    data = Contributions(source)
    name = "top-k" if positives is None else "supervised"
    return WeightProblem(data, torch.arange(data.queries), k, name, positives)


# --- the choice ----------------------------------------------------------------------------------------------


def verdict(difference: Mapping[str, Any]) -> int:
    """1 better, −1 worse, 0 neither. A gain has to stand out of the noise of queries and models, a loss of queries."""
    total = difference["ci95_total"] or difference["ci95"]
    return int(difference["mean"] > total) - int(difference["mean"] < -difference["ci95"])


def choose(results: Mapping[str, Any], rules: tuple[str, ...], left_out: str | None = None) -> str:
    """The rule that is least often worse, of all banks but those of one data set."""
    rows = [
        {rule: m["rules"][rule]["difference"] for rule in rules}
        for r in results.values()
        if data_set(r["bank"]) != left_out
        for m in r["methods"].values()
    ]
    return min(
        rules,
        key=lambda rule: (
            sum(verdict(row[rule]) < 0 for row in rows),
            -np.mean([row[rule]["mean"] for row in rows]) if rows else 0,
        ),
    )


def data_set(bank: str) -> str:
    """Banks of one kind of data are left out together."""
    return "text" if bank.endswith(("gpt2", "lora")) else "images"
