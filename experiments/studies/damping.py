"""Damping: unweighted LDS of every method over relative dampings from 0.001 to 100.

Each bank has an index under kron(16), with the gradients of sampled labels for EKFAC(fisher="sampled"); diffusion banks
have one for each measure. `choose` takes the damping of a method for a kind of task from the other data sets of that
kind, so that what it gets on the one left out was not chosen on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unde.errors import UndeError

PAPER = ""
DAMPINGS = (0.001, 0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0)
USUAL = 0.1
DATA_SETS = {  # kind of task → data set → banks
    "classification": {"MNIST": ("mnist-resnet", "mnist-vit"), "CIFAR-10": ("cifar10-resnet", "cifar10-vit")},
    "language": {
        "State of the Union": ("sotu-gpt2",),
        "WikiText": ("wikitext-gpt2",),
        "fine-tuning": ("finetuned-gpt2",),
    },
    "diffusion": {"CIFAR-2": ("cifar2",), "robots": ("robots",)},
}
VARIANTS = tuple(bank for sets in DATA_SETS.values() for banks in sets.values() for bank in banks)


def run(variant: str) -> dict[str, Any]:
    """{method: {damping: estimate}}, and TracIn under damping 0."""
    from experiments.shared import cells
    from experiments.shared.paths import RUNS
    from unde.methods import DAS, DTRAK, EKFAC, TRAK, LoGRA, TracIn

    cell = cells.get(variant)
    if cell.domain == "diffusion":
        asked = {"TRAK": TRAK(), "D-TRAK": DTRAK(), "DAS": DAS()}
        built = {m.measure: m for m in asked.values()}
    else:
        sampled = EKFAC(fisher="sampled")
        asked = {m.__name__: m(fisher="empirical") for m in (TRAK, LoGRA, EKFAC)} | {
            "EKFAC, sampled Fisher": sampled
        }
        built = {"loss": replace(sampled, projection="kron(16)")}
    home, indexes, queries = RUNS / variant / "damping", {}, {}
    for measure, method in built.items():
        indexes[measure] = cell.build(home / measure, replace(method, damping=USUAL))
        queries[measure] = indexes[measure].features(
            cell.queries("eval"), home / f"{measure}-eval.safetensors"
        )

    def judged(method: Any) -> dict[str, Any] | None:
        with contextlib.suppress(UndeError):  # singular at this damping
            scores = indexes[method.measure].score(queries[method.measure], method)
            return cell.lds(scores.total()).as_dict()
        return None

    results = {"TracIn": {"0": judged(TracIn())}}
    for title, method in asked.items():
        results[title] = {f"{d:g}": judged(replace(method, damping=d)) for d in DAMPINGS}
        print(title, {d: e and round(100 * e["mean"], 1) for d, e in results[title].items()}, flush=True)
    return results


def choose(
    results: Mapping[str, Mapping[str, Any]], kind: str, method: str, without: str | None = None
) -> float:
    """The damping with the highest mean LDS over the data sets of a kind, each of equal weight, but for one."""
    others = {name: banks for name, banks in DATA_SETS[kind].items() if name != without}

    def mean(damping: float) -> float:
        return sum(_mean(results, banks, method, damping) for banks in others.values()) / len(others)

    return max(DAMPINGS, key=mean)


def _mean(
    results: Mapping[str, Mapping[str, Any]], banks: tuple[str, ...], method: str, damping: float
) -> float:
    found = [results[bank][method][f"{damping:g}"] for bank in banks]
    return sum(-1.0 if e is None else e["mean"] for e in found) / len(found)


def left_out(results: Mapping[str, Mapping[str, Any]], kind: str, method: str) -> list[dict[str, Any]]:
    """For each bank: what the damping chosen on the other data sets gets there, what 0.1 gets, and the best."""
    rows = []
    for name, banks in DATA_SETS[kind].items():
        chosen = choose(results, kind, method, without=name)
        for bank in banks:
            at = {d: results[bank][method][f"{d:g}"] for d in DAMPINGS}
            best = max((d for d in DAMPINGS if at[d] is not None), key=lambda d: at[d]["mean"])
            rows.append(
                {"bank": bank, "chosen": chosen, "best": best}
                | {key: at[d] for key, d in (("got", chosen), ("usual", USUAL), ("most", best))}
            )
    return rows
