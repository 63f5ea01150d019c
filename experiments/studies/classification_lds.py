"""LDS of TracIn and TRAK with and without learned weights (the paper's Table 1, on MNIST digits).

    python experiments/classification_bank.py resnet && python experiments/classification_bank.py vit
    python experiments/classification_lds.py

Three disjoint roles: 4,000 digits train the models, 500 learn the weights, 500 evaluate. All settings are the
package's defaults; nothing here is chosen on the evaluation digits.
"""

from __future__ import annotations

from experiments.shared.classification_bank import bank
from experiments.shared.common import ARCHITECTURES, METHODS, attributed, save
from unde import learn_weights
from unde.evaluate import compare

SOLVERS = ("fixed-point", "adamw")


def main() -> None:
    results: dict[str, dict] = {}
    print(
        f"{'':24}{'w/o w':>16}{'w':>16}{'difference':>16}   (LDS in %, 95 % CI over queries; total CI in the file)"
    )
    for architecture in ARCHITECTURES:
        index, data = attributed(architecture)
        retrained = bank(architecture)
        learn, evaluate = index.features(data.learn), index.features(data.evaluate)
        for name, method in METHODS.items():
            for solver in SOLVERS:
                weights = learn_weights(index.score(learn, method), solver=solver)
                found = compare(
                    index.score(evaluate, method), weights, retrained.masks, retrained.utility["eval"]
                )
                key = f"{architecture} {name} {solver}"
                results[key] = {"method": str(method), "weights": weights.values.tolist(), **found.as_dict()}
                three = (found.unweighted, found.weighted, found.difference)
                print(
                    f"{key:24}" + "".join(f"{100 * e.mean:>9.2f} ± {100 * e.ci95:4.2f}" for e in three),
                    flush=True,
                )
    save("classification_lds", results)


if __name__ == "__main__":
    main()
