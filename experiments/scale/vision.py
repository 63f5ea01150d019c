"""ImageNet-50k: ResNet-18 and ViT-B/16 from scratch; LDS, and finding wrong labels."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.scale import findings
from experiments.scale.settings import Vision
from experiments.scale.sources import Pictures, enough, pictures
from experiments.scale.study import Place, Study, closest, initial
from experiments.scale.training import State
from experiments.shared.paths import unfinished
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
    """The middle of each image, normalised, with its label."""

    def __init__(self, pixels: np.ndarray, labels: Tensor, side: int) -> None:
        self.pixels, self.labels, self.side = pixels, labels, side

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        edge = (self.pixels.shape[-1] - self.side) // 2
        middle = self.pixels[i, :, edge : edge + self.side, edge : edge + self.side]
        return normalised(torch.from_numpy(np.array(middle))[None])[0], self.labels[i]


def normalised(pixels: Tensor) -> Tensor:
    mean, spread = (torch.tensor(v, device=pixels.device).view(1, 3, 1, 1) for v in (MEAN, SPREAD))
    return (pixels.float() / 255 - mean) / spread


class ImageNet(Study):
    task = Classification()

    def __init__(self, setting: Vision, place: Place, title: str, corrupted: bool = False) -> None:
        super().__init__(setting, place)
        self.title, self.corrupted = title, corrupted

    @property
    def name(self) -> str:
        return f"imagenet-{self.title}" + ("-mislabelled" if self.corrupted else "")

    # --- data --------------------------------------------------------------------------------------------

    @cached_property
    def _data(self) -> dict[str, tuple[np.ndarray, Tensor]]:
        """Pixels as they are stored, and labels, of each role."""
        s, place = self.setting, self.place
        train = pictures(place.source, "train", LAYOUT)
        validation = pictures(place.source, "validation", LAYOUT)
        if train.classes != validation.classes or not train.classes:
            raise UndeError(
                f"the splits of {place.source} have {len(train.classes)} and {len(validation.classes)} classes, or "
                f"others: expected {LAYOUT}"
            )
        classes = self.setting.config["num_labels"]
        if len(train.classes) > classes:
            raise UndeError(f"{len(train.classes)} classes in {place.source}, the setting has {classes}")
        rng = np.random.default_rng(0)
        order, held = rng.permutation(len(train)), rng.permutation(len(validation))
        learn = enough(len(train) - 1, s.learn, "images to learn weights from", place.fewer)
        count = enough(len(train) - learn, s.train, "training images", place.fewer)
        evaluate = enough(len(validation), s.evaluate, "validation images", place.fewer)
        parts = {
            "train": train.take(order[:count]),
            "learn": train.take(order[count : count + learn]),
            "eval": validation.take(held[:evaluate]),
        }
        return {
            role: (self._stored(role, part), torch.from_numpy(part.labels).long())
            for role, part in parts.items()
        }

    def _stored(self, role: str, part: Pictures) -> np.ndarray:
        """Decoded once, into a file that is read page by page: retraining reads images thousands of times."""
        side = self.setting.stored
        origin = hashlib.blake2b(f"{self.place.source} {side}".encode(), digest_size=4).hexdigest()
        path = self.place.out / f"imagenet-{role}-{len(part)}-{origin}.npy"
        if not path.exists():
            shape = (len(part), 3, side, side)
            with unfinished(path) as file:
                out = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
                with console.progress(f"reading images: {role}", len(part), estimate="images") as advance:
                    for i in range(len(part)):
                        out[i] = part.pixels(i, side)
                        advance(1)
                out.flush()
        return np.load(path, mmap_mode="r")

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor]:
        """The training labels as given, and which of them are wrong."""
        true = self._data["train"][1]
        wrong = torch.zeros(len(true), dtype=torch.bool)
        if not self.corrupted:
            return true, wrong
        generator, classes = torch.Generator().manual_seed(2), self.setting.config["num_labels"]
        which = torch.randperm(len(true), generator=generator)[: round(self.setting.corrupted * len(true))]
        wrong[which] = True
        given = true.clone()
        given[which] += torch.randint(1, classes, (len(which),), generator=generator)
        return given % classes, wrong

    def train_data(self) -> Examples:
        return Examples(self._data["train"][0], self.labels[0], self.setting.side)

    def queries(self, role: str, method: Method | None = None) -> Examples:
        return Examples(*self._data[role], self.setting.side)

    # --- model -------------------------------------------------------------------------------------------

    def blank(self) -> nn.Module:
        return initial(lambda: made(self.setting))

    def methods(self, model: nn.Module) -> dict[str, Method]:
        projection = closest(model, self.setting.features)
        return {"TracIn": TracIn(projection), "TRAK": TRAK(projection)}

    def train(self, model: nn.Module, rows: np.ndarray, seed: int, checkpoint: Path) -> State:
        pixels, given, side = self._data["train"][0], self.labels[0], self.setting.side
        spare = self.setting.stored - side + 1

        def loss(model: nn.Module, part: Tensor, draws: torch.Generator) -> Tensor:
            where = rows[part.numpy()]
            top, left = torch.randint(spare, (2, len(where)), generator=draws).tolist()
            crops = [
                pixels[i, :, a : a + side, b : b + side] for i, a, b in zip(where, top, left, strict=True)
            ]
            x = torch.from_numpy(np.stack(crops)).to(self.place.device)
            mirrored = (torch.rand(len(where), generator=draws) < 0.5).to(x.device)
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
            labels = given[torch.from_numpy(where)].to(x.device)
            return F.cross_entropy(model(normalised(x)).logits, labels, reduction="none")

        # BatchNorm must see the batches of the recipe: they are not cut where they can be held.
        held = self.setting.recipe.batch_size if self.setting.architecture == "resnet" else self.place.rows
        return self.fit(model, loss, len(rows), seed, checkpoint, held)

    # --- wrong labels ------------------------------------------------------------------------------------

    def mislabel(self) -> Path:
        """AUC of normalised self-influence of a model that was trained on corrupted labels."""
        study = ImageNet(self.setting, self.place, self.title, corrupted=True)
        study.begin()
        wrong, count = study.labels[1].numpy(), study.n_train
        judged = np.sort(np.random.default_rng(3).permutation(count)[: self.setting.judged])
        top = min(self.setting.top, count)

        return study.measure_methods(
            study.name, lambda learned: findings.mislabel_entry(learned, judged, wrong[judged], top)
        )


def made(s: Vision) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

    if s.architecture == "resnet":
        return ResNetForImageClassification(ResNetConfig(**s.config))
    return ViTForImageClassification(ViTConfig(**s.config))
