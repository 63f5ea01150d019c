"""CIFAR-2, ArtBench-2, Naruto and SB-Pokemon: a DDPM from scratch, or Stable Diffusion with LoRA; LDS.

Images and prompts are encoded once and kept; training and attribution then see the denoiser alone. Queries are images
that the attributed model generated, with seeds of their own for each role.
"""

from __future__ import annotations

import copy
import random
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.datasets.attributes import join
from experiments.scale.settings import BETAS, CATEGORIES, GLUE, Diffusion
from experiments.scale.sources import Pictures, enough, of_classes, pictures
from experiments.scale.study import Place, Study, closest, initial, losses
from experiments.scale.training import State
from experiments.shared.paths import unfinished
from unde import Setup, console
from unde.diffusion import Samples
from unde.errors import UndeError
from unde.integrations.diffusers import (
    add_lora,
    diffusion_setup,
    encode_images,
    encode_prompts,
    query_columns,
    sample_pipeline,
    training_scheduler,
)
from unde.methods import DAS, DTRAK, TRAK, JourneyTRAK, Method, TracIn
from unde.tasks import Diffusion as Denoising

CLASSES = (
    "images by class in CLASS/name.png (or train/CLASS/name.png) for {}, or tables with 'image' and 'label'"
)
CAPTIONS = (
    'images with metadata.jsonl, {"file_name": …, "text": the caption} on each line, or tables with the columns '
    "'image' and 'text'"
)
SEEDS = {"learn": 0, "eval": 100_000}  # the first of each role
TOGETHER = 8  # examples of a pass


def layout(setting: Diffusion) -> str:
    """What a folder of training images has to look like."""
    names = ", ".join(setting.classes[:3]) + (", …" if setting.classes[3:] else "")
    return CLASSES.format(names) if setting.classes else CAPTIONS


class Generation(Study):
    def __init__(self, setting: Diffusion, place: Place) -> None:
        super().__init__(setting, place)
        self.name = setting.name

    # --- data --------------------------------------------------------------------------------------------

    @cached_property
    def pictures(self) -> Pictures:
        s, place, wanted = self.setting, self.place, layout(self.setting)
        found = pictures(place.source, "train", wanted)
        if s.classes:
            return of_classes(found, s.classes, s.train, place.fewer, wanted)
        if not found.texts:
            raise UndeError(f"the images of {place.source} have no captions: expected {wanted}")
        return found.take(range(enough(len(found), s.train, "images with captions", place.fewer)))

    def pixels(self) -> Tensor:
        """(N, 3, side, side) uint8."""
        side = self.setting.side
        return torch.from_numpy(np.stack([self.pictures.pixels(i, side) for i in range(len(self.pictures))]))

    def prompts(self) -> list[str] | None:
        """One for each image; None for a model that reads none."""
        if self.setting.rank is None:
            return None
        if self.setting.prompt is None:
            return self.pictures.texts
        return [self.setting.prompt.replace("{class}", self.setting.classes[i]) for i in self.pictures.labels]

    # --- model -------------------------------------------------------------------------------------------

    @cached_property
    def pipeline(self) -> Any:
        s = self.setting
        if s.rank is None:
            from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

            unet = initial(lambda: UNet2DModel(**s.unet))
            return DDPMPipeline(unet, DDPMScheduler(**BETAS)).to(self.place.device)
        made = _stable_diffusion(self.place.model, str(s.pretrained))
        made.to(self.place.device)
        add_lora(made.unet, s.rank, seed=0)
        return made

    @cached_property
    def _fresh(self) -> dict[str, Tensor]:
        """What is trained, before it is."""
        unet = self.pipeline.unet
        return {name: p.detach().cpu().clone() for name, p in unet.named_parameters() if p.requires_grad}

    def blank(self) -> nn.Module:
        """A UNet of its own: its frozen part, if there is one, is shared with all others."""
        fresh, shared = self._fresh, self.pipeline.unet
        frozen = {id(p): p for p in shared.parameters() if not p.requires_grad}
        unet = copy.deepcopy(shared, memo=dict(frozen))
        unet.load_state_dict(fresh, strict=False)
        return unet

    @cached_property
    def setup(self) -> Setup:
        """Latents and encoded prompts of all training images, and the task."""
        return diffusion_setup(
            self.pipeline,
            self.pixels(),
            self.prompts(),
            timesteps=self.setting.timesteps,
            ids=self.pictures.names,
            rows=self.place.rows,
        )

    @property
    def task(self) -> Denoising:
        return self.setup.task

    @property
    def n_train(self) -> int:
        return len(self.pictures)

    def train_data(self) -> Any:
        return self.setup.train_data

    @cached_property
    def _both(self) -> Tensor:
        """(2, N, C, H, W) latents of each image, as it is and mirrored."""
        return torch.stack(
            [self.setup.train_data["latents"], encode_images(self.pipeline, self.pixels().flip(-1))]
        )

    def train(self, model: nn.Module, rows: np.ndarray, seed: int, checkpoint: Path) -> State:
        """The simple loss, each image mirrored every other time on average (B.1)."""
        both, columns = self._both, self.setup.train_data
        given, scheduler = columns.get("encoder_hidden_states"), training_scheduler(self.pipeline)
        device, velocity = self.place.device, scheduler.config.prediction_type == "v_prediction"

        def loss(model: nn.Module, part: Tensor, draws: torch.Generator) -> Tensor:
            where = torch.from_numpy(rows)[part]
            x = both[torch.randint(2, where.shape, generator=draws), where]
            noise = torch.randn(x.shape, generator=draws)
            t = torch.randint(scheduler.config.num_train_timesteps, where.shape, generator=draws)
            target = scheduler.get_velocity(x, noise, t) if velocity else noise
            told = {} if given is None else {"encoder_hidden_states": given[where].to(device)}
            out = model(scheduler.add_noise(x, noise, t).to(device), t.to(device), **told).sample
            return (out - target.to(device)).square().flatten(1).mean(1)

        return self.fit(model, loss, len(rows), seed, checkpoint)

    def methods(self, model: nn.Module) -> dict[str, Method]:
        p = closest(model, self.setting.features)
        return {
            "TracIn": TracIn(p), "TRAK": TRAK(p), "Journey-TRAK": JourneyTRAK(p), "D-TRAK": DTRAK(p), "DAS": DAS(p),
        }  # fmt: skip

    # --- queries -----------------------------------------------------------------------------------------

    def query_prompts(self, role: str, count: int) -> list[str] | None:
        """As B.2.1 has them: classes in turn, combinations of categories, or captions of the data."""
        s, draw = self.setting, random.Random(f"prompts {role}")
        if s.rank is None:
            return None
        if s.name == "sb-pokemon":
            named = [{a: draw.choice(names) for a, names in CATEGORIES.items()} for _ in range(count)]
            return [join(parts, GLUE) for parts in named]
        different = list(dict.fromkeys(self.prompts() or []))
        draw.shuffle(different)
        return [different[i % len(different)] for i in range(count)]

    def generate(self, role: str, prompts: list[str] | None, start: int, count: int) -> Samples:
        """Images of the attributed model for the seeds from `start` on, kept in a file."""
        path, pipeline = self.folder / f"{role}.safetensors", copy.copy(self.pipeline)
        if not path.exists():
            pipeline.unet = self.trained()[0]
            console.note(f"generating {count} images: {role}")
            made = sample_pipeline(
                pipeline, prompts, range(start, start + count), steps=self.setting.steps,
                guidance=self.setting.guidance, size=self.setting.side, batch_size=self.place.rows,
            )  # fmt: skip
            columns = {"latents": made.latents, "trajectory": made.trajectory, "timesteps": made.timesteps}
            columns["seeds"] = torch.tensor(made.seeds)
            with unfinished(path) as part:
                save_file({name: column.contiguous() for name, column in columns.items()}, part)
        columns = load_file(path)
        if len(columns["latents"]) != count:
            raise UndeError(f"{path} holds {len(columns['latents'])} images, not {count}: delete it")
        given = {} if prompts is None else {"encoder_hidden_states": encode_prompts(pipeline, prompts)}
        return Samples(
            columns["latents"], columns["trajectory"], columns["timesteps"], columns["seeds"].tolist(), given, prompts
        )  # fmt: skip

    def samples(self, role: str) -> Samples:
        count = self.setting.learn if role == "learn" else self.setting.evaluate
        return self.generate(role, self.query_prompts(role, count), SEEDS[role], count)

    def queries(self, role: str, method: Method | None = None) -> dict[str, Any]:
        return query_columns(self.samples(role), journey=isinstance(method, JourneyTRAK))

    @cached_property
    def _asked(self) -> dict[str, dict[str, Any]]:
        return {role: self.queries(role) for role in ("learn", "eval")}

    def bank(self) -> Any:
        for role in SEEDS:  # before other processes look for them
            self.samples(role)
        return super().bank()

    def utility(self, model: nn.Module) -> dict[str, Tensor]:
        """Minus the simple loss at evenly spaced timesteps, with the same noise for every model."""
        return {
            role: -losses(self.task, model, columns, TOGETHER, self.place.device)
            for role, columns in self._asked.items()
        }


def _stable_diffusion(folder: Path | None, wanted: str) -> Any:
    from diffusers import StableDiffusionPipeline

    if folder is None or not (folder / "model_index.json").exists():
        raise UndeError(
            f"no pipeline in {folder}: give --model FOLDER with {wanted}, as save_pretrained wrote it"
        )
    try:
        return StableDiffusionPipeline.from_pretrained(
            folder, torch_dtype=torch.float32, safety_checker=None, requires_safety_checker=False,
            use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip
    except (OSError, ValueError) as e:
        raise UndeError(
            f"cannot load the pipeline {folder} ({str(e).strip().splitlines()[0]}): expected {wanted}"
        ) from e
