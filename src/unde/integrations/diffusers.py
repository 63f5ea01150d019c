"""Stable-Diffusion-type pipelines of diffusers: images and prompts as a Setup, LoRA, and queries to ask about.

Images and prompts are encoded once; attribution then sees the denoiser alone. Pipelines without a text encoder (DDPM)
work too: there are no prompts then, and without a VAE the images are what the denoiser sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.diffusion import Samples, sample
from unde.diffusion.sample import GUIDANCE, refuse_shared_seeds
from unde.errors import UndeError, require_positive
from unde.gradients.model_state import frozen_eval
from unde.integrations import require
from unde.setup import Advance, Ask, Setup
from unde.tasks import Diffusion
from unde.tasks.diffusion import decode

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")  # the attention projections
ROWS = 16  # noisy images in the UNet at once; one of 256 × 256 pixels takes about 0.5 GB of activations


def add_lora(unet: Any, rank: int = 128, seed: int = 0) -> list[nn.Parameter]:
    """Freeze the UNet, put LoRA on its attention projections, and return what is to be trained, in float32."""
    require_positive(rank=rank)
    if any("lora_" in name for name, _ in unet.named_parameters()):
        raise UndeError("the UNet has LoRA layers already: load the pipeline anew, or train those it has")
    config = require("peft", "unde[diffusion]").LoraConfig(
        r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(TARGETS)
    )
    unet.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet.add_adapter(config)
    return [p for p in unet.parameters() if p.requires_grad]


def diffusion_setup(
    pipeline: Any,
    images: Any,
    prompts: Sequence[str] | None = None,
    *,
    timesteps: int | Sequence[int] = 50,
    learn_queries: Samples | None = None,
    eval_queries: Samples | None = None,
    journey: bool = False,
    ids: Sequence[Any] | None = None,
    rows: int | None = None,
    seed: int = 0,
) -> Setup:
    """Everything unde needs to know about a fine-tuned pipeline and its training images.

    `images` are (N, 3, H, W), floats in [−1, 1] or uint8, or a sequence of such images or of Pillow's; it is read once.
    The queries come from `sample_pipeline`, with `journey` along their trajectories (for Journey-TRAK). `rows` is how
    many noisy images are in the UNet at once (by default what the `memory` of the index holds), `seed` that of their
    noise.
    """
    unet = _unet(pipeline)
    _check_trainable(unet)
    if learn_queries is not None and eval_queries is not None:
        refuse_shared_seeds(learn_queries.seeds, eval_queries.seeds)
    conditions = {} if prompts is None else _conditions(pipeline, prompts, len(images))
    if prompts is None and _reads_text(pipeline):
        raise UndeError(f"{type(pipeline).__name__} reads prompts: pass one for each image")
    train = {"latents": encode_images(pipeline, images), **conditions}

    learn, evaluate = (
        None if samples is None else query_columns(samples, journey)
        for samples in (learn_queries, eval_queries)
    )
    return Setup(
        unet,
        Diffusion(training_scheduler(pipeline), timesteps, seed=seed, rows=rows),
        train,
        learn_queries=learn,
        eval_queries=evaluate,
        show=lambda example: _picture(pipeline, example),
        ids=ids,
        ask=_ask(pipeline),
    )


def _ask(pipeline: Any) -> Ask:
    """How the live page asks: an image is encoded with its prompt, a prompt is generated first."""
    reads = _reads_text(pipeline)

    def picture(image: Any, prompt: str) -> dict[str, Any]:
        height, width = (_factor(pipeline) * side for side in _latent_sides(pipeline, None))
        resized = image if image.size == (width, height) else image.resize((width, height), resample=1)
        given = _conditions(pipeline, [prompt], 1) if reads else {}
        return {"latents": encode_images(pipeline, [resized], progress=False), **given}

    def generated(prompt: str, seed: int, journey: bool, advance: Advance) -> dict[str, Any]:
        prompts = prompt if reads else None
        samples = sample_pipeline(pipeline, prompts, [seed], progress=False, on_step=advance)
        return query_columns(samples, journey)

    return Ask(picture=picture, prompt=generated, prompted=reads)


def query_columns(samples: Samples, journey: bool = False) -> dict[str, Any]:
    """Samples as data for an index, with their prompts for people to read."""
    text = {} if samples.prompts is None else {"text": samples.prompts}
    return {**samples.queries(journey), **text}


def sample_pipeline(
    pipeline: Any,
    prompts: str | Sequence[str] | None,
    seeds: Sequence[int],
    *,
    steps: int = 50,
    guidance: float = GUIDANCE,
    size: int | None = None,
    batch_size: int = ROWS,
    apart_from: Samples | Sequence[Samples] = (),
    progress: bool = True,
    on_step: Advance | None = None,
) -> Samples:
    """One image for each seed: `steps` of DDIM with classifier-free guidance, none of it up to 1.

    `prompts` is one for each seed, or one for all; None for a pipeline without a text encoder. `size` is the side of
    the image in pixels, by default what the UNet was made for. For the rest see `unde.diffusion.sample`.
    """
    unet, seeds = _unet(pipeline), list(seeds)
    given: dict[str, Tensor] = {}
    unconditional = None
    if isinstance(prompts, str):
        prompts = [prompts] * len(seeds)
    if prompts is not None:
        encoded = _conditions(pipeline, prompts, len(seeds), "seeds")["encoder_hidden_states"]
        given = {"encoder_hidden_states": encoded[:]}
        if guidance > 1:
            unconditional = {"encoder_hidden_states": encode_prompts(pipeline, [""])}
    elif _reads_text(pipeline):
        raise UndeError(f"{type(pipeline).__name__} reads prompts: pass one for each seed, or one for all")
    return sample(
        unet,
        training_scheduler(pipeline),
        (unet.config.in_channels, *_latent_sides(pipeline, size)),
        seeds,
        given=given,
        unconditional=unconditional,
        guidance=guidance,
        prompts=prompts,
        steps=steps,
        batch_size=batch_size,
        apart_from=apart_from,
        progress=progress,
        on_step=on_step,
    )


def training_scheduler(pipeline: Any) -> Any:
    """The noise schedule that the pipeline's denoiser was trained with, as a DDPMScheduler."""
    scheduler = pipeline.scheduler
    if not hasattr(scheduler, "alphas_cumprod"):
        raise UndeError(
            f"{type(scheduler).__name__} has no ᾱ_t (alphas_cumprod): expected a denoising diffusion model, such as "
            "Stable Diffusion 1 or 2; flow matching (Stable Diffusion 3, Flux) is not covered"
        )
    # Latents reach beyond [−1, 1], but clipping is on in DDIM and DDPM where a config does not mention it.
    latent = {"clip_sample": False} if _vae(pipeline) is not None else {}
    return require("diffusers", "unde[diffusion]").DDPMScheduler.from_config(scheduler.config, **latent)


@torch.no_grad()
def encode_prompts(pipeline: Any, prompts: Sequence[str], batch_size: int = 64) -> Tensor:
    """(N, tokens, width) float32 on the CPU: what the text encoder makes of each prompt."""
    if not _reads_text(pipeline):
        raise UndeError(
            f"prompts for {type(pipeline).__name__}, which has no text encoder: an unconditional model has no prompts, "
            "leave them out"
        )
    bad = next((p for p in prompts if not isinstance(p, str)), None)
    if bad is not None:
        raise UndeError(f"a prompt is {type(bad).__name__}: expected strings")
    encoder, parts = pipeline.text_encoder, []
    with frozen_eval(encoder):
        for start in range(0, len(prompts), batch_size):
            batch = list(prompts[start : start + batch_size])
            parts.append(pipeline.encode_prompt(batch, encoder.device, 1, False)[0].float().cpu())
    return torch.cat(parts)


@torch.no_grad()
def encode_images(pipeline: Any, images: Any, batch_size: int = 8, progress: bool = True) -> Tensor:
    """(N, C, h, w) float32 on the CPU: the mean of the VAE's latents, scaled as the denoiser sees them."""
    vae = _vae(pipeline)
    if vae is None:
        return torch.cat(list(_pixels(images, _unet(pipeline).config.in_channels, 1, batch_size)))
    channels, parts = vae.config.in_channels, []
    bar = console.progress("encoding images", len(images), progress, unit="images")
    with frozen_eval(vae), bar as advance:
        for x in _pixels(images, channels, _factor(pipeline), batch_size):
            encoded = vae.encode(x.to(vae.device, vae.dtype)).latent_dist.mean
            parts.append((encoded * vae.config.scaling_factor).float().cpu())
            advance(len(x))
    return torch.cat(parts)


class Repeated:
    """A column of rows that repeat: each different one is held once.

    >>> column = Repeated(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1, 0]))
    >>> len(column), column[1], column[1:].tolist()
    (3, tensor([2.]), [[2.0], [1.0]])
    """

    def __init__(self, different: Tensor, which: Tensor) -> None:
        self.different, self.which = different, which

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: int | slice) -> Tensor:
        return self.different[self.which[i]]


# --- parts of a pipeline ----------------------------------------------------------------------------------


def _conditions(pipeline: Any, prompts: Sequence[str], count: int, of: str = "images") -> dict[str, Any]:
    """Columns: what the prompts are to the denoiser, and as text for people to read."""
    if isinstance(prompts, str) or len(prompts) != count:
        found = "one prompt" if isinstance(prompts, str) else f"{len(prompts)} prompts"
        raise UndeError(f"{found} for {count} {of}: expected a list with one for each")
    different = list(dict.fromkeys(prompts))
    encoded = encode_prompts(pipeline, different)
    number = {prompt: i for i, prompt in enumerate(different)}
    which = torch.tensor([number[prompt] for prompt in prompts])
    return {"encoder_hidden_states": Repeated(encoded, which), "text": list(prompts)}


def _unet(pipeline: Any) -> Any:
    unet = getattr(pipeline, "unet", None)
    if unet is None:
        raise UndeError(
            f"{type(pipeline).__name__} has no UNet: expected a pipeline like StableDiffusionPipeline or DDPMPipeline"
        )
    if unet.dtype not in (torch.float32, torch.float64):
        raise UndeError(
            f"the UNet is in {unet.dtype}, in which small gradients are lost: load the pipeline with "
            "torch_dtype=torch.float32 (its VAE and text encoder may stay in half precision)"
        )
    more = getattr(unet.config, "addition_embed_type", None)
    if more is not None:
        raise UndeError(
            f"the UNet wants more than prompts (addition_embed_type {more!r}, as Stable Diffusion XL): expected one "
            "like that of Stable Diffusion 1 or 2"
        )
    return unet


def _check_trainable(unet: nn.Module) -> None:
    if any(p.requires_grad for p in unet.parameters()):
        return
    lora = any("lora_" in name for name, _ in unet.named_parameters())
    cure = "put LoRA on it with add_lora(pipeline.unet) and fine-tune, or requires_grad_() what was trained"
    if lora:
        cure = "its LoRA is frozen. Call requires_grad_() on the parameters with 'lora_' in their names"
    raise UndeError(f"the UNet has no trainable parameter, so there is no gradient to attribute with: {cure}")


def _vae(pipeline: Any) -> Any:
    return getattr(pipeline, "vae", None)


def _reads_text(pipeline: Any) -> bool:
    return getattr(pipeline, "text_encoder", None) is not None


def _factor(pipeline: Any) -> int:
    """Pixels along the side of one latent."""
    vae = _vae(pipeline)
    return 1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1)


def _latent_sides(pipeline: Any, size: int | None) -> tuple[int, int]:
    factor = _factor(pipeline)
    if size is None:
        own = _unet(pipeline).config.sample_size
        return (own, own) if isinstance(own, int) else tuple(own)
    if size < factor or size % factor:
        raise UndeError(f"images of {size} pixels: expected a multiple of {factor}, as the VAE shrinks them")
    return size // factor, size // factor


def _picture(pipeline: Any, example: dict[str, Any]) -> dict[str, Any]:
    """An example as a page shows it; the image is what the VAE makes of the latents."""
    vae, latents = _vae(pipeline), example["latents"][None]
    if vae is not None:
        with frozen_eval(vae):
            latents = decode(vae, latents)
    return {"image": (latents[0] / 2 + 0.5).clamp(0, 1), "prompt": example.get("text")}


# --- images -----------------------------------------------------------------------------------------------


def _pixels(images: Any, channels: int, multiple: int, batch_size: int) -> Iterator[Tensor]:
    """Batches of (n, channels, H, W) in [−1, 1], read one after the other."""
    if not len(images):
        raise UndeError("there are no images: expected at least one")
    sides: tuple[int, ...] | None = None
    for start in range(0, len(images), batch_size):
        stop = min(start + batch_size, len(images))
        batch = [_image(images[i], channels) for i in range(start, stop)]
        sides = tuple(batch[0].shape) if sides is None else sides
        for i, image in enumerate(batch, start):
            if tuple(image.shape) != sides:
                raise UndeError(
                    f"image {i} is {tuple(image.shape)}, those before it {sides}: bring all to one size"
                )
        x = torch.stack(batch)
        _check_shape(x, channels, multiple)
        floating = x.dtype != torch.uint8
        x = x.float() if floating else x / 127.5 - 1
        low, high = float(x.min()), float(x.max())
        if not (low >= -1 and high <= 1):  # written so that NaN is caught too
            raise UndeError(
                f"images {start} to {stop - 1} reach from {low:.4g} to {high:.4g}: expected [−1, 1], or uint8 from 0 "
                "to 255"
            )
        if start == 0 and low >= 0 and floating:
            raise UndeError(
                f"images {start} to {stop - 1} reach from {low:.4g} to {high:.4g}, without a dark pixel in them: this "
                "looks like [0, 1], expected [−1, 1] (2 * images − 1), or uint8 from 0 to 255"
            )
        yield x


def _image(image: Any, channels: int) -> Tensor:
    if hasattr(image, "convert"):  # Pillow's
        array = np.array(image.convert("L" if channels == 1 else "RGB"))
        return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)
    if not isinstance(image, (Tensor, np.ndarray)):
        raise UndeError(f"an image is {type(image).__name__}: expected a tensor, an array or one of Pillow's")
    return torch.as_tensor(image)


def _check_shape(x: Tensor, channels: int, multiple: int) -> None:
    fits = x.dim() == 4 and x.shape[1] == channels and not any(n % multiple for n in x.shape[2:])
    if not fits or not (x.dtype == torch.uint8 or x.is_floating_point()):
        sides = f", sides multiples of {multiple}" if multiple > 1 else ""
        raise UndeError(
            f"images of {x.dtype} and shape (N, {', '.join(map(str, x.shape[1:]))}): expected floats in [−1, 1] or "
            f"uint8, of shape (N, {channels}, H, W){sides}"
        )
