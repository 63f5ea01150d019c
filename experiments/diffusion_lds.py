"""LDS of TracIn, TRAK, Journey-TRAK, D-TRAK and DAS with and without learned weights (the paper's diffusion table).

    python experiments/diffusion_lds.py cifar2       # and: robots

Three disjoint roles: the training images, 200 generated images that learn the weights, 200 others that evaluate. All
settings are the package's defaults; nothing here is chosen on the images that evaluate. "supervised" are weights from
200 augmented training images (flip, resized crop, colour jitter), each of which should find itself.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from scipy.stats import spearmanr

from common import percent, save
from denoising import seeds
from diffusion import METHODS, STUDIES, Attributed
from diffusion_bank import BOTH, bank
from whence import learn_weights
from whence.diffusion import augment
from whence.evaluate import compare, lds


def augmented(study: str, count: int = 200) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Training images changed a little, and which they were."""
    there = STUDIES[study]
    rows = np.sort(np.random.default_rng(seeds("learn", 1)[0]).permutation(there.N)[:count])
    columns = {name: v[torch.from_numpy(rows)] for name, v in there.columns().items()}
    columns["latents"] = there.from_pixels(augment(there.to_pixels(columns["latents"]), seed=0))
    return rows, columns


def fewer_timesteps(utility: dict[str, np.ndarray]) -> float:
    """Mean over queries of the Spearman correlation, over models, of utilities at 10 and at 50 timesteps."""
    few, many = utility["eval"][:, :BOTH], utility["eval-50"]
    return float(np.mean([spearmanr(few[:, q], many[:, q])[0] for q in range(BOTH)]))


def timesteps_apart(total: torch.Tensor, masks: np.ndarray, utility: dict[str, np.ndarray]) -> dict:
    """LDS of the same queries, judged at few and at many timesteps."""
    few = lds(total, masks, utility["eval"][:, :BOTH])
    return {"10 timesteps": few.as_dict(), "50 timesteps": lds(total, masks, utility["eval-50"]).as_dict()}


def main(study: str) -> None:
    there, retrained = Attributed(study), bank(study)
    masks, utility = retrained.masks, retrained.utility
    results: dict[str, dict] = {"timesteps": {"spearman of 10 and 50": fewer_timesteps(utility)}}
    print(f"utilities at 10 and 50 timesteps: Spearman {fewer_timesteps(utility):.3f}")
    print("LDS in %, 95 % interval over queries (over queries and subsets)")
    print(f"{'':14}{'w/o w':>22}{'w':>22}{'difference':>22}{'supervised w':>22}")
    rows, columns = augmented(study)
    for title, method in METHODS.items():
        evaluate = there.scores(method, "eval")
        weights = learn_weights(there.scores(method, "learn"))
        found = compare(evaluate, weights, masks, utility["eval"])
        results[title] = {"method": str(method), "weights": weights.values.tolist(), **found.as_dict()}
        results[title]["some queries"] = timesteps_apart(evaluate.total()[:BOTH], masks, utility)
        cells = [found.unweighted, found.weighted, found.difference]
        if title != "Journey-TRAK":  # a training image has no journey
            scores = there.scores(method, "augmented", columns)
            taught = learn_weights(scores, loss="supervised", positives=rows.tolist())
            supervised = compare(evaluate, taught, masks, utility["eval"])
            results[title]["supervised"] = supervised.as_dict()
            cells.append(supervised.weighted)
        print(f"{title:14}" + "".join(f"{percent(e):>22}" for e in cells), flush=True)
    save(f"diffusion_lds_{study}", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    torch.set_num_threads(1)
    main(parser.parse_args().study)
