"""Which solver, k and weight decay to ship as defaults, measured on weight-learning digits only.

    python experiments/choose_defaults.py resnet        # and: vit

The 500 weight-learning digits are cut in two halves: weights are learned on one, their LDS is measured on the
other, both ways round. The evaluation digits are not touched.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from experiments.shared.classification_bank import bank
from experiments.shared.common import ARCHITECTURES, attributed, save
from unde import Weights, learn_weights
from unde.evaluate import Bank, lds
from unde.methods import TRAK, TracIn

KS = (1, 3, 5, 10, 20)
DECAYS = {"fixed-point": (0.0, 0.03, 0.1, 0.3, 1.0), "adamw": (0.0, 0.5)}
BASES = {"TracIn": TracIn(), "TRAK": TRAK()}


def held_out(weights: list[Weights | None], pairs: list, retrained: Bank) -> float:
    """LDS in % on the halves that the weights were not learned on."""
    utility = retrained.utility["learn"]
    found = [
        lds(s.total(w), retrained.masks, utility[:, where]).mean for w, (_, s, where) in zip(weights, pairs)
    ]
    return 100 * float(np.mean(found))


def main(architecture: str) -> None:
    results: dict[str, dict] = {}
    index, data = attributed(architecture)
    retrained = bank(architecture)
    x, y = data.learn
    cut = len(y) // 2
    halves = [(slice(0, cut), slice(cut, None)), (slice(cut, None), slice(0, cut))]
    features = [(index.features((x[a], y[a])), index.features((x[b], y[b])), b) for a, b in halves]
    for name, method in BASES.items():
        pairs = [(index.score(f[0], method), index.score(f[1], method), f[2]) for f in features]

        base = held_out([None, None], pairs, retrained)
        results[f"{architecture} {name}"] = {"unweighted": base}
        print(f"{architecture} {name}: unweighted {base:.2f}", flush=True)
        for solver, k in product(DECAYS, KS):
            if solver == "adamw" and k not in (3, 10):
                continue
            row = {
                decay: held_out(
                    [learn_weights(a, k=k, weight_decay=decay, solver=solver) for a, _, _ in pairs],
                    pairs,
                    retrained,
                )
                for decay in DECAYS[solver]
            }
            results[f"{architecture} {name}"][f"{solver} k={k}"] = row
            cells = "  ".join(f"λ′={d:g}: {v:.2f}" for d, v in row.items())
            print(f"  {solver:12} k={k:<4} {cells}", flush=True)
    save(f"choose_defaults_{architecture}", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architecture", choices=ARCHITECTURES)
    main(parser.parse_args().architecture)
