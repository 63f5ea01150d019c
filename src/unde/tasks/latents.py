"""What a denoiser sees of a batch: images through a VAE, prompts through a text encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError


class Inputs:
    """`clean, given = inputs(batch)`: images or latents, and what the denoiser is conditioned on."""

    def __init__(self, vae: nn.Module | None, text_encoder: nn.Module | None) -> None:
        self.vae, self.text_encoder = vae, text_encoder

    @torch.no_grad()
    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            batch = batch[0]
        rest: dict[str, Any] = {"images": batch} if isinstance(batch, Tensor) else dict(batch)
        clean = self._clean(rest)
        prompts = rest.pop("prompts", None)
        if prompts is not None:
            rest["encoder_hidden_states"] = self._read(prompts)
        return clean, {k: v for k, v in rest.items() if isinstance(v, Tensor)}

    def _clean(self, rest: dict[str, Any]) -> Tensor:
        """Takes images and latents out of a batch."""
        clean, images = rest.pop("latents", None), rest.pop("images", None)
        if clean is None:
            if images is None:
                raise UndeError(f"a diffusion batch has 'images' or 'latents': this one has {sorted(rest)}")
            clean = images if self.vae is None else encoded(self.vae, images)
        if not isinstance(clean, Tensor) or not clean.is_floating_point() or clean.dim() < 3:
            known = isinstance(clean, Tensor)
            found = f"{clean.dtype} of shape {tuple(clean.shape)}" if known else type(clean).__name__
            raise UndeError(f"images are {found}: expected floating point (B, C, H, W), in [−1, 1]")
        return clean

    def _read(self, prompts: Tensor) -> Tensor:
        if self.text_encoder is None:
            raise UndeError(
                "the batch has 'prompts' (token ids), but the task has no text_encoder to read them: pass "
                "Diffusion(..., text_encoder=), or 'encoder_hidden_states' in the batch"
            )
        return self.text_encoder.to(prompts.device)(prompts)[0]


@torch.no_grad()
def encoded(vae: Any, images: Tensor) -> Tensor:
    """Latents of images: the mean of the VAE's distribution."""
    distribution = vae.to(images.device).encode(images.to(next(vae.parameters()).dtype)).latent_dist
    return (distribution.mean * vae.config.scaling_factor).to(images.dtype)


@torch.no_grad()
def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Images in [−1, 1] from latents."""
    home = next(vae.parameters())
    return vae.decode(latents.to(home) / vae.config.scaling_factor).sample.to(latents).clamp(-1, 1)
