"""Weights from an index alone: perturbed training examples that should find themselves.

The mathematics, the search for a strength and the guard are in `unde.weights.retrieval`; here examples are drawn,
perturbed and scored. Four disjoint parts of the training data search the strength, learn, choose and report.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console, methods
from unde.data import Rows, digest
from unde.errors import UndeError
from unde.index.checkpoints import fingerprints
from unde.index.queries import BadQuery, compute
from unde.methods import Method
from unde.tasks.perturb import CORPUS, Perturbation
from unde.weights import Weights, retrieval
from unde.weights.retrieval import Copies

if TYPE_CHECKING:
    from unde.index.index import Index

SEARCHED = 48  # examples that the search for a strength looks at, up to five times
FEWEST = 10  # examples in a part
Perturb = Callable[[Any, float, np.random.Generator], Any]


def learn(index: Index, method: str | Method | None, perturb: Any, examples: int, seed: int) -> Weights:
    """See `Index.learn_weights`."""
    chosen = methods.on_index(method, index.method)
    copier = Copier(index, chosen, perturb, seed)
    parts = Parts.drawn(index, copier.content, examples, seed)
    kind = copier.kind
    found = retrieval.search(
        lambda strength: float(copier.copies(parts.search, strength).found().float().mean()),
        kind.least,
        kind.most,
    )
    held_out = copier.copies(parts.choose, found.strength)
    weak = held_out if found.strength == kind.least else copier.copies(parts.choose, kind.least)
    values, best, judged = retrieval.choose(
        copier.copies(parts.learn, found.strength), held_out, weak, seed=seed
    )
    told = copier.copies(parts.report, found.strength)
    before, after = (float(told.found(w).float().mean()) for w in (None, values))
    copier.check_model()
    provenance = {
        "how": "self-retrieval",
        "method": chosen.name,
        "scores": told.scores.provenance,
        "perturbation": kind.name,
        **retrieval.record(found, judged, best),
        "found": {"unweighted": before, "weighted": after, "copies": len(parts.report)},
        "examples": parts.as_dict(),
        "seed": seed,
    }
    digests = copier.digests(torch.cat([parts.search, parts.learn, parts.choose, parts.report]))
    weights = Weights(values, told.scores.groups, digests, provenance)
    console.note(summary(weights))
    return weights


def summary(weights: Weights) -> str:
    """What self-retrieval did, in a line or two.

    >>> summary(Weights.uniform(["a"]))
    'these weights were not learned by self-retrieval'
    """
    p = weights.provenance
    if p.get("how") != "self-retrieval":
        return "these weights were not learned by self-retrieval"
    copies = f"copies ({p['perturbation']}, strength {p['strength']:.2g})"
    if not p["accepted"]:
        return f"weights stay uniform, the unweighted method: {p['refused']}"
    share = f"{100 * p['found']['unweighted']:.0f} % → {100 * p['found']['weighted']:.0f} %"
    return f"{p['found']['copies']} held-out {copies} find their original: {share}"


@dataclass(frozen=True)
class Parts:
    """Positions of training examples, disjoint also by content."""

    search: Tensor
    learn: Tensor
    choose: Tensor
    report: Tensor
    rest: Tensor  # used for nothing

    @classmethod
    def drawn(cls, index: Index, content: Tensor, examples: int, seed: int) -> Parts:
        """One of each set of equal examples, in random order, dealt out; all parts shrink where there are few."""
        if examples < 2 * FEWEST:
            raise UndeError(f"examples is {examples}: expected at least {2 * FEWEST} to learn weights from")
        order = np.random.default_rng([seed, 0]).permutation(len(content))
        order = order[~index.skipped.numpy()[order]]
        first = np.sort(np.unique(content.numpy()[order], return_index=True)[1])
        order = torch.from_numpy(order[first])
        sizes = [SEARCHED, examples, examples // 2, examples // 2]
        scale = min(1.0, len(order) / sum(sizes))
        sizes = [int(scale * size) for size in sizes]
        if min(sizes) < FEWEST:
            need = -(-FEWEST * sum([SEARCHED, examples, examples // 2, examples // 2]) // SEARCHED)
            raise UndeError(
                f"{len(order)} different training examples are too few to search, learn, choose and report on "
                f"disjoint parts: expected at least {need}. Stay with the unweighted method, or give queries to learn from"
            )
        return cls(*order[: sum(sizes)].split(sizes), order[sum(sizes) :])

    def as_dict(self) -> dict[str, list[int]]:
        return {name: getattr(self, name).tolist() for name in ("search", "learn", "choose", "report")}


class Copier:
    """Makes perturbed copies of training examples and scores them."""

    def __init__(self, index: Index, method: Method, perturb: Any, seed: int) -> None:
        if index.model is None or index.task is None or index.train_data is None:
            missing = [n for n in ("model", "task") if getattr(index, n) is None]
            missing += ["train_data"] * (index.train_data is None)
            raise UndeError(
                "self-retrieval runs perturbed training examples through the model, but this index was opened without "
                f"its {', '.join(missing)}: pass {', '.join(f'{n}=' for n in missing)} to Index.open"
            )
        self.index, self.method, self.seed = index, method, seed
        self.model, self.task, self.rows = index.model, index.task, index.train_data
        self.kind = self._kind(perturb)
        digests = index.extras("digest").numpy()
        self._digests = digests
        self.content = torch.from_numpy(np.unique(digests, return_inverse=True)[1])
        if not isinstance(self.kind, WeightNoise):
            self._try_out()

    def copies(self, which: Tensor, strength: float) -> Copies:
        """Copies of the training examples `which`, scored under the method with its sign."""
        made = [self._query(int(i), strength) for i in which]
        under = nullcontext
        if isinstance(self.kind, WeightNoise):
            under = partial(self.kind.on, self.model, strength, self.seed)
        try:
            features = compute(self.index, Rows(made, self.index.collate), under)
        except BadQuery as e:
            raise UndeError(
                f"the copy of training example {int(which[e.row])} at strength {strength:.3g} ({self.kind.name}) has a "
                "loss or gradient that is NaN or infinite: pass a gentler perturb=, or look at the model"
            ) from None
        scores = self.index.scores_of(self.method.signed, features.features, features.digests)
        return Copies(scores, which, self.content)

    def digests(self, which: Tensor) -> list[str]:
        """Of the originals, as queries have them."""
        return [f"{int(d) % (1 << 64):016x}" for d in self._digests[which.numpy()]]

    def check_model(self) -> None:
        if fingerprints(self.model, self.index.checkpoints) != self.index.manifest.models:
            raise UndeError("perturb= changed the model's weights: it may change examples only")

    def _query(self, i: int, strength: float) -> Any:
        random = np.random.default_rng([self.seed, 1, i])
        copy = self.kind(self.rows[i], strength, random)
        return self.method.query(self.task, copy, np.random.default_rng([self.seed, 2, i]))

    def _kind(self, perturb: Any) -> Perturbation:
        if perturb is None:
            step = max(1, len(self.rows) // CORPUS)
            some = [self.rows[i] for i in range(0, len(self.rows), step)][:CORPUS]
            return self.task.perturbation(self.model, some)
        if perturb == "weights":
            return WeightNoise()
        if isinstance(perturb, Perturbation):
            return perturb
        if callable(perturb):
            return Given(perturb)
        raise UndeError(
            f"perturb is {perturb!r}: expected a function (example, strength, random) -> example, 'weights', or None "
            "for what the task knows"
        )

    def _try_out(self) -> None:
        """What a perturbation must keep to: shapes, and the random numbers it is given."""
        for i in (0, len(self.rows) - 1):
            original = self.rows[i]
            one, two = (
                self.kind(self.rows[i], self.kind.most, np.random.default_rng([self.seed, 1, i]))
                for _ in "12"
            )
            if digest(one) != digest(two):
                raise UndeError(
                    f"{self.kind.name} gives another copy of example {i} when called again: draw random numbers from "
                    "the generator that it is given, and from nowhere else"
                )
            if form(one) != form(original):
                raise UndeError(
                    f"{self.kind.name} made {form(one)} of example {i}, which is {form(original)}: expected the same "
                    "structure, shapes and types"
                )
        self.check_model()


def form(value: Any) -> Any:
    """Structure, shapes and types of an example, without its content.

    >>> form({"x": torch.zeros(2), "y": 1})
    {'x': 'float32 (2,)', 'y': 'int'}
    """
    if isinstance(value, dict):
        return {k: form(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(v, (Tensor, np.ndarray, dict)) for v in value):
        return type(value)(form(v) for v in value)
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return (
        f"{type(value).__name__} of {len(value)}"
        if isinstance(value, (list, tuple))
        else type(value).__name__
    )


@dataclass(frozen=True)
class Given:
    """A user's function, with strengths from 0.05 to 1."""

    change: Perturb
    least: float = 0.05
    most: float = 1.0

    @property
    def name(self) -> str:
        return getattr(self.change, "__name__", type(self.change).__name__)

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        return self.change(example, strength, random)


@dataclass(frozen=True)
class WeightNoise:
    """Examples stay; every tensor of the model gets noise of `strength` times its own root mean square while the
    gradients of the copies are taken. For inputs that nobody knows how to perturb."""

    name: str = "noise on the model's weights"
    least: float = 0.02
    most: float = 0.5

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        return example

    @contextmanager
    def on(self, model: nn.Module, strength: float, seed: int) -> Generator[None]:
        """Inside, the noisy model; after, the very same weights, whatever happened."""
        own = [(p, p.detach().clone()) for p in model.parameters()]
        try:
            with torch.no_grad():
                for i, (p, value) in enumerate(own):
                    random = np.random.default_rng([seed, 3, i])
                    z = torch.from_numpy(random.standard_normal(tuple(p.shape), dtype=np.float32))
                    p.add_(z.to(p) * (strength * value.float().square().mean().sqrt()).to(p))
            yield
        finally:
            with torch.no_grad():
                for p, value in own:
                    p.copy_(value)
