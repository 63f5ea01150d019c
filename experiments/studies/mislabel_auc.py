"""Finding wrong labels by normalised self-influence (the paper's mislabel table, on MNIST digits).

    python experiments/mislabel_auc.py

10 % of the 4,000 training labels are wrong. Self-influence of each digit is divided by the sum of its top-10
(ResNet) or top-100 (ViT) scores, as in the paper; weights are learned on 500 other digits.
"""

from __future__ import annotations

from experiments.shared.common import ARCHITECTURES, METHODS, attributed, save
from unde import learn_weights
from unde.demo.digits import CORRUPTED
from unde.evaluate import mislabel_auc, mislabel_auc_interval

TOP = {"resnet": 10, "vit": 100}


def main() -> None:
    results: dict[str, dict] = {}
    print(f"{'':20}{'w/o w':>10}{'w':>10}   (AUC in %, 95 % interval by DeLong; raw: not normalised)")
    for architecture in ARCHITECTURES:
        index, data = attributed(architecture, CORRUPTED)
        learn = index.features(data.learn)
        for name, method in METHODS.items():
            weights = learn_weights(index.score(learn, method))
            row: dict[str, object] = {"weights": weights.values.tolist(), "top": TOP[architecture]}
            line = f"{architecture} {name:12}"
            for kind, w in (("unweighted", None), ("weighted", weights)):
                for scale, top in (("normalised", TOP[architecture]), ("raw", None)):
                    influence = index.self_influence(w, normalize_top=top, method=method)
                    auc = mislabel_auc(influence, data.mislabelled)
                    low, high = mislabel_auc_interval(influence, data.mislabelled)
                    row[f"{kind} {scale}"] = {"auc": auc, "interval95": [low, high]}
                    line += f"  {kind} {scale} {100 * auc:.2f} [{100 * low:.2f}, {100 * high:.2f}]"
            results[f"{architecture} {name}"] = row
            print(line, flush=True)
    save("mislabel_auc", results)


if __name__ == "__main__":
    main()
