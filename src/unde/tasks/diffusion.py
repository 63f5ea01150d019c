"""Denoising diffusion: losses and measurements at evenly spaced timesteps, with noise that belongs to the example.

For an image x, a timestep t and noise ε, the model sees x_t = √ᾱ_t x + √(1 − ᾱ_t) ε. Its prediction is compared with
ε (or with v = √ᾱ_t ε − √(1 − ᾱ_t) x); all measures are means over the K timesteps:

    loss      mean (ε_θ(x_t, t) − ε)²     the simple loss (of v where the model predicts v)
    square    mean ε_θ(x_t, t)²           D-TRAK
    mean      mean ε_θ(x_t, t)            DAS
    residual  as loss                     r of DAS
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from unde.data import digest
from unde.errors import UndeError, unknown
from unde.tasks.base import Task
from unde.tasks.perturb import Augment, Noise, Perturbation

MEASURES = ("loss", "square", "mean", "residual")
ROWS = 80  # noisy images worth having in one forward pass: on CPUs more are slower
_PREPARED = "noisy"  # marks a batch that `passes` made


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
        self.timesteps = _settled(timesteps, scheduler)
        self.prediction = _config(scheduler, "prediction_type", "epsilon")
        if self.prediction not in ("epsilon", "v_prediction"):
            raise unknown("prediction_type of the scheduler", self.prediction, ("epsilon", "v_prediction"))
        if rows is not None and rows < 1:
            raise UndeError(
                f"rows={rows}: expected at least one noisy image in a pass, or None for what fits"
            )
        self.alphas = torch.as_tensor(scheduler.alphas_cumprod, dtype=torch.float64)  # ᾱ
        self.settings = (
            f"timesteps={self.timesteps} alphas={_short(self.alphas)}"  # part of the index's identity
        )
        self.only: int | None = None  # the one step of trajectories that is looked at
        self.steps: int | None = None  # how many they have
        self._aside: dict[str, Any] = {
            "vae": vae,
            "text_encoder": text_encoder,
            "rows": rows,
            "most": rows,
            "brief": False,
        }  # not its identity

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
        if not (isinstance(batch, Mapping) and _PREPARED in batch):
            parts = [self.measures(model, part, names, ids) for part in self.passes(batch, ids)]
            return {name: torch.stack([p[name] for p in parts]).sum(0) for name in names}
        noisy, t = batch["noisy"], batch["t"]  # (B, k, C, H, W), (B, k)
        out = self._predict(model, batch, noisy.flatten(0, 1), t.flatten()).view_as(noisy)
        predicted = self._as_noise(out, noisy, t)
        share = t.shape[1] / batch["of"]  # of this pass in the mean over all timesteps
        values = {
            "loss": lambda: (out - batch["target"]).square(),
            "residual": lambda: (out - batch["target"]).square(),
            "square": predicted.square,
            "mean": lambda: predicted,
        }
        return {name: share * values[name]().flatten(1).mean(1) for name in names}

    def _predict(self, model: nn.Module, batch: Mapping[str, Any], x: Tensor, t: Tensor) -> Tensor:
        k, channels = batch["t"].shape[1], _config(model, "in_channels")
        if isinstance(channels, int) and channels != x.shape[1]:
            raise UndeError(
                f"images or latents of shape {tuple(x.shape[1:])} for a model of {channels} channels: pass images "
                "with a vae=, or latents as the model was trained on"
            )
        given = {name: v.repeat_interleave(k, 0) for name, v in batch["given"].items()}
        try:
            out = model(x, t, **given)
        except TypeError as e:
            raise UndeError(
                f"{type(model).__name__} does not take {', '.join(given) or 'images and timesteps alone'} ({e}): an "
                "unconditional model has no prompts, a conditional one needs encoder_hidden_states or prompts"
            ) from e
        out = prediction(out, x.shape[1])
        if out.shape != x.shape:
            raise UndeError(
                f"the model gave {tuple(out.shape)} for images of {tuple(x.shape)}: expected the shape of the images"
            )
        return out

    def _as_noise(self, out: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        """ε̂, also where the model predicts v."""
        if self.prediction == "epsilon":
            return out
        signal, noise = self._scales(t, noisy)
        return signal * out + noise * noisy

    def _scales(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """√ᾱ_t and √(1 − ᾱ_t), shaped to multiply images (B, k, C, H, W)."""
        a = self.alphas.to(t.device)[t].to(like.dtype)
        a = a.view(*t.shape, *[1] * (like.dim() - t.dim()))
        return a.sqrt(), (1 - a).sqrt()

    # --- passes -----------------------------------------------------------------------------------------

    def passes(self, batch: Any, ids: Sequence[int] | None) -> Iterator[Any]:
        """As many timesteps in one forward pass as `rows` noisy images hold."""
        clean, given = self._split(batch)
        if "trajectory" in given:
            yield from self._along(clean, given)
            return
        keys = [_key(image) for image in clean.cpu()]
        for cut in evenly(len(self.timesteps), self.rows // len(clean)):
            yield self.prepared(clean, given, keys, self.timesteps[cut])

    def portions(self, batch: Any) -> Iterator[tuple[slice, Any]]:
        clean, given = self._split(batch)
        for cut in evenly(len(clean), self._aside["most"] or len(clean)):
            yield cut, {"latents": clean[cut], **{name: v[cut] for name, v in given.items()}}

    @property
    def rows(self) -> int:
        """Noisy images in one pass, if there are as many examples or fewer."""
        return self._aside["rows"] or ROWS

    def within(self, memory: int, example: Any, peak: Callable[[Any, int], int]) -> Diffusion:
        """As many rows as fit: a pass of one row and a pass of two tell what a row takes."""
        if self._aside["rows"] is not None:
            return self
        clean, given = self._split(example)
        columns = {"latents": clean, **given}

        def taken(rows: int) -> int:
            copies = {name: v.expand(rows, *v.shape[1:]) for name, v in columns.items()}
            return peak(next(self._by(rows).passes(copies, None)), rows)

        one, two = taken(1), taken(2)
        return self._by(1 + max(0, memory - one) // max(1, two - one))

    def _by(self, most: int) -> Diffusion:
        """With at most so many rows, and not many more than are useful."""
        sized = copy.copy(self)
        sized._aside = {**self._aside, "rows": min(ROWS, most), "most": most}
        return sized

    def _along(self, clean: Tensor, given: dict[str, Tensor]) -> Iterator[Any]:
        """The passes along trajectories: x_t as the sampler saw it, and the noise in it beside the final image."""
        noisy = given.pop("trajectory")
        t = self._checked(clean, noisy, given.pop("timesteps", None))
        if self.only is not None:
            noisy, t = noisy[:, self.only : self.only + 1], t[:, self.only : self.only + 1]
        elif self._aside["brief"]:
            noisy, t = noisy[:, _two(t.shape[1])], t[:, _two(t.shape[1])]
        signal, spread = self._scales(t, noisy)
        x = clean.unsqueeze(1)
        noise = (noisy - signal * x) / spread
        target = noise if self.prediction == "epsilon" else signal * noise - spread * x
        for cut in evenly(t.shape[1], self.rows // len(clean)):
            part = {"noisy": noisy[:, cut], "target": target[:, cut], "t": t[:, cut]}
            yield part | {"given": given, "of": t.shape[1]}

    def _checked(self, clean: Tensor, noisy: Tensor, t: Tensor | None) -> Tensor:
        """The timesteps of a trajectory, if they are those of the sampler."""
        if t is None or t.shape != noisy.shape[:2] or noisy.shape[2:] != clean.shape[1:]:
            times = None if t is None else tuple(t.shape)
            raise UndeError(
                f"a trajectory of shape {tuple(noisy.shape)} with timesteps {times} for images of "
                f"{tuple(clean.shape)}: expected (B, steps, C, H, W) and (B, steps), as unde.diffusion.sample gives"
            )
        expected = sampler_timesteps(self.scheduler, t.shape[1])
        if not bool((t.cpu() == torch.tensor(expected)).all()):
            raise UndeError(
                f"a trajectory with timesteps {t[0, :3].tolist()}… is of another sampler or scheduler: expected "
                f"{expected[:3]}…, those of {t.shape[1]} DDIM steps under the scheduler of this task. Sample with "
                "unde.diffusion.sample"
            )
        if self.steps is not None and t.shape[1] != self.steps:
            raise UndeError(
                f"a trajectory of {t.shape[1]} steps for an index of {self.steps}: sample with as many"
            )
        return t

    def brief(self) -> Diffusion:
        """At two timesteps, the least noisy and one in the middle."""
        short = copy.copy(self)
        short.timesteps = self.timesteps[_two(len(self.timesteps))]
        short._aside = {**self._aside, "brief": True}
        return short

    def step(self, c: int, steps: int) -> Diffusion:
        """At step c of a DDIM trajectory of `steps`."""
        one = copy.copy(self)
        one.timesteps, one.only, one.steps = [sampler_timesteps(self.scheduler, steps)[c]], c, steps
        return one

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Flipped, cropped and recoloured images, through the VAE where there is one; and images with noise. To a
        denoiser, whose inputs are noisy anyway, neither alone is always the right question."""
        vae = self._aside["vae"]
        if vae is None:
            return [Augment(), Noise()]
        through = Augment(lambda latents: _decoded(vae, latents), lambda images: _encoded(vae, images))
        return [through, Noise()]

    def journey(self, example: Any, steps: int, random: np.random.Generator) -> dict[str, Any]:
        """An image that no sampler made, with what a sampler of `steps` would have seen of it: one noise, less of it at
        every step."""
        clean, given = self._split(self.collate([example]))
        t = torch.tensor(sampler_timesteps(self.scheduler, steps)).unsqueeze(0)
        noise = torch.from_numpy(random.standard_normal(tuple(clean.shape), dtype=np.float32)).to(clean)
        signal, spread = self._scales(
            t.to(clean.device), clean.unsqueeze(1).expand(-1, steps, *clean.shape[1:])
        )
        made = {"trajectory": signal * clean.unsqueeze(1) + spread * noise.unsqueeze(1), "timesteps": t}
        return {k: v[0] for k, v in {"latents": clean, **given, **made}.items()}

    def prepared(
        self, clean: Tensor, given: Mapping[str, Tensor], keys: Sequence[str], timesteps: Sequence[int]
    ) -> dict[str, Any]:
        """A batch for one forward pass: noisy images at these timesteps, and what is to be predicted."""
        t = torch.tensor(timesteps, device=clean.device).expand(len(clean), -1)
        noise = torch.stack([self.noise(key, timesteps, clean.shape[1:]) for key in keys]).to(clean)
        signal, spread = self._scales(t, noise)
        x = clean.unsqueeze(1)
        noisy = signal * x + spread * noise
        target = noise if self.prediction == "epsilon" else signal * noise - spread * x
        return {"noisy": noisy, "target": target, "t": t, "given": dict(given), "of": len(self.timesteps)}

    def noise(self, key: str, timesteps: Sequence[int], shape: Sequence[int]) -> Tensor:
        """(k, *shape) standard normal, of one example: the same on every machine."""
        drawn = []
        for t in timesteps:
            words = hashlib.blake2b(f"{self.seed} {key} {t}".encode(), digest_size=16).digest()
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(words, "little")))
            drawn.append(generator.standard_normal(tuple(shape), dtype=np.float32))
        return torch.from_numpy(np.stack(drawn))

    @torch.no_grad()
    def _split(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Images or latents as the denoiser sees them, and what it is conditioned on."""
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            batch = batch[0]
        rest: dict[str, Any] = {"images": batch} if isinstance(batch, Tensor) else dict(batch)
        vae, text_encoder = self._aside["vae"], self._aside["text_encoder"]
        clean = rest.pop("latents", None)
        images = rest.pop("images", None)
        if clean is None:
            if images is None:
                raise UndeError(f"a diffusion batch has 'images' or 'latents': this one has {sorted(rest)}")
            clean = images if vae is None else _encoded(vae, images)
        if not isinstance(clean, Tensor) or not clean.is_floating_point() or clean.dim() < 3:
            known = isinstance(clean, Tensor)
            found = f"{clean.dtype} of shape {tuple(clean.shape)}" if known else type(clean).__name__
            raise UndeError(f"images are {found}: expected floating point (B, C, H, W), in [−1, 1]")
        prompts = rest.pop("prompts", None)
        if prompts is not None:
            if text_encoder is None:
                raise UndeError(
                    "the batch has 'prompts' (token ids), but the task has no text_encoder to read them: pass "
                    "Diffusion(..., text_encoder=), or 'encoder_hidden_states' in the batch"
                )
            text_encoder.to(prompts.device)
            rest["encoder_hidden_states"] = text_encoder(prompts)[0]
        return clean, {k: v for k, v in rest.items() if isinstance(v, Tensor)}


def evenly(count: int, most: int) -> Iterator[slice]:
    """Parts of `most` or fewer, as few and as equal as can be.

    >>> list(evenly(10, 8))
    [slice(0, 5, None), slice(5, 10, None)]
    """
    parts = -(-count // max(1, most))
    return (slice(count * i // parts, count * (i + 1) // parts) for i in range(parts))


def _two(count: int) -> slice:
    """The first and one in the middle."""
    return slice(None, None, max(1, -(-count // 2)))


def _key(image: Tensor) -> str:
    """What the noise of an image is drawn from: its content, which shapes alone (a plan) do not have."""
    return "" if isinstance(image, FakeTensor) else digest(image)


def prediction(out: Any, channels: int) -> Tensor:
    """What a denoiser predicts, from what it returns; without the variance that DiT predicts too."""
    out = getattr(out, "sample", out)
    out = out[0] if isinstance(out, tuple) else out
    return out[:, :channels] if out.shape[1] == 2 * channels else out


@torch.no_grad()
def _encoded(vae: Any, images: Tensor) -> Tensor:
    distribution = vae.to(images.device).encode(images.to(next(vae.parameters()).dtype)).latent_dist
    return (distribution.mean * vae.config.scaling_factor).to(images.dtype)


@torch.no_grad()
def _decoded(vae: Any, latents: Tensor) -> Tensor:
    """Images in [−1, 1] from latents."""
    home = next(vae.parameters())
    return vae.decode(latents.to(home) / vae.config.scaling_factor).sample.to(latents).clamp(-1, 1)


def _config(owner: Any, name: str, default: Any = None) -> Any:
    config = getattr(owner, "config", None)
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if found is None else found


def _settled(timesteps: int | Sequence[int], scheduler: Any) -> list[int]:
    """K timesteps evenly spaced from 0, or those that are given."""
    total = _config(scheduler, "num_train_timesteps")
    if total is None or not hasattr(scheduler, "alphas_cumprod"):
        raise UndeError(
            f"{type(scheduler).__name__} has no training timesteps (config.num_train_timesteps and alphas_cumprod): "
            "pass the scheduler that the model was trained with, such as diffusers' DDPMScheduler"
        )
    if isinstance(timesteps, int):
        if not 1 <= timesteps <= total:
            raise UndeError(
                f"timesteps={timesteps}: expected 1 to {total}, the scheduler's training timesteps"
            )
        return [k * total // timesteps for k in range(timesteps)]
    found = [int(t) for t in timesteps]
    if not found or not all(0 <= t < total for t in found):
        raise UndeError(f"timesteps {found[:5]}: expected at least one, each from 0 to {total - 1}")
    return found


def sampler_timesteps(scheduler: Any, steps: int) -> list[int]:
    """The timesteps of a DDIM sampler under the schedule of `scheduler`, the noisiest first."""
    from diffusers import DDIMScheduler

    sampler: Any = DDIMScheduler.from_config(scheduler.config)
    sampler.set_timesteps(steps)
    return [int(t) for t in sampler.timesteps]


def _short(x: Tensor) -> str:
    return hashlib.blake2b(np.ascontiguousarray(x.numpy()).tobytes(), digest_size=8).hexdigest()
