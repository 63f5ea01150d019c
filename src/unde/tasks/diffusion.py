"""Denoising diffusion: losses and measurements at evenly spaced timesteps, with noise that belongs to the example.

For an image x, a timestep t and noise ε, the model sees x_t = √ᾱ_t x + √(1 − ᾱ_t) ε. Its prediction is compared with
ε (or with v = √ᾱ_t ε − √(1 − ᾱ_t) x); all measures are means over the K timesteps:

    loss      mean (ε_θ(x_t, t) − ε)²     the simple loss (of v where the model predicts v)
    square    mean ε_θ(x_t, t)²           D-TRAK
    mean      mean ε_θ(x_t, t)            DAS
    residual  mean (ε_θ(x_t, t) − ε)²     r of DAS

ε_θ is what the prediction says about the noise, whatever the model predicts: √ᾱ_t v̂ + √(1 − ᾱ_t) x_t for a v̂, so that
ε_θ − ε = √ᾱ_t (v̂ − v).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde.errors import UndeError, unknown
from unde.tasks.base import Task
from unde.tasks.perturb import Augment, InputNoise, Perturbation
from unde.tasks.timesteps import (
    PREPARED,
    TimestepBatching,
    config_value,
    sampler_timesteps,
    training_timesteps,
)

MEASURES = ("loss", "square", "mean", "residual")


class Diffusion(Task):
    """For denoisers of diffusers (UNet2DModel, UNet2DConditionModel, DiT-like transformers) or alike.

    Batches are images (B, C, H, W) in [−1, 1], or a dict with "images" (or "latents", which no VAE encodes again) and
    what the model is conditioned on: "prompts" as token ids for `text_encoder`, or arguments of the model itself,
    such as "encoder_hidden_states" or "class_labels".

    `scheduler` is the diffusers scheduler the model was trained with; `timesteps` is K, or the timesteps. The noise of
    an example is drawn from (seed, its content, t), so that a feature depends on no other example and no position.
    `vae` and `text_encoder` are not attributed and run without gradients; of the VAE's distribution the mean is taken.
    `rows` is how many noisy images one pass holds: of several timesteps of several examples. By default it is
    what fits into the memory budget of an index, and no more than is useful.
    """

    version = 2  # 2: the residual is that of ε where the model predicts v

    def __init__(
        self,
        scheduler: Any,
        timesteps: int | Sequence[int] = 10,
        *,
        seed: int = 0,
        vae: nn.Module | None = None,
        text_encoder: nn.Module | None = None,
        rows: int | None = None,
    ) -> None:
        self.scheduler, self.seed = scheduler, seed
        self.timesteps = training_timesteps(scheduler, timesteps)
        self.prediction = config_value(scheduler, "prediction_type", "epsilon")
        if self.prediction not in ("epsilon", "v_prediction"):
            raise unknown("prediction_type of the scheduler", self.prediction, ("epsilon", "v_prediction"))
        self.alphas = torch.as_tensor(scheduler.alphas_cumprod, dtype=torch.float64)  # ᾱ
        self.inputs = DenoiserInputs(vae, text_encoder)
        self.batching = TimestepBatching(self, rows)

    # --- measures ---------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.measure(model, batch)

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        return self.measures(model, batch, [name], ids)[name]

    def measures(
        self, model: nn.Module, batch: Any, names: Sequence[str], ids: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Several measures from one forward pass."""
        for name in names:
            if name not in MEASURES:
                raise unknown("measure of Diffusion", name, MEASURES)
        if not (isinstance(batch, Mapping) and PREPARED in batch):
            parts = [self.measures(model, part, names, ids) for part in self.batching.passes(batch, ids)]
            return {name: torch.stack([p[name] for p in parts]).sum(0) for name in names}
        noisy, t = batch[PREPARED], batch["t"]  # (B, k, C, H, W), (B, k)
        out = self._predict(model, batch, noisy.flatten(0, 1), t.flatten()).view_as(noisy)
        error = out - batch["target"]
        predicted, residual = out, error  # ε̂, ε̂ − ε
        if self.prediction == "v_prediction":
            signal, spread = self.scales(t, noisy)
            predicted, residual = signal * out + spread * noisy, signal * error
        share = t.shape[1] / batch["of"]  # of this pass in the mean over all timesteps
        values = {
            "loss": error.square,
            "square": predicted.square,
            "mean": lambda: predicted,
            "residual": residual.square,
        }
        return {name: share * values[name]().flatten(1).mean(1) for name in names}

    def _predict(self, model: nn.Module, batch: Mapping[str, Any], x: Tensor, t: Tensor) -> Tensor:
        k, channels = batch["t"].shape[1], config_value(model, "in_channels")
        if isinstance(channels, int) and channels != x.shape[1]:
            raise UndeError(
                f"images or latents of shape {tuple(x.shape[1:])} for a model of {channels} channels: pass images "
                "with a vae=, or latents as the model was trained on"
            )
        condition = {name: v.repeat_interleave(k, 0) for name, v in batch["condition"].items()}
        try:
            out = prediction(model(x, t, **condition), x.shape[1])
        except TypeError as e:
            raise UndeError(
                f"{type(model).__name__} does not take {', '.join(condition) or 'images and timesteps alone'} ({e}): "
                "an unconditional model has no prompts, a conditional one needs encoder_hidden_states or prompts"
            ) from e
        if out.shape != x.shape:
            raise UndeError(
                f"the model gave {tuple(out.shape)} for images of {tuple(x.shape)}: expected the same shape"
            )
        return out

    def identity(self) -> dict[str, Any]:
        """Of the scheduler count ᾱ, the prediction and where a sampler makes its steps."""
        identity = super().identity()
        defaults = {"timestep_spacing": "leading", "steps_offset": 0}
        identity["settings"]["scheduler"] = {
            k: config_value(self.scheduler, k, v) for k, v in defaults.items()
        }
        return identity

    # --- noise ------------------------------------------------------------------------------------------

    def scales(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """√ᾱ_t and √(1 − ᾱ_t), shaped to multiply images (B, k, C, H, W)."""
        a = self.alphas.to(like.dtype).to(t.device, non_blocking=True)[t]
        a = a.view(*t.shape, *[1] * (like.dim() - t.dim()))
        return a.sqrt(), (1 - a).sqrt()

    def target(self, clean: Tensor, noise: Tensor, signal: Tensor, spread: Tensor) -> Tensor:
        """What the model is to predict, (B, k, C, H, W): ε, or v where it predicts v."""
        return noise if self.prediction == "epsilon" else signal * noise - spread * clean.unsqueeze(1)

    def noise(self, key: str, timesteps: Sequence[int], shape: Sequence[int]) -> Tensor:
        """(k, *shape) standard normal, of one example: the same on every machine."""
        noise = []
        for t in timesteps:
            words = hashlib.blake2b(f"{self.seed} {key} {t}".encode(), digest_size=16).digest()
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(words, "little")))
            noise.append(generator.standard_normal(tuple(shape), dtype=np.float32))
        return torch.from_numpy(np.stack(noise))

    # --- queries ----------------------------------------------------------------------------------------

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Flipped, cropped and recoloured images, through the VAE where there is one; and images with noise."""
        vae = self.inputs.vae
        coders = () if vae is None else (partial(decode, vae), partial(encode, vae))
        return [Augment(*coders), InputNoise()]

    def journey(self, example: Any, steps: int, random: np.random.Generator) -> dict[str, Any]:
        """An image with the trajectory that a sampler of `steps` would have seen: less of one noise at every step."""
        clean, condition = self.inputs(self.collate([example]))
        t = torch.tensor(sampler_timesteps(self.scheduler, steps)).unsqueeze(0)
        noise = torch.from_numpy(random.standard_normal(tuple(clean.shape), dtype=np.float32)).to(clean)
        signal, spread = self.scales(t.to(clean.device), clean.unsqueeze(1))
        trajectory = signal * clean.unsqueeze(1) + spread * noise.unsqueeze(1)
        columns = {"latents": clean, **condition, "trajectory": trajectory, "timesteps": t}
        return {k: v[0] for k, v in columns.items()}


def prediction(out: Any, channels: int) -> Tensor:
    """What a denoiser predicts, from what it returns; without the variance that DiT predicts too."""
    out = getattr(out, "sample", out)
    out = out[0] if isinstance(out, tuple) else out
    return out[:, :channels] if out.shape[1] == 2 * channels else out


class DenoiserInputs:
    """`clean, condition = inputs(batch)`: images (through a VAE) or latents, and the condition."""

    def __init__(self, vae: nn.Module | None, text_encoder: nn.Module | None) -> None:
        self.vae, self.text_encoder = vae, text_encoder

    @torch.no_grad()
    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            batch = batch[0]
        rest: dict[str, Any] = {"images": batch} if isinstance(batch, Tensor) else dict(batch)
        clean = self._clean(rest)
        prompts = rest.pop("prompts", None)
        if prompts is not None and self.text_encoder is None:
            raise UndeError(
                "the batch has 'prompts' (token ids), but the task has no text_encoder to read them: pass "
                "Diffusion(..., text_encoder=), or 'encoder_hidden_states' in the batch"
            )
        elif prompts is not None and self.text_encoder is not None:
            rest["encoder_hidden_states"] = self.text_encoder.to(prompts.device)(prompts)[0]
        return clean, {k: v for k, v in rest.items() if isinstance(v, Tensor)}

    def _clean(self, rest: dict[str, Any]) -> Tensor:
        """Takes images and latents out of a batch."""
        clean, images = rest.pop("latents", None), rest.pop("images", None)
        if clean is None:
            if images is None:
                raise UndeError(f"a diffusion batch has 'images' or 'latents': this one has {sorted(rest)}")
            clean = images if self.vae is None else encode(self.vae, images)
        if not isinstance(clean, Tensor) or not clean.is_floating_point() or clean.dim() < 3:
            kind, shape = getattr(clean, "dtype", type(clean).__name__), tuple(getattr(clean, "shape", ()))
            raise UndeError(
                f"images are {kind} of shape {shape}: expected floating point (B, C, H, W), in [−1, 1]"
            )
        return clean


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """Latents of images: the mean of the VAE's distribution."""
    distribution = vae.to(images.device).encode(images.to(next(vae.parameters()).dtype)).latent_dist
    return (distribution.mean * vae.config.scaling_factor).to(images.dtype)


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> Tensor:
    """Images in [−1, 1] from latents."""
    home = next(vae.parameters())
    return vae.decode(latents.to(home) / vae.config.scaling_factor).sample.to(latents).clamp(-1, 1)
