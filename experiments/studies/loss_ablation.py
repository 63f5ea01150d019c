"""Other losses to learn weights by: bottom-k, top-k minus bottom-k, no norm, supervised.

"supervised", for diffusion models only, learns from augmented training images, each of which should find itself, as in
the paper.
"""

from __future__ import annotations

import numpy as np
import torch

from experiments.shared.augment import augment
from experiments.shared.denoising import scheduler, seeds
from experiments.shared.diffusion_bank import STUDIES
from experiments.shared.sweep import EVERY_BANK, Cell, Weights
from unde import learn_weights
from unde.methods import JourneyTRAK, Method
from unde.tasks.timesteps import sampler_timesteps

PAPER = "Table 10"
VARIANTS = EVERY_BANK
LOSSES = ("top-k", "bottom-k", "top-k-bottom-k", "no-norm")
STEPS = 50  # of the sampler
COUNT = 200  # images


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    scores = cell.learn_scores(title)
    weights = {loss: learn_weights(scores, objective=loss) for loss in LOSSES}
    if cell.domain == "diffusion" and cell.name in STUDIES:
        weights["supervised"] = supervised(cell, cell.methods[title])
    return weights


def augmented(study: str) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Training images changed a little, and which they were."""
    there = STUDIES[study]
    rows = np.sort(np.random.default_rng(seeds("learn", 1)[0]).permutation(there.N)[:COUNT])
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


def supervised(cell: Cell, method: Method) -> Weights:
    """Weights with which changed training images find themselves."""
    rows, columns = augmented(cell.name)
    if isinstance(method, JourneyTRAK):
        columns = straight_journeys(columns)
    index = cell.index_for(method)
    scores = index.score(index.features(columns), method)
    return learn_weights(scores, objective="supervised", positives=rows.tolist())
