"""SB-Pokemon: who gave an image its subject, its style, its background? Recall@10 of D-TRAK."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.datasets import Attributes, Queries
from experiments.scale import findings
from experiments.scale.diffusion import Generation
from experiments.scale.settings import CATEGORIES, GLUE, Diffusion, FineGrained
from experiments.scale.study import Place
from unde import learn_weights
from unde.evaluate import fine_grained
from unde.integrations.diffusers import query_columns
from unde.methods import DTRAK
from unde.scoring import GroupScores

SPLITS = ("train", "validation")
STARTS = {
    "subject": 200_000,
    "style": 300_000,
    "background": 400_000,
    "train": 500_000,
    "validation": 600_000,
}


class Pokemon(Generation):
    def __init__(self, setting: Diffusion, place: Place, fine: FineGrained | None = None) -> None:
        super().__init__(setting, place)
        self.fine = fine or FineGrained()

    @cached_property
    def attributes(self) -> Attributes:
        """Each image shows one category of one attribute: 20 images are the contributors of each."""
        names = [(a, i) for a, those in CATEGORIES.items() for i in range(len(those))]
        shown = [names[label] for label in self.pictures.labels]
        labels = {a: np.array([i if b == a else -1 for b, i in shown]) for a in CATEGORIES}
        categories = {a: list(those) for a, those in CATEGORIES.items()}
        images = self.pixels().permute(0, 2, 3, 1).numpy()
        return Attributes(images, self.prompts() or [], labels, categories, "that of the given folder", GLUE)

    def _scores(self, method: DTRAK, role: str, asked: Queries) -> GroupScores:
        made = self.generate(f"fine-{role}", asked.prompts, STARTS[role], len(asked.prompts))
        index = self.index(self.trained()[0], method)
        path = index.folder.with_name(f"{index.folder.name}-fine-{role}.safetensors")
        return index.score(index.features(query_columns(made), path), method)

    def recall(self) -> Path:
        """Weights for each attribute from prompts that name its train categories alone; recall on both splits."""
        self.begin()
        data, name = self.attributes, f"{self.name}-recall"
        method = self.methods(self.trained()[0])["D-TRAK"]
        learn = {}
        for attribute, names in data.train_categories.items():
            asked = data.queries("train", [attribute], repeats=max(1, self.fine.learn // len(names)))
            learn[attribute] = self._scores(method, attribute, asked)
        weights: dict[str, Any] = {a: learn_weights(scores) for a, scores in learn.items()}
        entry: dict[str, Any] = {"method": repr(method)}
        entry["rules"] = {
            a: {"weights": w.values.tolist(), "groups": list(w.groups)} for a, w in weights.items()
        }
        results = {"methods": {"D-TRAK": entry}, "bank": None}
        path = self.place.results / f"{name}.json"
        for split in SPLITS:
            asked = data.queries(split, repeats=self.fine.repeats)
            relevant = {a: data.contributors(asked.labels, a) for a in CATEGORIES}
            found = fine_grained(
                self._scores(method, split, asked), {"none": None, **weights}, relevant, k=self.fine.k
            )
            entry[split] = found.as_dict()
            print(f"\n{split} categories\n{found}", flush=True)
            path = findings.write(self.place.results, name, results, self.setting)
        return path
