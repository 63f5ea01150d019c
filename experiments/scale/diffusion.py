"""CIFAR-2, ArtBench-2, Naruto and SB-Pokemon: a DDPM from scratch, or Stable Diffusion with LoRA; LDS and recall.

Images and prompts are encoded once; training and attribution then see the denoiser alone. Queries are images that the
attributed model generated, with seeds of their own for each role.
"""

from __future__ import annotations

import copy
import random
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.datasets import Attributes, Queries
from experiments.datasets.attributes import join
from experiments.scale.settings import BETAS, CATEGORIES, GLUE, Diffusion
from experiments.scale.sources import Pictures, enough, of_classes, pictures
from experiments.scale.study import Study, closest, initial
from experiments.shared import denoising
from unde import Setup, console, learn_weights
from unde.diffusion import Samples
from unde.errors import UndeError
from unde.evaluate import fine_grained
from unde.integrations.diffusers import (
    add_lora,
    diffusion_setup,
    encode_images,
    query_columns,
    sample_pipeline,
    training_scheduler,
)
from unde.methods import DAS, DTRAK, TRAK, JourneyTRAK, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import Diffusion as Denoising

CLASSES = (
    "images by class in CLASS/name.png (or train/CLASS/name.png) for {}, or tables with 'image' and 'label'"
)
CAPTIONS = (
    'images with metadata.jsonl, {"file_name": …, "text": the caption} on each line, or tables with the columns '
    "'image' and 'text'"
)
GIVEN = "encoder_hidden_states"


def layout(setting: Diffusion) -> str:
    """What a folder of training images has to look like."""
    names = ", ".join(setting.classes[:3]) + (", …" if setting.classes[3:] else "")
    return CLASSES.format(names) if setting.classes else CAPTIONS


class Generation(Study):
    setting: Diffusion

    # --- data --------------------------------------------------------------------------------------------

    @cached_property
    def pictures(self) -> Pictures:
        s, source, wanted = self.setting, self.place.data, layout(self.setting)
        found = pictures(source, "train", wanted)
        if s.classes:
            return of_classes(found, s.classes, s.train, wanted)
        if not found.texts:
            raise UndeError(f"the images of {source} have no captions: expected {wanted}")
        return found.take(range(enough(len(found), s.train, "images with captions")))

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

    @cached_property
    def setup(self) -> Setup:
        """Latents and encoded prompts of all training images, and the task."""
        return diffusion_setup(
            self.pipeline, self.pixels(), self.prompts(), timesteps=self.setting.timesteps,
            ids=self.pictures.names, rows=self.place.rows,
        )  # fmt: skip

    def task(self) -> Denoising:
        return self.setup.task

    def train(self) -> Any:
        return self.setup.train_data

    # --- model -------------------------------------------------------------------------------------------

    @cached_property
    def pipeline(self) -> Any:
        s, folder = self.setting, self.place.model
        if s.rank is None:
            from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

            unet = initial(lambda: UNet2DModel(**s.unet))
            return DDPMPipeline(unet, DDPMScheduler(**BETAS)).to(self.place.device)
        from diffusers import StableDiffusionPipeline

        if folder is None or not (folder / "model_index.json").exists():
            raise UndeError(f"no pipeline in {folder}: give --model FOLDER with {s.pretrained}")
        made = StableDiffusionPipeline.from_pretrained(
            folder, torch_dtype=torch.float32, safety_checker=None, requires_safety_checker=False,
            use_safetensors=True, trust_remote_code=False,
        ).to(self.place.device)  # fmt: skip
        add_lora(made.unet, s.rank, seed=0)
        return made

    def blank(self) -> nn.Module:
        """A UNet of its own: its frozen part, if there is one, is shared with all others."""
        shared = self.pipeline.unet  # never trained itself
        return copy.deepcopy(shared, memo={id(p): p for p in shared.parameters() if not p.requires_grad})

    def examples(self) -> Any:
        """Latents of each image, as it is and mirrored, with its prompt."""
        columns = self.train()
        mirrored = encode_images(self.pipeline, self.pixels().flip(-1))
        prompts = {GIVEN: columns[GIVEN]} if GIVEN in columns else {}
        return {"latents": torch.stack([columns["latents"], mirrored], 1), **prompts}

    @cached_property
    def _scheduler(self) -> Any:
        return training_scheduler(self.pipeline)

    def prepare(self, batch: dict[str, Tensor], draws: torch.Generator) -> dict[str, Tensor]:
        """Noisy images, mirrored every other time on average (B.1), and what is to be predicted."""
        scheduler, both = self._scheduler, batch["latents"]
        x = both[torch.arange(len(both)), torch.randint(2, (len(both),), generator=draws)]
        noise = torch.randn(x.shape, generator=draws)
        t = torch.randint(scheduler.config.num_train_timesteps, (len(x),), generator=draws)
        velocity = scheduler.config.prediction_type == "v_prediction"
        target = scheduler.get_velocity(x, noise, t) if velocity else noise
        return {**batch, "latents": scheduler.add_noise(x, noise, t), "t": t, "target": target}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The simple loss."""
        given = {GIVEN: batch[GIVEN]} if GIVEN in batch else {}
        out = model(batch["latents"], batch["t"], **given).sample
        return (out - batch["target"]).square().flatten(1).mean(1)

    @cached_property
    def methods(self) -> dict[str, Method]:
        p = closest(self.model, self.setting.features)
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

    def generate(self, role: str, prompts: list[str] | None, count: int) -> Samples:
        """Images of the attributed model with the seeds of a role, kept in a folder."""
        path, s = self.folder / f"samples-{role}", self.setting
        if not path.exists():
            console.note(f"generating {count} images: {role}")
            pipeline = copy.copy(self.pipeline)
            pipeline.unet = self.model
            sample_pipeline(
                pipeline, prompts, denoising.seeds(role, count), steps=s.steps, guidance=s.guidance, size=s.side,
                batch_size=self.place.rows,
            ).save(path)  # fmt: skip
        return Samples.load(path)

    def samples(self, role: str) -> Samples:
        count = self.setting.learn if role == "learn" else self.setting.evaluate
        return self.generate(role, self.query_prompts(role, count), count)

    def queries(self, role: str) -> dict[str, Any]:
        role, _, journey = role.partition(" ")
        return query_columns(self.samples(role), journey=journey == "journey")


class Pokemon(Generation):
    """Who gave an image its subject, its style, its background? Recall@10 of D-TRAK."""

    @cached_property
    def attributes(self) -> Attributes:
        """Each image shows one category of one attribute: 20 images are the contributors of each."""
        names = [(a, i) for a, those in CATEGORIES.items() for i in range(len(those))]
        shown = [names[label] for label in self.pictures.labels]
        labels = {a: np.array([i if b == a else -1 for b, i in shown]) for a in CATEGORIES}
        categories = {a: list(those) for a, those in CATEGORIES.items()}
        images = self.pixels().permute(0, 2, 3, 1).numpy()
        return Attributes(images, self.prompts() or [], labels, categories, "that of the given folder", GLUE)

    def _asked(self, role: str, asked: Queries) -> GroupScores:
        method = self.methods["D-TRAK"]
        columns = query_columns(self.generate(role, asked.prompts, len(asked.prompts)))
        index = self.index_for(method)
        return index.score(index.features(columns, self.features_path(method, role)), method)

    @cached_property
    def _weights(self) -> dict[str, Any]:
        """For each attribute, from prompts that name its train categories alone."""
        learned = {}
        for attribute, names in self.attributes.train_categories.items():
            repeats = max(1, self.setting.fine_learn // len(names))
            asked = self.attributes.queries("train", [attribute], repeats=repeats)
            learned[attribute] = learn_weights(self._asked(attribute, asked))
        return learned

    def run_recall(self) -> Path:
        """On images that combine train or validation categories of all attributes."""
        data, s = self.attributes, self.setting

        def entry(split: str) -> dict[str, Any]:
            asked = data.queries(split, repeats=s.repeats)
            relevant = {a: data.contributors(asked.labels, a) for a in CATEGORIES}
            found = fine_grained(self._asked(split, asked), {"none": None, **self._weights}, relevant, k=s.k)
            print(f"\n{split} categories\n{found}", flush=True)
            return found.as_dict()

        def weights() -> dict[str, Any]:
            return {a: dict(zip(w.groups, w.values.tolist())) for a, w in self._weights.items()}

        parts = {split: partial(entry, split) for split in ("train", "validation")}
        return self.measure("recall", {"weights": weights, **parts})
