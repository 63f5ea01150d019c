"""Weights without labels: `Index.learn_weights`. Training examples are drawn and perturbed; their copies are scored.

Disjoint parts of the training data search the strength of perturbations, learn, and report.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, digest, map_tensors
from unde.errors import UndeError
from unde.fingerprints import to_digest
from unde.index.query_features import BadQuery
from unde.index.state import IndexState
from unde.methods import Method
from unde.scoring.group_scores import GroupScores
from unde.tasks.perturb import CORPUS, Perturbation
from unde.weights import Weights, learn_weights
from unde.weights.contributions import CACHE_SHARE
from unde.weights.retrieval import Copies, StrengthSearch, effect_in_words, search_strength

# Passes of the search, for one kind of perturbation and for two, and of the report; `examples` more are learned from.
SEARCH_SIZES = {1: (48, 5), 2: (30, 4)}  # examples, strengths tried at most
REPORTING = 100
EXAMPLES = 200  # to learn from
FEWEST = 10  # examples in a part
COPY_SETS = 4  # sets of copies in memory at once for each kind of perturbation, with room for K g(n)
Perturb = Callable[[Any, float, np.random.Generator], Any]


def learn_without_labels(
    index: IndexState, method: Method, scores: GroupScores | None, perturb: Any, examples: int, seed: int
) -> Weights:
    """Learn weights from scores of queries by Algorithm 1, or from perturbed training examples; print what they do."""
    if scores is not None and (perturb, examples) != (None, EXAMPLES):
        raise UndeError("perturb= and examples= belong to learning without queries: leave them out")
    if scores is not None:
        weights, learned_from = learn_weights(scores, seed=seed), scores
        how, found = f"{console.counted(len(scores), 'query')} (Algorithm 1)", list[str]()
        with suppress(UndeError):  # no model, or too few examples
            found = Retrieval(Copier(index, method, None, seed), EXAMPLES).report(weights)
    else:
        retrieval = Retrieval(Copier(index, method, perturb, seed), examples)
        weights, learned_from = retrieval.weights(), next(iter(retrieval.learning.values())).scores
        how = f"{console.counted(examples, 'perturbed training example')} (Algorithm 1)"
        found = retrieval.report(weights)
    effect = "; ".join([effect_in_words(learned_from, weights), *found])
    console.note(f"weights from {how}: {effect}. Only `unde calibrate` tells whether they help on this model")
    return weights


class Retrieval:
    """Perturbed training examples under one method: to learn weights from, and to report."""

    def __init__(self, copier: Copier, examples: int) -> None:
        """Search the strength of each kind."""
        self.copier, count = copier, len(copier.kinds)
        self.parts = Parts.draw(copier.index, copier.content, examples, count, copier.seed)
        self.searches: dict[str, StrengthSearch] = {}
        for i, kind in enumerate(copier.kinds):
            share = partial(self._share, kind, self.parts.search[i::count])
            steps = SEARCH_SIZES[count][1]
            self.searches[kind.name] = search_strength(share, kind.least, kind.most, steps=steps)

    def _share(self, kind: Perturbation, which: Tensor, strength: float) -> float:
        return float(self.copier.copies(kind, which, strength).retrieved().float().mean())

    @cached_property
    def learning(self) -> dict[str, Copies]:
        """Copies of each kind to learn from."""
        return self._copies(self.parts.learn)

    def _copies(self, part: Tensor) -> dict[str, Copies]:
        """Copies of a part at the searched strengths, a share of them for each kind."""
        kinds = self.copier.kinds
        return {
            kind.name: self.copier.copies(kind, part[i :: len(kinds)], self.searches[kind.name].strength)
            for i, kind in enumerate(kinds)
        }

    def weights(self) -> Weights:
        """The mean of the weights that Algorithm 1 learns from copies of each kind."""
        values = torch.stack([copies.learn_top(self.copier.seed) for copies in self.learning.values()]).mean(
            0
        )
        self.copier.check_model()
        scores = next(iter(self.learning.values())).scores
        provenance = {
            "how": "Algorithm 1 on perturbed training examples",
            "method": self.copier.method.name,
            "scores": scores.provenance,
            "strength": {name: s.strength for name, s in self.searches.items()},
            "search": {name: s.shares for name, s in self.searches.items()},
            "examples": self.parts.as_dict(),
            "seed": self.copier.seed,
        }
        return Weights(values, scores.groups, self.copier.digests(self.parts.used), provenance)

    def report(self, weights: Weights) -> list[str]:
        """The shares of held-out copies that find their original, recorded in the weights, and in words."""
        found = weights.provenance["found"] = {}
        for kind, copies in self._copies(self.parts.report).items():
            before, after = (float(copies.retrieved(w).float().mean()) for w in (None, weights.values))
            found[kind] = {"unweighted": before, "weighted": after, "copies": len(copies.originals)}
        self.copier.check_model()
        return [
            f"{100 * f['unweighted']:.0f} % → {100 * f['weighted']:.0f} % of copies ({kind}) find their original"
            for kind, f in found.items()
        ]


@dataclass(frozen=True)
class Parts:
    """Positions of training examples, disjoint also by content."""

    search: Tensor
    learn: Tensor
    report: Tensor

    @classmethod
    def draw(cls, index: IndexState, content: Tensor, examples: int, kinds: int, seed: int) -> Parts:
        """One of each set of equal examples, in random order, dealt out; all parts shrink where there are few."""
        if examples < 2 * FEWEST:
            raise UndeError(f"examples is {examples}: expected at least {2 * FEWEST} to learn weights from")
        order = np.random.default_rng([seed, 0]).permutation(len(content))
        order = order[~index.stored.skipped.numpy()[order]]
        first = np.sort(np.unique(content.numpy()[order], return_index=True)[1])
        order = torch.from_numpy(order[first])
        wanted = [SEARCH_SIZES[kinds][0] * kinds, examples, REPORTING]
        scale = min(1.0, len(order) / sum(wanted))
        sizes = [int(scale * size) for size in wanted]
        if min(sizes) < FEWEST * kinds:
            need = -(-FEWEST * kinds * sum(wanted) // min(wanted))
            raise UndeError(
                f"{len(order)} different training examples are too few to search, learn and report on "
                f"disjoint parts: expected at least {need}. Stay with the unweighted method"
            )
        return cls(*order[: sum(sizes)].split(sizes))

    @property
    def used(self) -> Tensor:
        return torch.cat([self.search, self.learn, self.report])

    def as_dict(self) -> dict[str, list[int]]:
        return {name: getattr(self, name).tolist() for name in ("search", "learn", "report")}


class Copier:
    """Make perturbed copies of training examples and score them."""

    def __init__(self, index: IndexState, method: Method, perturb: Any, seed: int) -> None:
        inputs = index.build_inputs("self-retrieval runs perturbed training examples through the model")
        if seed < 0:
            raise UndeError(f"seed is {seed}: expected a whole number, 0 or larger")
        self.index, self.method, self.seed = index, method, seed
        self.model, self.task, self.rows = inputs.model, inputs.task, inputs.rows
        index.runner.check_model()  # changes found later are due to code called below
        self._user_code = not (perturb is None or perturb == "weights")
        self.kinds = self._kinds(perturb)
        self._digests = index.stored.values("digest").numpy()
        self.content = torch.from_numpy(np.unique(self._digests, return_inverse=True)[1])
        for kind in self.kinds:
            if not isinstance(kind, WeightNoise):
                self._check_perturbation(kind)

    def copies(self, kind: Perturbation, which: Tensor, strength: float) -> Copies:
        """Copies of the training examples `which`, scored under the method with its sign."""
        examples = [self.copy(kind, int(i), strength) for i in which]
        self.check_model()
        noise = partial(kind.on, strength=strength, seed=self.seed) if isinstance(kind, WeightNoise) else None
        try:
            rows = Rows(examples, self.index.collate or self.rows.collate)
            features = self.index.runner.features(rows, noise or nullcontext)
        except BadQuery as e:
            raise UndeError(
                f"the copy of training example {int(which[e.row])} at strength {strength:.3g} ({kind.name}) has a "
                "loss or gradient that is NaN or infinite: pass a gentler perturb=, or look at the model"
            ) from None
        except UndeError as e:
            raise UndeError(
                f"copies of training examples at strength {strength:.3g} ({kind.name}) cannot be scored: {e}"
            ) from e
        scores = self.index.scorer.scores(self.method.signed, features.features, features.digests)
        # 1 in CACHE_SHARE of which is cached
        share = max(1, CACHE_SHARE * scores.memory // (COPY_SETS * len(self.kinds)))
        return Copies(replace(scores, memory=share), which, self.content)

    def digests(self, which: Tensor) -> list[str]:
        """Of the originals, as queries have them."""
        return [to_digest(int(d)) for d in self._digests[which.numpy()]]

    def check_model(self) -> None:
        try:
            self.index.runner.check_model()
        except UndeError:
            if not self._user_code:
                raise
            raise UndeError("perturb= changed the model's weights: it may change examples only") from None

    def copy(self, kind: Perturbation, i: int, strength: float) -> Any:
        """A perturbed copy of training example i, as a query of the method."""
        copy = kind(self.rows[i], strength, np.random.default_rng([self.seed, 1, i]))
        return self.method.query(self.task, copy, np.random.default_rng([self.seed, 2, i]))

    def _kinds(self, perturb: Any) -> list[Perturbation]:
        if perturb is None:
            step = max(1, len(self.rows) // CORPUS)
            some = [self.rows[i] for i in range(0, len(self.rows), step)][:CORPUS]
            kinds = self.task.perturbations(self.model, some)
            if len(kinds) not in SEARCH_SIZES:
                name = f"{type(self.task).__name__}.perturbations"
                raise UndeError(f"{name} gave {len(kinds)} kinds of perturbation: expected one or two")
            return kinds
        if perturb == "weights":
            return [WeightNoise()]
        if isinstance(perturb, Perturbation):
            return [perturb]
        if callable(perturb):
            return [CustomPerturbation(perturb)]
        raise UndeError(
            f"perturb is {perturb!r}: expected a function (example, strength, random) -> example, 'weights', or None "
            "for what the task knows"
        )

    def _check_perturbation(self, kind: Perturbation) -> None:
        """Check that a perturbation keeps shapes, draws from its generator only, and leaves the data alone."""
        for i in (0, len(self.rows) - 1):
            original = self.rows[i]
            before = digest(original)
            clones = [map_tensors(original, Tensor.clone) for _ in range(2)]
            one, two = (kind(e, kind.most, np.random.default_rng([self.seed, 1, i])) for e in clones)
            if digest(clones[0]) != before:
                raise UndeError(
                    f"{kind.name} changes example {i} itself: it must leave what it is given as it is, and return a "
                    "new one"
                )
            if digest(one) != digest(two):
                raise UndeError(
                    f"{kind.name} gives another copy of example {i} when called again: draw random numbers from "
                    "the generator that it is given, and from nowhere else"
                )
            if structure(_drop_labels(one, original)) != structure(original):
                raise UndeError(
                    f"{kind.name} made {structure(one)} of example {i}, which is {structure(original)}: expected the "
                    "same structure, shapes and types"
                )
        self.check_model()


def _drop_labels(copy: Any, original: Any) -> Any:
    """Drop labels that only the copy has: a masked text is masked before it is perturbed."""
    if isinstance(copy, dict) and isinstance(original, dict) and "labels" not in original:
        return {k: v for k, v in copy.items() if k != "labels"}
    return copy


def structure(value: Any) -> Any:
    """Structure, shapes and types of an example, without its content.

    >>> structure({"x": torch.zeros(2), "y": 1})
    {'x': 'float32 (2,)', 'y': 'int'}
    """
    if isinstance(value, dict):
        return {k: structure(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(v, (Tensor, np.ndarray, dict)) for v in value):
        return type(value)(structure(v) for v in value)
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, (list, tuple)) else name


@dataclass(frozen=True)
class CustomPerturbation:
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
    """Noise on the model's weights, for inputs that cannot be perturbed.

    Examples stay as they are; every tensor of the model gets noise of `strength` times its root mean square while the
    gradients of the copies are computed.
    """

    name: str = "noise on the model's weights"
    least: float = 0.02
    most: float = 0.5

    def __call__(self, example: Any, strength: float, random: np.random.Generator) -> Any:
        return example

    @contextmanager
    def on(self, model: nn.Module, strength: float, seed: int) -> Generator[None]:
        """Add the noise; restore the exact weights on exit, also after an error."""
        saved = [(p, p.detach().clone()) for p in model.parameters()]
        try:
            with torch.no_grad():
                for i, (p, value) in enumerate(saved):
                    random = np.random.default_rng([seed, 3, i])
                    z = torch.from_numpy(random.standard_normal(tuple(p.shape), dtype=np.float32))
                    p.add_(z.to(p) * (strength * value.float().square().mean().sqrt()).to(p))
            yield
        finally:
            with torch.no_grad():
                for p, value in saved:
                    p.copy_(value)
