"""ImageNet-50k: ResNet-18 and ViT-B/16 from scratch; LDS, and finding wrong labels."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.scale.settings import Vision
from experiments.scale.sources import Pictures, enough, pictures
from experiments.scale.study import Study, closest, initial
from experiments.shared.paths import unfinished
from experiments.studies import mislabel_auc
from unde import console
from unde.errors import UndeError
from unde.methods import TRAK, Method, TracIn
from unde.tasks import Classification

LAYOUT = (
    "images by class in train/CLASS/name.jpg and validation/CLASS/name.jpg, or tables (parquet, save_to_disk) "
    "with the columns 'image' and 'label' and those two splits"
)
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


class Examples(Dataset):
    """The middle of each image, normalised, with its label; or, without `side`, the bytes that are stored."""

    def __init__(self, pixels: np.ndarray, labels: Tensor, side: int | None = None) -> None:
        self.pixels, self.labels, self.side = pixels, labels, side

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = torch.from_numpy(np.array(self.pixels[i]))
        if self.side is not None:
            edge = (image.shape[-1] - self.side) // 2
            image = normalised(image[None, :, edge : edge + self.side, edge : edge + self.side])[0]
        return image, self.labels[i]


def normalised(pixels: Tensor) -> Tensor:
    mean, spread = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, SPREAD))
    return (pixels.float() / 255 - mean) / spread


class ImageNet(Study):
    setting: Vision
    task = Classification

    @cached_property
    def _data(self) -> dict[str, tuple[np.ndarray, Tensor]]:
        """Pixels as they are stored, and labels, of each role."""
        s, source = self.setting, self.place.data
        train, validation = (pictures(source, split, LAYOUT) for split in ("train", "validation"))
        counts, classes = [len(p.classes) for p in (train, validation)], s.config["num_labels"]
        if train.classes != validation.classes or not train.classes:
            raise UndeError(f"the splits of {source} have {counts} classes, or others: expected {LAYOUT}")
        if counts[0] > classes:
            raise UndeError(f"{counts[0]} classes in {source}, the setting has {classes}")
        rng = np.random.default_rng(0)
        order, held = rng.permutation(len(train)), rng.permutation(len(validation))
        learn = enough(len(train) - 1, s.learn, "images to learn weights from")
        count = enough(len(train) - learn, s.train, "training images")
        parts = {
            "train": train.take(order[:count]),
            "learn": train.take(order[count : count + learn]),
            "eval": validation.take(held[: enough(len(validation), s.evaluate, "validation images")]),
        }
        return {
            role: (self._stored(role, part), torch.from_numpy(part.labels).long())
            for role, part in parts.items()
        }

    def _stored(self, role: str, part: Pictures) -> np.ndarray:
        """Decoded once, into a file that is read page by page: retraining reads images thousands of times."""
        side = self.setting.stored
        origin = hashlib.blake2b(f"{self.place.data} {side}".encode(), digest_size=4).hexdigest()
        path = self.place.out / f"imagenet-{role}-{len(part)}-{origin}.npy"
        if not path.exists():
            with unfinished(path) as file, console.progress(f"reading images: {role}", len(part)) as advance:
                out = np.lib.format.open_memmap(file, "w+", np.uint8, (len(part), 3, side, side))
                for i in range(len(part)):
                    out[i] = part.pixels(i, side)
                    advance(1)
                out.flush()
        return np.load(path, mmap_mode="r")

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor]:
        """The training labels as given, and which of them are wrong."""
        true, classes = self._data["train"][1], self.setting.config["num_labels"]
        generator, wrong = torch.Generator().manual_seed(2), torch.zeros(len(true), dtype=torch.bool)
        share = self.setting.corrupted if self.setting.mislabelled else 0
        which = torch.randperm(len(true), generator=generator)[: round(share * len(true))]
        wrong[which], given = True, true.clone()
        given[which] += torch.randint(1, classes, (len(which),), generator=generator)
        return given % classes, wrong

    def train(self) -> Examples:
        return Examples(self._data["train"][0], self.labels[0], self.setting.side)

    def queries(self, role: str) -> Examples:
        return Examples(*self._data[role], self.setting.side)

    # --- model -------------------------------------------------------------------------------------------

    def blank(self) -> nn.Module:
        return initial(lambda: made(self.setting))

    @cached_property
    def methods(self) -> dict[str, Method]:
        projection = closest(self.model, self.setting.features)
        return {"TracIn": TracIn(projection), "TRAK": TRAK(projection)}

    def examples(self) -> Examples:
        return Examples(self._data["train"][0], self.labels[0])

    def prepare(self, batch: Any, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random crops, mirrored every other time on average."""
        pixels, labels = batch
        side = self.setting.side
        corners = torch.randint(self.setting.stored - side + 1, (len(pixels), 2), generator=draws).tolist()
        x = torch.stack([p[:, a : a + side, b : b + side] for p, (a, b) in zip(pixels, corners)])
        mirrored = torch.rand(len(x), generator=draws) < 0.5
        return normalised(torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)), labels

    def fit(self, indices: np.ndarray, seed: int, rows: int | None = None) -> Any:
        # BatchNorm must see the batches of the recipe: they are not cut.
        whole = self.setting.recipe.batch_size if "hidden_sizes" in self.setting.config else None
        return super().fit(indices, seed, whole)

    # --- wrong labels ------------------------------------------------------------------------------------

    def run_mislabel(self) -> Path:
        """AUC of self-influence of a model that was trained on corrupted labels."""
        if not self.setting.mislabelled:
            return ImageNet(replace(self.setting, mislabelled=True), self.place).run_mislabel()
        judged = np.sort(np.random.default_rng(3).permutation(self.count)[: self.setting.judged])
        wrong, top = self.labels[1][judged], min(self.setting.top, self.count)

        def entry(title: str) -> dict[str, float]:
            method = self.methods[title]
            index, learn = self.index_for(method), self.learn_scores(title)
            return mislabel_auc.areas(index, method, learn, wrong, top, judged.tolist())

        return self.measure_methods("mislabel", entry)


def made(s: Vision) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

    if "hidden_sizes" in s.config:
        return ResNetForImageClassification(ResNetConfig(**s.config))
    return ViTForImageClassification(ViTConfig(**s.config))
