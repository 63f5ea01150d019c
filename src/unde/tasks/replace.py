"""Perturbed copies of texts: some of their tokens are replaced by others of the training data.

Which tokens and by what does not depend on the strength: a stronger copy replaces the same ones and more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.errors import UndeError
from unde.tasks.tokens import IGNORE

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Replace:
    """Each token of `input_ids` replaced, with probability `strength`, by a token of the training data.

    Special tokens and padding stay. What else stays depends on what `labels` are:

    "tokens"   the tokens themselves, which they follow; tokens whose label is −100 (a prompt) stay
    "classes"  of a text or of its tokens: they stay, and so do tokens whose label is −100
    "hidden"   what hidden tokens were: tokens with a label stay; `prepare` hides some in examples without labels
    "target"   another text, whose tokens are replaced by `targets`, those of its own side
    """

    pool: np.ndarray  # tokens of the training data
    special: frozenset[int] = frozenset()
    labels: str = "tokens"
    targets: np.ndarray = field(default_factory=lambda: _NONE)
    prepare: Callable[[Any], Any] = lambda example: example
    name: str = "replaced tokens"
    least: float = 0.05
    most: float = 0.5

    @classmethod
    def of(
        cls,
        examples: Sequence[Any],
        special: Collection[int] = (),
        labels: str = "tokens",
        prepare: Any = None,
    ) -> Replace:
        """With the tokens of these examples, as often as they occur."""
        made = cls(_NONE, frozenset(special), labels, prepare=prepare or cls.prepare)
        examples = [made.prepare(e) for e in examples]
        pool = np.concatenate([_tokens(e)[made._free(e)] for e in examples] or [_NONE])
        if len(pool) == 0:
            raise UndeError(
                "no token of the training data can be replaced: all are special, padded or masked"
            )
        targets = [_labels(e)[made._free_targets(e)] for e in examples] if labels == "target" else [_NONE]
        return replace(made, pool=pool, targets=np.concatenate(targets))

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        example = self.prepare(example)
        ids = _tokens(example)
        changed = _draw(ids, self._free(example), self.pool, strength, random)
        out = {**example, "input_ids": _like(example["input_ids"], changed)}
        if self.labels == "tokens" and _per_token(example):
            labels = _labels(example)
            out["labels"] = _like(example["labels"], np.where(labels == ids, changed, labels))
        if self.labels != "target" or len(self.targets) == 0:
            return out
        old = _labels(example)
        new = _draw(old, self._free_targets(example), self.targets, strength, random)
        out["labels"] = _like(example["labels"], new)
        if "decoder_input_ids" in example:  # the labels one place later
            seen = np.array(example["decoder_input_ids"], dtype=np.int64)
            seen[1:] = np.where(seen[1:] == old[:-1], new[:-1], seen[1:])
            out["decoder_input_ids"] = _like(example["decoder_input_ids"], seen)
        return out

    def _free(self, example: Any) -> np.ndarray:
        """(T,) True where a token may be replaced."""
        ids = _tokens(example)
        free = ~np.isin(ids, list(self.special))
        for name, value in (("attention_mask", True), ("special_tokens_mask", False)):
            mask = example.get(name)
            if mask is not None and np.asarray(mask).shape == ids.shape:
                free &= (np.asarray(mask) != 0) == value
        if self.labels == "target" or not _per_token(example):
            return free
        return free & ((_labels(example) == IGNORE) == (self.labels == "hidden"))

    def _free_targets(self, example: Any) -> np.ndarray:
        labels = _labels(example)
        return (labels != IGNORE) & ~np.isin(labels, list(self.special))


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


def _like(old: Any, new: np.ndarray) -> Any:
    """`new` as the type that `old` has."""
    if isinstance(old, Tensor):
        return torch.from_numpy(new).to(old)
    return new.astype(old.dtype) if isinstance(old, np.ndarray) else new.tolist()
