"""What weights depend on, on diffusion models: the figures and tables of the paper's section 3.2 and appendix C.

LDS of each block of the UNet alone; LDS with weights learned by other losses, with other k, from noisy scores, and for
other methods; and how alike the weights of the methods are. All columns but the default are there to be looked at, not
to choose from. The studies group_strength, sensitivity_k, noise_sensitivity, loss_ablation and transfer_methods measure
the same on every bank, with intervals and on finer grids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from experiments.shared.augmented import supervised
from experiments.shared.banks import open_or_ask as bank
from experiments.shared.diffusion import METHODS, Attributed
from unde import Weights, learn_weights
from unde.evaluate import lds, lds_strength, pattern_similarity
from unde.unet import block

PAPER = "Figure 1, Tables 9, 10 and 12, Figures 6b and 7"
VARIANTS = ("cifar2", "robots")
BANKS = {"cifar2": ("cifar2",), "robots": ("robots",)}

LOSSES = ("top-k", "supervised", "bottom-k", "top-k-bottom-k", "no-norm")
KS = (1, 10, 50)  # beside the default
NOISE = (1.0, 10.0)


def run(variant: str | None) -> dict[str, Any]:
    assert variant is not None
    torch.set_num_threads(1)
    there, retrained = Attributed(variant), bank(variant)
    masks, utility = retrained.masks, retrained.utility["eval"]
    learned: dict[str, Weights] = {}
    results: dict[str, Any] = {title: {} for title in METHODS}

    asked = {title: there.scores(method, "eval") for title, method in METHODS.items()}

    def measured(title: str, weights: Weights | None) -> float:
        return 100 * lds(asked[title].total(weights), masks, utility).mean

    for title, method in METHODS.items():
        scores = there.scores(method, "learn")
        learned[title] = learn_weights(scores)
        row = results[title]
        row["none"] = measured(title, None)
        for loss in LOSSES:
            if loss == "supervised":
                w = supervised(
                    variant, method, lambda columns, m=method: there.scores(m, "augmented", columns)
                )
            else:
                w = learn_weights(scores, loss=loss)
            row[loss] = measured(title, w)
        row["k"] = {k: measured(title, learn_weights(scores, k=k)) for k in KS}
        row["noise"] = {s: measured(title, learn_weights(scores, noise=s)) for s in NOISE}
        print(f"{title:14}" + "  ".join(f"{n} {v:.2f}" for n, v in row.items() if isinstance(v, float)))
        print(" " * 14 + "  ".join(f"k={k} {v:.2f}" for k, v in row["k"].items()))
        print(" " * 14 + "  ".join(f"noise {s:g} {v:.2f}" for s, v in row["noise"].items()), flush=True)
    for title in METHODS:
        results[title]["weights of"] = {other: measured(title, w) for other, w in learned.items()}
        shown = "  ".join(f"{other} {v:.2f}" for other, v in results[title]["weights of"].items())
        print(f"{title:14}with weights of {shown}", flush=True)
    results["strength"] = strength(there, masks, utility)
    alike = pattern_similarity({title: w.values for title, w in learned.items()})
    results["similarity of weights"] = alike.as_dict()
    apart = alike.values[~np.eye(len(alike.rows), dtype=bool)]
    print(f"cosine similarity of the weights of two methods, on average: {apart.mean():.2f}")
    return results


def strength(there: Attributed, masks: np.ndarray, utility: np.ndarray) -> dict[str, Any]:
    """LDS of D-TRAK from single groups, and from blocks × components."""
    scores = there.scores(METHODS["D-TRAK"], "eval")
    alone = lds_strength(scores, masks, utility, cells=None)
    blocks = lds_strength(scores, masks, utility, cells=lambda name: (block(name), "all"))
    for name, value in zip(blocks.rows, blocks.values[:, 0]):
        print(f"D-TRAK, {name:20}alone: LDS {100 * value:.2f} %")
    return {"groups": alone.as_dict(), "blocks": blocks.as_dict()}
