"""Perturbed copies of texts: some of their tokens are replaced by others of the training data.

Which tokens and by what does not depend on the strength: a stronger copy replaces the same ones and more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from unde.errors import UndeError
from unde.tasks.tokens import IGNORE

_NONE = np.empty(0, np.int64)
R = TypeVar("R", bound="Replace")


@dataclass(frozen=True, eq=False)
class Replace:
    """Each token of `input_ids` replaced, with probability `strength`, by a token of the training data.

    Special tokens, padding and tokens whose label is −100 (a prompt) stay. Labels follow.
    """

    relabels: ClassVar[bool] = True  # whether labels that are tokens follow

    pool: np.ndarray  # tokens of the training data
    special: frozenset[int] = frozenset()
    name: str = "replaced tokens"
    least: float = 0.05
    most: float = 0.5

    @classmethod
    def of(cls: type[R], examples: Sequence[Any], special: Collection[int] = ()) -> R:
        """With the tokens of these examples, as often as they occur."""
        tokens = np.concatenate([_tokens(e)[cls.free(e, special)] for e in examples] or [_NONE])
        if len(tokens) == 0:
            raise UndeError(
                "no token of the training data can be replaced: all are special, padded or masked"
            )
        return cls(tokens, frozenset(special))

    @staticmethod
    def free(example: Any, special: Collection[int]) -> np.ndarray:
        """(T,) True where a token may be replaced."""
        free = _ordinary(example, special)
        return free & (_labels(example) != IGNORE) if _per_token(example) else free

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        ids = _tokens(example)
        changed = _draw(ids, self.free(example, self.special), self.pool, strength, random)
        out = {**example, "input_ids": _like(example["input_ids"], changed)}
        if self.relabels and _per_token(example):
            labels = _labels(example)
            out["labels"] = _like(example["labels"], np.where(labels == ids, changed, labels))
        return out


@dataclass(frozen=True, eq=False)
class ReplaceInputs(Replace):
    """The same where labels are classes, of a text or of its tokens: they stay as they are."""

    relabels: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class ReplaceSeen(ReplaceInputs):
    """The same where labels are tokens that are hidden: these stay, and what is around them may be replaced.

    `prepare` hides tokens of examples that come without labels.
    """

    prepare: Callable[[Any], Any] = lambda example: example

    @staticmethod
    def free(example: Any, special: Collection[int]) -> np.ndarray:
        return _ordinary(example, special) & (_labels(example) == IGNORE)

    def after(self, prepare: Callable[[Any], Any]) -> ReplaceSeen:
        return dataclasses.replace(self, prepare=prepare)

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        return super().__call__(self.prepare(example), strength, random)


@dataclass(frozen=True, eq=False)
class ReplaceBoth(ReplaceInputs):
    """Tokens of a source text, and of the target text that is predicted from it: each by tokens of its own side."""

    targets: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)

    @classmethod
    def of(cls, examples: Sequence[Any], special: Collection[int] = ()) -> ReplaceBoth:
        targets = np.concatenate(
            [_labels(e)[cls._replaceable_targets(e, special)] for e in examples] or [_NONE]
        )
        return dataclasses.replace(super().of(examples, special), targets=targets)

    @staticmethod
    def free(example: Any, special: Collection[int]) -> np.ndarray:
        return _ordinary(example, special)

    @staticmethod
    def _replaceable_targets(example: Any, special: Collection[int]) -> np.ndarray:
        labels = _labels(example)
        return (labels != IGNORE) & ~np.isin(labels, list(special))

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        out = super().__call__(example, strength, random)
        old = _labels(example)
        if len(self.targets) == 0:
            return out
        new = _draw(old, self._replaceable_targets(example, self.special), self.targets, strength, random)
        out["labels"] = _like(example["labels"], new)
        if "decoder_input_ids" in example:  # the labels one place later
            seen = np.array(example["decoder_input_ids"], dtype=np.int64)
            seen[1:] = np.where(seen[1:] == old[:-1], new[:-1], seen[1:])
            out["decoder_input_ids"] = _like(example["decoder_input_ids"], seen)
        return out


def special_tokens(model: Any) -> frozenset[int]:
    """The ids that a model's config names: beginning, end, padding, separators, mask."""
    names = ("bos", "eos", "pad", "cls", "sep", "mask", "unk", "decoder_start")
    config = getattr(model, "config", None)
    values = [getattr(config, f"{name}_token_id", None) for name in names]
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    return frozenset(v for v in flat if isinstance(v, int))


def _draw(
    ids: np.ndarray, free: np.ndarray, pool: np.ndarray, strength: float, random: np.random.Generator
) -> np.ndarray:
    chance, choice = random.random(len(ids)), random.integers(len(pool), size=len(ids))
    return np.where(free & (chance < strength), pool[choice], ids)


def _tokens(example: Any) -> np.ndarray:
    return np.asarray(example["input_ids"], dtype=np.int64)


def _labels(example: Any) -> np.ndarray:
    return np.asarray(example["labels"])


def _per_token(example: Any) -> bool:
    """Whether there is a label for each token, and not one for the text."""
    return "labels" in example and _labels(example).shape == _tokens(example).shape


def _ordinary(example: Any, special: Collection[int]) -> np.ndarray:
    """(T,) True at tokens that are neither special nor padding."""
    ids = _tokens(example)
    free = ~np.isin(ids, list(special))
    for name, value in (("attention_mask", True), ("special_tokens_mask", False)):
        mask = example.get(name)
        if mask is not None and np.asarray(mask).shape == ids.shape:
            free &= (np.asarray(mask) != 0) == value
    return free


def _like(old: Any, new: np.ndarray) -> Any:
    """`new` as the type that `old` has."""
    if isinstance(old, Tensor):
        return torch.from_numpy(new).to(old)
    return new.astype(old.dtype) if isinstance(old, np.ndarray) else new.tolist()
