"""LDS of TracIn, TRAK, Journey-TRAK, D-TRAK and DAS with and without learned weights (the paper's diffusion table).

    python experiments/diffusion_lds.py cifar2       # and: robots

Three disjoint roles: the training images, 200 generated images that learn the weights, 200 others that evaluate. All
settings are the package's defaults; nothing here is chosen on the images that evaluate. "chosen" are weights with the k
and weight decay that `weights.choose` takes from the images that learn, or none if it expects no gain. "supervised" are
weights from 200 augmented training images (flip, resized crop, colour jitter), each of which should find itself. For
Journey-TRAK their journeys are straight: the image with more and more of the same noise.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from scipy.stats import spearmanr

from experiments.shared.common import percent, save
from experiments.shared.denoising import scheduler, seeds
from experiments.shared.diffusion import METHODS, STUDIES, Attributed
from experiments.shared.diffusion_bank import BOTH, bank
from unde import Weights, learn_weights
from unde.diffusion import augment
from unde.evaluate import compare, lds
from unde.methods import JourneyTRAK, Method
from unde.scores import GroupScores
from unde.tasks.diffusion import sampler_timesteps
from unde.weights import choose

STEPS = 50  # of the sampler


def augmented(study: str, count: int = 200) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Training images changed a little, and which they were."""
    there = STUDIES[study]
    rows = np.sort(np.random.default_rng(seeds("learn", 1)[0]).permutation(there.N)[:count])
    columns = {name: v[torch.from_numpy(rows)] for name, v in there.columns().items()}
    columns["latents"] = there.from_pixels(augment(there.to_pixels(columns["latents"]), seed=0))
    return rows, columns


def straight_journeys(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Images that no sampler made, with what it would have seen of them: one noise each, less at every step."""
    x, t = columns["latents"].unsqueeze(1), torch.tensor(sampler_timesteps(scheduler(), STEPS))
    a = scheduler().alphas_cumprod[t].view(1, -1, 1, 1, 1)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    trajectory = a.sqrt() * x + (1 - a).sqrt() * noise
    return {**columns, "trajectory": trajectory, "timesteps": t.expand(len(x), -1)}


def supervised(there: Attributed, method: Method) -> Weights:
    """Weights with which changed training images find themselves."""
    rows, columns = augmented(there.study)
    if isinstance(method, JourneyTRAK):
        columns = straight_journeys(columns)
    scores = there.scores(method, "augmented", columns)
    return learn_weights(scores, loss="supervised", positives=rows.tolist())


def chosen(scores: GroupScores) -> tuple[dict[str, float], Weights | None]:
    """What the queries that learn say about k and weight decay, and the weights."""
    choice = choose(scores, ks=(5, 50), weight_decays=(0.1, 1.0, 10.0))
    settings = {"k": choice.k, "weight_decay": choice.weight_decay}
    w = learn_weights(scores, **settings) if choice.gain > 1 else None
    return {**settings, "gain": choice.gain}, w


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
    results: dict[str, dict] = {}
    if "eval-50" in utility:
        results["timesteps"] = {"spearman of 10 and 50": fewer_timesteps(utility)}
        print(f"utilities at 10 and 50 timesteps: Spearman {fewer_timesteps(utility):.3f}")
    print("LDS in %, 95 % interval over queries (over queries and subsets)")
    print(f"{'':14}{'w/o w':>22}{'w':>22}{'difference':>22}{'chosen w':>22}{'supervised w':>22}")
    for title, method in METHODS.items():
        evaluate = there.scores(method, "eval")
        learn = there.scores(method, "learn")
        weights = learn_weights(learn)
        found = compare(evaluate, weights, masks, utility["eval"])
        results[title] = {"method": str(method), "weights": weights.values.tolist(), **found.as_dict()}
        if "eval-50" in utility:
            results[title]["some queries"] = timesteps_apart(evaluate.total()[:BOTH], masks, utility)
        taught = compare(evaluate, supervised(there, method), masks, utility["eval"])
        results[title]["supervised"] = taught.as_dict()
        settings, picked = chosen(learn)
        better = (
            found.unweighted if picked is None else compare(evaluate, picked, masks, utility["eval"]).weighted
        )
        results[title]["chosen"] = {**settings, "lds": better.as_dict()}
        cells = [found.unweighted, found.weighted, found.difference, better, taught.weighted]
        print(f"{title:14}" + "".join(f"{percent(e):>22}" for e in cells), flush=True)
    save(f"diffusion_lds_{study}", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    torch.set_num_threads(1)
    main(parser.parse_args().study)
