"""Labelled pictures with known contributors: the structure of the paper's fine-grained study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from unde.errors import UndeError, unknown


class Queries(NamedTuple):
    """Prompts to generate query images from, and what they name."""

    prompts: list[str]
    labels: dict[str, np.ndarray]  # (Q,) for each attribute; −1 where the prompt does not name it


@dataclass(frozen=True)
class Attributes:
    """Images that show one category of each attribute: subject, style and background.

    The first half of each attribute's categories is for learning weights, the second half for evaluation.
    """

    images: np.ndarray  # (N, H, W, 3) uint8
    prompts: list[str]
    labels: dict[str, np.ndarray]  # (N,) for each attribute; −1 where an image shows none of the categories
    categories: dict[str, list[str]]
    licence: str  # who made the pictures and what they may be used for
    glue: dict[str, str] = field(
        repr=False
    )  # attributes in the order of a prompt, and what joins each to the last

    def __len__(self) -> int:
        return len(self.images)

    @property
    def train_categories(self) -> dict[str, list[str]]:
        """The categories that weights may be learned on."""
        return {a: names[: self._middle(a)] for a, names in self.categories.items()}

    @property
    def validation_categories(self) -> dict[str, list[str]]:
        """The categories that only evaluation may see."""
        return {a: names[self._middle(a) :] for a, names in self.categories.items()}

    def contributors(self, queries_labels: Mapping[str, np.ndarray], attribute: str) -> np.ndarray:
        """(Q, N): the training images that show the query's category of this attribute.

        This is what `unde.evaluate.recall_at_k` takes. A query that names no category has no contributors.
        """
        self._known(attribute)
        wanted = np.asarray(queries_labels[attribute])[:, None]
        return (wanted == self.labels[attribute][None, :]) & (wanted >= 0)

    def prompt(self, **named: int) -> str:
        """The prompt that names these categories and leaves the other attributes open: `prompt(style=2)`."""
        for attribute in named:
            self._known(attribute)
        return join({a: self.categories[a][i] for a, i in named.items()}, self.glue)

    def queries(
        self, split: str = "validation", attributes: Sequence[str] | None = None, repeats: int = 4
    ) -> Queries:
        """Prompts for each combination of the categories of a split, each `repeats` times.

        With all attributes and 4 repeats these are the paper's 5 × 5 × 5 × 4 = 500 evaluation prompts; with one
        attribute, "train" and 40 repeats, its 200 prompts that weights for that attribute are learned from.
        """
        chosen = list(self.categories) if attributes is None else list(attributes)
        ranges = [self._split(a, split) for a in chosen]
        rows = np.array([row for row in product(*ranges) for _ in range(repeats)])  # (Q, attributes)
        labels = {a: np.full(len(rows), -1) for a in self.categories}
        labels.update({a: rows[:, j] for j, a in enumerate(chosen)})
        return Queries([self.prompt(**dict(zip(chosen, map(int, row)))) for row in rows], labels)

    def take(self, positions: np.ndarray) -> Attributes:
        """The images at these positions."""
        chosen = np.arange(len(self))[positions]
        labels = {a: v[chosen] for a, v in self.labels.items()}
        prompts = [self.prompts[i] for i in chosen]
        return Attributes(self.images[chosen], prompts, labels, self.categories, self.licence, self.glue)

    def hold_out(self, count: int, split: str = "validation", seed: int = 0) -> tuple[Attributes, Attributes]:
        """(rest, queries): all images of `count` combinations of the split's categories, taken out for queries.

        No image of the rest shows one of these combinations, but its images share categories with them.
        """
        table = np.stack(list(self.labels.values()), axis=1)  # (N, attributes)
        inside = np.stack([np.isin(v, self._split(a, split)) for a, v in self.labels.items()], axis=1).all(
            axis=1
        )
        combinations = np.unique(table[inside], axis=0)
        if not 0 < count < len(combinations):
            raise UndeError(
                f"cannot hold out {count} combinations: the {split} categories have {len(combinations)} in these "
                f"images; expected 1 to {len(combinations) - 1}"
            )
        order = np.random.RandomState(seed).permutation(len(combinations))[:count]
        held = (table[:, None, :] == combinations[order][None, :, :]).all(axis=2).any(axis=1)  # (N,)
        return self.take(~held), self.take(held)

    def _middle(self, attribute: str) -> int:
        return (len(self.categories[attribute]) + 1) // 2

    def _split(self, attribute: str, split: str) -> range:
        self._known(attribute)
        if split not in ("train", "validation"):
            raise unknown("split", split, ["train", "validation"])
        middle, end = self._middle(attribute), len(self.categories[attribute])
        return range(middle) if split == "train" else range(middle, end)

    def _known(self, attribute: str) -> None:
        if attribute not in self.categories:
            raise unknown("attribute", attribute, self.categories)


def join(parts: Mapping[str, str], glue: Mapping[str, str]) -> str:
    """Parts of a prompt, in the order of `glue`.

    >>> glue = {"style": "", "subject": " of ", "background": ", "}
    >>> join({"subject": "a cat", "style": "a cyanotype", "background": "on a beach"}, glue)
    'a cyanotype of a cat, on a beach'
    >>> join({"background": "on a beach"}, glue)
    'on a beach'
    """
    text = ""
    for attribute, before in glue.items():
        if attribute in parts:
            text += (before if text else "") + parts[attribute]
    return text
