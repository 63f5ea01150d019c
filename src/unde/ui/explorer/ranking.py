"""What was asked, held so that other weights are one product: contributions of every group to every example.

Scores are linear in w, Σ_j w_j C_nj, but for what `final` does to them (cosine divides by weighted norms, DAS squares):
that is done after the product, as everywhere else. Where there are more groups than a page has room for sliders, a
slider moves a block of them together, in proportion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.data import Rows, evenly
from unde.devices import put
from unde.errors import UndeError
from unde.evaluate import source_shares
from unde.groups import unet_stages
from unde.index.query_features import QueryFeatures
from unde.markup import score
from unde.methods import Method
from unde.scoring import GroupScores, from_arrays
from unde.scoring.base import Names
from unde.scoring.train_features import SelectedFeatures
from unde.ui.explorer.catalogue import Catalogue
from unde.ui.explorer.jobs import BackgroundJob
from unde.ui.explorer.query_builder import TYPED, ExplorerQuery, QueryBuilder, concatenate
from unde.ui.report.weights import block_names, short_names

SLIDERS = 24  # more groups than this share sliders
LARGEST = 1e6  # a weight
SHARE = 4  # contributions are held if they take at most this fraction of the budget, 1 in 4
SOURCES = 20  # that are listed
TOTALS = 3  # scores that are held beside them


@dataclass(frozen=True)
class Sliders:
    """Which groups move together."""

    names: list[str]
    of: Tensor  # (M,): the slider of each group
    members: list[list[str]]  # the groups of each slider, without what their names have in common

    @classmethod
    def for_groups(cls, groups: Sequence[str]) -> Sliders:
        """One for each group, or for each block of a model with many.

        >>> Sliders.for_groups(["a", "b"]).names
        ['a', 'b']
        >>> Sliders.for_groups([f"layers.{i}.{n}" for i in range(12) for n in "kqv"]).of[:4].tolist()
        [0, 0, 0, 1]
        """
        few = len(groups) <= SLIDERS
        blocks = list(groups) if few else unet_stages(groups) or block_names(groups) or list(groups)
        if len(set(blocks)) > SLIDERS:
            of, short = [i * SLIDERS // len(groups) for i in range(len(groups))], short_names(groups)
            runs = [[short[groups[i]] for i in range(len(groups)) if of[i] == b] for b in range(SLIDERS)]
            names = [f"{run[0]} … {run[-1]}" if len(run) > 1 else run[0] for run in runs]
        else:
            short, number = short_names(blocks), {name: b for b, name in enumerate(dict.fromkeys(blocks))}
            of, names = [number[name] for name in blocks], [short[name] for name in number]
        members = [
            _without_prefix([groups[i] for i, b in enumerate(of) if b == s]) for s in range(len(names))
        ]
        return cls(names, torch.tensor(of), members)

    def means(self, weights: Tensor) -> Tensor:
        """(B,): where the sliders stand under some weights."""
        total = torch.zeros(len(self.names), dtype=weights.dtype).index_add_(0, self.of, weights)
        return total / torch.bincount(self.of, minlength=len(self.names))

    def weights(self, base: Tensor, values: Tensor) -> Tensor:
        """(M,) weights when the sliders stand at `values` (B,); within a block in the proportions of `base`."""
        means = self.means(base)
        moved = values != means
        factor = torch.where(means > 0, values / means.clamp(min=1e-30), torch.zeros_like(means))
        scaled = base * factor[self.of]
        bare = (means <= 0)[self.of]  # nothing to be in proportion to
        return torch.where(moved[self.of], torch.where(bare, values[self.of], scaled), base)


class ScoreCache:
    """Scores of one query against the training examples, or of one example against queries, under any weights.

    `contributions` (n, M) of the groups make that one product. They are None where memory does not hold them: then
    the features are read again for weights that were not asked for just now.
    """

    def __init__(
        self, contributions: Tensor | None, total: Callable[[Tensor], Tensor], usable: Tensor
    ) -> None:
        self.contributions, self._total, self.usable = contributions, total, usable
        self._all = bool(usable.all())
        self._last: OrderedDict[bytes, Tensor] = OrderedDict()

    @classmethod
    def forward(cls, scores: GroupScores) -> ScoreCache:
        """The training examples behind a query."""
        every, one, usable = slice(0, scores.shape[1]), slice(0, 1), ~scores.train.skipped()
        if 4 * scores.shape[1] * len(scores.groups) > scores.memory // SHARE:
            return cls(None, lambda w: scores.total(w)[0], usable)
        parts = scores.contributions(one)[0].cpu()
        held = cls(parts, lambda w: finish(scores, product(parts, w)[None], w, one, every)[0], usable)
        held.total(torch.ones(len(scores.groups)))  # norms and leverages are read here, not under a slider
        return held

    @classmethod
    def backward(cls, scores: GroupScores) -> ScoreCache:
        """The queries that a training example, the only one of these scores, is behind."""
        every, one = slice(0, scores.shape[0]), slice(0, 1)
        parts = scores.contributions(every)[:, 0].cpu()
        usable = torch.ones(len(parts), dtype=torch.bool)
        return cls(parts, lambda w: finish(scores, product(parts, w)[:, None], w, every, one)[:, 0], usable)

    def total(self, w: Tensor) -> Tensor:
        """(n,) scores under weights (M,); the ones used last are held on to."""
        key = w.numpy().tobytes()
        found = self._last.get(key)
        if found is None:
            found = self._last[key] = self._total(w)
            while len(self._last) > TOTALS:
                self._last.popitem(last=False)
        return found

    def best(self, total: Tensor, k: int, among: Tensor | None, largest: bool) -> list[tuple[int, float]]:
        """The k best of those `among` which to choose, best first."""
        order = -total.numpy() if largest else total.numpy()
        if among is not None or not self._all:
            usable = (self.usable if among is None else self.usable & among).numpy()
            k = min(k, int(usable.sum()))
            order = np.where(usable, order, np.inf)
        k = min(k, len(order))
        if not k:
            return []
        last = np.partition(order, k - 1)[k - 1]
        ahead, level = np.flatnonzero(order < last), np.flatnonzero(order == last)
        at = np.sort(np.concatenate([ahead, level[: k - len(ahead)]]))  # of equal scores the earlier examples
        at = at[np.argsort(order[at], kind="stable")]
        return [(int(i), float(total[i])) for i in at]

    @property
    def nbytes(self) -> int:
        parts = 0 if self.contributions is None else self.contributions.nbytes
        return TOTALS * self.usable.nbytes * 4 + parts


def product(contributions: Tensor, w: Tensor) -> Tensor:
    """(n,): in this thread alone. Two that wait for each other on a busy machine take longer than one does."""
    return torch.from_numpy(np.einsum("nm,m->n", contributions.numpy(), w.numpy()))


def finish(scores: GroupScores, linear: Tensor, w: Tensor, queries: slice, train: slice) -> Tensor:
    """What `final` makes of the product, where scores are computed."""
    return scores.finish(put(linear, scores.train.device), w, queries, train).cpu()


def scored(at: int, value: float) -> dict[str, Any]:
    """An example of a ranking, for the page."""
    return {"at": at, "value": value, "text": score(value)}


def move_sliders(sliders: Sliders, base: Tensor, values: Any) -> Tensor:
    """(M,) weights of what the page says: None, or for each slider a number or those of its groups."""
    if values is None:
        return base
    sizes = [len(groups) for groups in sliders.members]
    if not isinstance(values, list) or len(values) != len(sizes) or not all(map(_is_place, values, sizes)):
        raise UndeError(f"weights of the page: expected {len(sizes)} numbers from 0 to {LARGEST:g}")
    blocks = [sum(v) / len(v) if isinstance(v, list) else v for v in values]
    w = sliders.weights(base, torch.tensor(blocks, dtype=torch.float32))
    for b, single in enumerate(values):
        if isinstance(single, list):
            w = w.masked_scatter(sliders.of == b, torch.tensor(single, dtype=w.dtype))
    return w


def _is_place(value: Any, size: int) -> bool:
    """Whether a slider can stand there, or each of its groups."""
    if isinstance(value, list):
        return len(value) == size and all(_is_place(v, 0) and not isinstance(v, list) for v in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _without_prefix(names: Sequence[str]) -> list[str]:
    """Names without the first parts that all of them share.

    >>> _without_prefix(["h.0.attn.q", "h.0.mlp"]), _without_prefix(["h.0"])
    (['attn.q', 'mlp'], ['0'])
    """
    paths = [name.split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return [".".join(path[shared:]) for path in paths]


MOST = 200  # queries, evenly spaced: each takes a pass of the model, once
POOLED = {"eval": "held-out", "learn": "learning", "train": "training"}
AT_ONCE = 8  # between two words about how far it is


class Pool:
    """Queries to look at from a training example: held-out ones, and those asked about in this session.

    Where there are neither, other training examples take their place.
    """

    def __init__(self, builder: QueryBuilder) -> None:
        self.builder = builder
        self._kept: tuple[list[str], QueryFeatures] | None = None  # of the queries that do not change

    def key(self, method: Method) -> list[str]:
        """What it is made of, beside the queries that do not change."""
        return [asked.key for asked in self.builder.recent(method)]

    def build(self, method: Method, at: int, job: BackgroundJob) -> tuple[Catalogue, QueryFeatures, str]:
        """What is ranked for training example `at`, its features, and what it is in words."""
        builder = self.builder
        stored = [(role, i) for role, some in builder.roles.items() for i in range(len(some))]
        chosen = [stored[i] for i in evenly(len(stored), MOST)] if stored else []
        recent = builder.recent(method, {*chosen, ("train", at)})
        notes = [f"looked at {len(chosen)} of {len(stored):,} queries of the setup"] if chosen else []
        if not chosen and not recent:
            chosen = [("train", i) for i in evenly(len(builder.train), MOST)]
            notes = [f"there are no queries yet: looked at {len(chosen)} of the training examples instead"]
        catalogues = {**builder.roles, "train": builder.train}
        rows = [catalogues[kind].rows[i] for kind, i in chosen]
        names = [f"{POOLED[kind]} {catalogues[kind].item(i).name}" for kind, i in chosen]
        questions: list[dict[str, Any]] = [{"kind": kind, "at": i} for kind, i in chosen]
        if rows:
            method.check_query(rows[0])
        parts = [self._of(rows, list(names), job)] if rows else []
        for query in recent:
            assert query.features is not None
            rows.append(query.rows[0])
            header, question = query.header, query.header.question or {}
            asked_as = builder.classes[question["label"]] if builder.classes and "label" in question else None
            name = f"{header.name} {len(names) + 1}" if question.get("kind") in TYPED else header.name
            names.append(name if asked_as is None else f"{name} as {asked_as}")
            questions.append(query.header.question or {})
            parts.append(replace(query.features, digests=[""]))
        if recent:
            session = f"the {len(recent)} asked in this session"
            notes.append(f"and {session}" if notes else f"looked at {session}")
        note = f"{', '.join(notes)}."
        catalogue = Catalogue(Rows(rows, builder.collate), builder.setup, names, questions)
        return catalogue, concatenate(parts), note[0].upper() + note[1:]

    def _of(self, rows: list[Any], names: list[str], job: BackgroundJob) -> QueryFeatures:
        if self._kept is None or self._kept[0] != names:
            parts = []
            for start in range(0, len(rows), AT_ONCE):
                job.tell("computing features of the queries, once", start, len(rows))
                some = Rows(rows[start : start + AT_ONCE], self.builder.collate)
                parts.append(self.builder.index.features(some))
            self._kept = names, concatenate(parts)
        return self._kept[1]


def select_example(scores: GroupScores, at: int) -> GroupScores:
    """The same scores against one training example alone."""
    return replace(scores, train=SelectedFeatures(scores.train, torch.tensor([at])))


@dataclass(eq=False)
class Answer:
    """What came of a question, held so that weights, filters and counts cost no pass."""

    id: str
    scores: GroupScores
    cache: ScoreCache
    of: Catalogue  # what is ranked
    where: str  # "train" or "pool"
    asked: list[ExplorerQuery]
    method: Method
    plus: int = 1  # of `asked`; the others are subtracted
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    shades: dict[tuple[bytes, int], str] = field(default_factory=dict)
    baselines: dict[str, Tensor] = field(default_factory=dict)  # (N,) scores


def by_source(answers: Sequence[Answer], sources: Names, w: Tensor) -> list[dict[str, Any]]:
    """Shares of the sources in the first answer, and their means over all of them, the largest share first."""
    totals = torch.stack([a.cache.total(w).masked_fill(~a.cache.usable, 0.0) for a in answers])
    one, every = (source_shares(from_arrays(part), sources) for part in (totals[:1], totals))
    means, count = dict(zip(every.names, every.shares)), sum(one.examples)
    return [
        {
            "name": str(name),
            "share": share.mean,
            "total": total.mean,
            "examples": examples / count,
            "mean": means[name].mean,
            "ci95": means[name].ci95 if len(answers) > 1 else None,
            "questions": len(answers),
        }
        for name, share, total, examples in zip(one.names, one.shares, one.totals, one.examples)
    ][:SOURCES]
