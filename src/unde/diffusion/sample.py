"""Seeded sampling with DDIM and classifier-free guidance, with the trajectory of every image.

The initial noise of an image follows from its own seed, so that it does not depend on batches or on other images.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from unde import console
from unde.errors import UndeError, explain
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.store.files import (
    check_plain,
    clear_partial,
    read_bounded,
    read_json,
    settings_checksum,
    write_bytes,
)
from unde.tasks.diffusion import decode, prediction
from unde.tasks.timesteps import sampler_timesteps

GUIDANCE = 7.5  # the paper's


@dataclass(frozen=True, eq=False)
class Samples:
    """Generated images with how they came about: seeds, prompts, conditions, and every x_t on the way."""

    latents: Tensor  # (Q, C, H, W): what the denoiser made; the images themselves where there is no VAE
    trajectory: Tensor  # (Q, steps, C, H, W): the states that the denoiser saw, the noisiest first
    timesteps: Tensor  # (Q, steps)
    seeds: list[int]
    given: dict[str, Tensor]  # what the model was conditioned on
    prompts: list[str] | None = None

    def __len__(self) -> int:
        return len(self.seeds)

    def queries(self, journey: bool = False) -> dict[str, Tensor]:
        """Columns to hand to an index; with `journey` the trajectories too, for Journey-TRAK."""
        columns = {"latents": self.latents, **self.given}
        if journey:
            if not self.trajectory.shape[1]:
                raise UndeError(
                    "these samples were saved without their trajectories, which Journey-TRAK follows: sample them "
                    "again, and save them with journey=True"
                )
            columns |= {"trajectory": self.trajectory, "timesteps": self.timesteps}
        return columns

    def save(self, path: str | os.PathLike[str], journey: bool = True) -> None:
        """Into a folder, to be asked about later: `Samples.load`, or `--queries FOLDER` on the command line.

        `journey=False` leaves the trajectories out, which take most of the room and which Journey-TRAK alone needs.
        """
        kept = {"latents": self.latents, **{GIVEN + name: t for name, t in self.given.items()}}
        if journey and self.trajectory.shape[1]:
            kept |= {"trajectory": self.trajectory, "timesteps": self.timesteps}
        _write(Path(path).expanduser(), kept, {"seeds": self.seeds, "prompts": self.prompts})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Samples:
        """What `save` has kept, bit for bit. Folders that are damaged or hold something else are refused."""
        folder = Path(path).expanduser()
        tensors, about = _read(folder)
        seeds: Any = about.get("seeds")
        prompts, latents = about.get("prompts"), tensors.get("latents")
        given = {k.removeprefix(GIVEN): t for k, t in tensors.items() if k.startswith(GIVEN)}
        if (
            latents is None
            or latents.dim() != 4
            or not _list_of(int, seeds)
            or not (prompts is None or _list_of(str, prompts))
            or {len(some) for some in (seeds, prompts or seeds, *tensors.values())} != {len(latents)}
        ):
            raise UndeError(
                f"the samples in {folder} are damaged (their parts do not fit): sample them again"
            )
        none = latents.new_empty(len(seeds), 0, *latents.shape[1:])
        trajectory = tensors.get("trajectory", none)
        timesteps = tensors.get("timesteps", torch.empty(len(seeds), 0, dtype=torch.long))
        return cls(latents, trajectory, timesteps, seeds, given, prompts)

    def images(self, vae: Any = None, batch_size: int = 16) -> Tensor:
        """(Q, 3, H, W) in [0, 1]; `vae` decodes latents."""
        parts = self.latents.split(batch_size)
        if vae is not None:
            parts = [decode(vae, x) for x in parts]
        return (torch.cat(list(parts)) / 2 + 0.5).clamp(0, 1)


def sample(
    model: nn.Module,
    scheduler: Any,
    shape: Sequence[int],
    seeds: Sequence[int],
    *,
    given: Mapping[str, Tensor] | None = None,
    unconditional: Mapping[str, Tensor] | None = None,
    guidance: float = GUIDANCE,
    prompts: Sequence[str] | None = None,
    steps: int = 50,
    batch_size: int = 16,
    apart_from: Samples | Sequence[Samples] = (),
    progress: bool = True,
    on_step: Callable[[int, int], None] | None = None,
) -> Samples:
    """One image of `shape` (C, H, W) for each seed.

    `given` holds what the model is conditioned on, a row for each seed (such as "encoder_hidden_states");
    `unconditional` the same for no prompt, one row, which turns classifier-free guidance on. `apart_from` are samples
    that serve another role: a seed that is among theirs is refused. `on_step` is called with the steps done and all.
    """
    from diffusers import DDIMScheduler

    seeds, given = [int(s) for s in seeds], dict(given or {})
    others = [apart_from] if isinstance(apart_from, Samples) else apart_from
    _check(seeds, given, unconditional, prompts, others)
    sampler: Any = DDIMScheduler.from_config(scheduler.config)
    sampler.set_timesteps(steps)
    times = sampler_timesteps(scheduler, steps)
    device, dtype = placement(model)
    finals, paths = [], []
    bar = console.progress("sampling", len(seeds), progress, unit="images")
    with frozen_eval(model), torch.no_grad(), bar as advance:
        for start in range(0, len(seeds), batch_size):
            rows = slice(start, start + batch_size)
            x = torch.stack([_noise(s, shape) for s in seeds[rows]]).to(device, dtype)
            here = {k: v[rows].to(device) for k, v in given.items()}
            path = []
            for step, t in enumerate(times, 1):
                path.append(x)
                out = _predict(model, x, t, here, unconditional, guidance)
                x = sampler.step(out, t, x).prev_sample
                if on_step is not None:
                    batches = -(-len(seeds) // batch_size)
                    on_step(start // batch_size * len(times) + step, batches * len(times))
            finals.append(x.float().cpu())
            paths.append(torch.stack(path, 1).float().cpu())
            advance(len(x))
    timesteps = torch.tensor(times).repeat(len(seeds), 1)
    prompts = None if prompts is None else list(prompts)
    return Samples(torch.cat(finals), torch.cat(paths), timesteps, seeds, given, prompts)


def _predict(
    model: nn.Module,
    x: Tensor,
    t: int,
    given: Mapping[str, Tensor],
    unconditional: Mapping[str, Tensor] | None,
    guidance: float,
) -> Tensor:
    """The model's output, pushed away from the unconditional one where there is guidance."""
    when = torch.full((len(x),), t, device=x.device)
    if unconditional is None:
        return prediction(model(x, when, **given), x.shape[1])
    nothing = {k: unconditional[k].to(x.device).expand_as(v) for k, v in given.items()}
    both = {k: torch.cat([nothing[k], given[k]]) for k in given}
    out = model(torch.cat([x, x]), torch.cat([when, when]), **both)
    plain, guided = prediction(out, x.shape[1]).chunk(2)
    return plain + guidance * (guided - plain)


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _noise(seed: int, shape: Sequence[int]) -> Tensor:
    generator = np.random.Generator(np.random.Philox(key=seed))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def _check(
    seeds: list[int],
    given: Mapping[str, Tensor],
    unconditional: Mapping[str, Tensor] | None,
    prompts: Sequence[str] | None,
    others: Sequence[Samples],
) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UndeError(f"seeds {seeds[:5]}…: expected at least one, each ≥ 0 and different from the others")
    rows = {f"rows of {name!r}": len(column) for name, column in given.items()}
    rows |= {} if prompts is None else {"prompts": len(prompts)}
    for what, count in rows.items():
        if count != len(seeds):
            raise UndeError(f"{count} {what} for {len(seeds)} seeds: expected one for each")
    if unconditional is not None and not given:
        raise UndeError("guidance needs a conditional model: pass given= beside unconditional=")
    missing = [] if unconditional is None else [name for name in given if name not in unconditional]
    if missing:
        raise UndeError(f"guidance needs an unconditional row of {missing[0]!r}")
    for other in others:
        refuse_shared_seeds(seeds, other.seeds)


def refuse_shared_seeds(seeds: Sequence[int], others: Sequence[int]) -> None:
    """Raise if samples for two roles have seeds in common."""
    shared = sorted(set(seeds) & set(others))
    if shared:
        raise UndeError(
            f"seeds {shared[:5]} serve another role already: samples for learning weights and for evaluation need "
            "seeds of their own"
        )


FORMAT, VERSION = "unde samples", 1
NAME = "samples.json"
GIVEN = "given."  # before the names of what the model was conditioned on
_TENSORS = "samples-*.safetensors"


def _write(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """A new folder, or one that holds samples already, which these replace."""
    if folder.exists() and not folder.is_dir():
        raise UndeError(f"{folder} is a file: samples are saved in a folder, choose another path")
    if folder.is_dir() and not (folder / NAME).is_file():
        others = sorted(p.name for p in folder.iterdir() if not p.match(_TENSORS))
        if others:
            raise UndeError(
                f"{folder} holds {others[0]!r} and no samples: choose a new folder, or one that samples were saved in"
            )
    with explain(f"cannot make the folder {folder} ({{why}}): choose another path", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    file = folder / f"samples-{digest[:12]}.safetensors"
    write_bytes(file, content)
    settings = {"format": FORMAT, "version": VERSION, "tensors": file.name, "digest": digest, **about}
    settings["checksum"] = settings_checksum(settings)
    write_bytes(folder / NAME, (json.dumps(settings, indent=1) + "\n").encode())
    for old in folder.glob(_TENSORS):  # of samples that were here before
        if old.name != file.name:
            with contextlib.suppress(OSError):
                old.unlink()
    clear_partial(folder)


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and what is known about them, after checking that they are what was saved."""
    if not (folder / NAME).exists():
        what = (
            "is not there" if not folder.exists() else f"holds no {NAME}" if folder.is_dir() else "is a file"
        )
        raise UndeError(f"no samples at {folder}, which {what}: expected a folder that Samples.save has made")
    message = f"the samples in {folder} are damaged ({{e}}): sample and save them again"
    with explain(message, UndeError, OSError, ValueError, KeyError, TypeError, SafetensorError):
        about = read_json(folder / NAME)
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError("it is no file of samples")
        if about.get("version") != VERSION:
            raise ValueError(f"it has the version {about.get('version')!r}, expected {VERSION}")
        if about.get("checksum") != settings_checksum(about):
            raise ValueError("its content does not match its checksum")
        file = folder / str(about["tensors"])
        if file.parent != folder or not file.match(_TENSORS):
            raise ValueError(f"it names {about['tensors']!r} as its tensors")
        content = read_bounded(file, check_plain(file))
        if hashlib.blake2b(content, digest_size=16).hexdigest() != about["digest"]:
            raise ValueError(f"{file.name} does not match its checksum")
        return load(content), about
