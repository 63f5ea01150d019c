"""Weights from an index alone: perturbed training examples that should find themselves.

The mathematics, the search for a strength and the guard are in `unde.weights.retrieval`; here examples are drawn,
perturbed and scored. Four disjoint parts of the training data search the strength, learn, judge and report.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, digest, map_tensors
from unde.errors import NotRetrievable, UndeError
from unde.fingerprints import to_digest
from unde.groups import Groups
from unde.index.query_features import BadQuery
from unde.index.state import IndexState
from unde.methods import Method
from unde.tasks.perturb import CORPUS, Perturbation
from unde.weights import Weights, retrieval
from unde.weights.contributions import KEPT
from unde.weights.retrieval import Copies, Judged, Trial

# Shares of the 800 passes: those of the search, for one kind of perturbation and for two; those that judge; and
# report. `examples` more are learned from.
SEARCHED = {1: (48, 5), 2: (30, 4)}  # examples, strengths tried at most
JUDGING, REPORTING = 260, 100
EXAMPLES = 200  # to learn from
FEWEST = 10  # examples in a part
HELD = 4  # sets of copies that are in memory at once, for each kind of perturbation, and room for K g(n)
Perturb = Callable[[Any, float, np.random.Generator], Any]


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What one method finds of perturbed training examples: to learn weights from, to judge them, and to report."""

    copier: Copier
    parts: Parts
    trials: list[Trial]
    seed: int

    @classmethod
    def made(
        cls,
        index: IndexState,
        method: Method,
        perturb: Any,
        examples: int,
        seed: int,
        groups: Groups | None = None,
    ) -> Retrieval:
        """Searches strengths and scores the copies that judge."""
        copier = Copier(index, method, perturb, seed, groups)
        parts = Parts.drawn(index, copier.content, examples, len(copier.kinds), seed)
        trials = [_trial(copier, kind, parts, i) for i, kind in enumerate(copier.kinds)]
        return cls(copier, parts, trials, seed)

    @cached_property
    def own(self) -> list[Judged]:
        """Weights learned from copies of each kind, judged."""
        learn = {
            t.kind: self._copies(self.parts.learn, i, t.searched.strength) for i, t in enumerate(self.trials)
        }
        return retrieval.judge(retrieval.candidates(learn, self.seed), self.trials)

    def weights(self) -> Weights:
        """The best candidate with its story, or uniform weights if the guard refuses all; said in a line."""
        best = retrieval.best(self.own)
        groups = self.trials[0].hard.scores.groups
        values = torch.ones(len(groups)) if best is None else best.weights
        found = {}
        for i, t in enumerate(self.trials):
            told = self._copies(self.parts.report, i, t.searched.strength)
            before, after = (float(told.found(w).float().mean()) for w in (None, values))
            found[t.kind] = {"unweighted": before, "weighted": after, "copies": len(told.originals)}
        self.copier.check_model()
        provenance = {
            "how": "self-retrieval",
            "method": self.copier.method.name,
            "scores": self.trials[0].hard.scores.provenance,
            "strength": {t.kind: t.searched.strength for t in self.trials},
            "search": {t.kind: t.searched.tried for t in self.trials},
            "chosen": None if best is None else best.candidate,
            "refused": None if best is not None else max(self.own, key=lambda j: j.gain).refused,
            "found": found,
            "candidates": [j.as_dict() for j in self.own],
            "examples": self.parts.as_dict(),
            "seed": self.seed,
        }
        weights = Weights(values, groups, self.copier.digests(self.parts.used), provenance)
        console.note(f"{summary(weights)}. Only `unde calibrate` tells whether weights help on this model")
        return weights

    def _copies(self, part: Tensor, i: int, strength: float) -> Copies:
        return self.copier.copies(self.copier.kinds[i], part[i :: len(self.trials)], strength)


def _trial(copier: Copier, kind: Perturbation, parts: Parts, i: int) -> Trial:
    """The strength of one kind, and held-out copies."""
    count = len(copier.kinds)
    searching, judging = parts.search[i::count], parts.judge[i::count]

    def share(strength: float) -> float:
        return float(copier.copies(kind, searching, strength).found().float().mean())

    searched = retrieval.search(share, kind.least, kind.most, steps=SEARCHED[count][1])
    if searched.strength == kind.least:
        hard = weak = copier.copies(kind, judging, kind.least)
    else:
        half = len(judging) // 2
        hard = copier.copies(kind, judging[:half], searched.strength)
        weak = copier.copies(kind, judging[half:], kind.least)
    return Trial(kind.name, searched, hard, weak)


def summary(weights: Weights) -> str:
    """What self-retrieval did or thinks of weights, in a line.

    >>> summary(Weights.uniform(["a"]))
    'self-retrieval has not looked at these weights'
    """
    p = weights.provenance
    if "found" not in p:
        return "self-retrieval has not looked at these weights"
    if p["refused"] is not None:
        return f"weights stay uniform, the unweighted method: {p['refused']}"
    parts = [
        f"{kind} (strength {p['strength'][kind]:.2g}) {100 * f['unweighted']:.0f} % → {100 * f['weighted']:.0f} %"
        for kind, f in p["found"].items()
    ]
    return f"held-out copies that find their original: {'; '.join(parts)}"


@dataclass(frozen=True)
class Parts:
    """Positions of training examples, disjoint also by content."""

    search: Tensor
    learn: Tensor
    judge: Tensor
    report: Tensor
    rest: Tensor  # used for nothing

    @classmethod
    def drawn(cls, index: IndexState, content: Tensor, examples: int, kinds: int, seed: int) -> Parts:
        """One of each set of equal examples, in random order, dealt out; all parts shrink where there are few."""
        if examples < 2 * FEWEST:
            raise UndeError(f"examples is {examples}: expected at least {2 * FEWEST} to learn weights from")
        order = np.random.default_rng([seed, 0]).permutation(len(content))
        order = order[~index.stored.skipped.numpy()[order]]
        first = np.sort(np.unique(content.numpy()[order], return_index=True)[1])
        order = torch.from_numpy(order[first])
        wanted = [SEARCHED[kinds][0] * kinds, examples, JUDGING, REPORTING]
        scale = min(1.0, len(order) / sum(wanted))
        sizes = [int(scale * size) for size in wanted]
        if min(sizes) < FEWEST * kinds:
            need = -(-FEWEST * kinds * sum(wanted) // min(wanted))
            raise NotRetrievable(
                f"{len(order)} different training examples are too few to search, learn, judge and report on "
                f"disjoint parts: expected at least {need}. Stay with the unweighted method"
            )
        return cls(*order[: sum(sizes)].split(sizes), order[sum(sizes) :])

    @property
    def used(self) -> Tensor:
        return torch.cat([self.search, self.learn, self.judge, self.report])

    def as_dict(self) -> dict[str, list[int]]:
        return {name: getattr(self, name).tolist() for name in ("search", "learn", "judge", "report")}


class Copier:
    """Makes perturbed copies of training examples and scores them."""

    def __init__(
        self, index: IndexState, method: Method, perturb: Any, seed: int, groups: Groups | None = None
    ) -> None:
        if index.model is None or index.task is None or index.rows is None:
            missing = [n for n in ("model", "task") if getattr(index, n) is None]
            missing += ["train_data"] * (index.rows is None)
            raise UndeError(
                "self-retrieval runs perturbed training examples through the model, but this index was opened without "
                f"its {', '.join(missing)}: pass {', '.join(f'{n}=' for n in missing)} to Index.open"
            )
        if seed < 0:
            raise UndeError(f"seed is {seed}: expected a whole number, 0 or larger")
        self.index, self.method, self.seed, self.groups = index, method, seed, groups or index.groups
        self.model, self.task, self.rows = index.model, index.task, index.rows
        index.query_runner.check_model()  # from here on, whatever changes it is what is called below
        self._user_code = not (perturb is None or perturb == "weights")
        self.kinds = self._kinds(perturb)
        digests = index.stored.values("digest").numpy()
        self._digests = digests
        self.content = torch.from_numpy(np.unique(digests, return_inverse=True)[1])
        for kind in self.kinds:
            if not isinstance(kind, WeightNoise):
                self._try_out(kind)

    def copies(self, kind: Perturbation, which: Tensor, strength: float) -> Copies:
        """Copies of the training examples `which`, scored under the method with its sign."""
        made = [self.copy(kind, int(i), strength) for i in which]
        self.check_model()
        under = nullcontext
        if isinstance(kind, WeightNoise):
            under = partial(kind.on, strength=strength, seed=self.seed)
        try:
            rows = Rows(made, self.index.collate or self.rows.collate)
            features = self.index.query_runner.features(rows, under)
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
        share = max(1, KEPT * scores.memory // (HELD * len(self.kinds)))  # of which 1 in KEPT is kept
        return Copies(replace(scores, partition=self.groups, memory=share), which, self.content)

    def digests(self, which: Tensor) -> list[str]:
        """Of the originals, as queries have them."""
        return [to_digest(int(d)) for d in self._digests[which.numpy()]]

    def check_model(self) -> None:
        try:
            self.index.query_runner.check_model()
        except UndeError:
            if not self._user_code:
                raise
            raise UndeError("perturb= changed the model's weights: it may change examples only") from None

    def copy(self, kind: Perturbation, i: int, strength: float) -> Any:
        """A perturbed copy of training example i, as a query of the method."""
        made = kind(self.rows[i], strength, np.random.default_rng([self.seed, 1, i]))
        return self.method.query(self.task, made, np.random.default_rng([self.seed, 2, i]))

    def _kinds(self, perturb: Any) -> list[Perturbation]:
        if perturb is None:
            step = max(1, len(self.rows) // CORPUS)
            some = [self.rows[i] for i in range(0, len(self.rows), step)][:CORPUS]
            kinds = self.task.perturbations(self.model, some)
            if len(kinds) not in SEARCHED:
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

    def _try_out(self, kind: Perturbation) -> None:
        """What a perturbation must keep to: shapes, the random numbers it is given, and the data as it is."""
        for i in (0, len(self.rows) - 1):
            original = self.rows[i]
            before = digest(original)
            given = [map_tensors(original, Tensor.clone) for _ in range(2)]
            one, two = (kind(e, kind.most, np.random.default_rng([self.seed, 1, i])) for e in given)
            if digest(given[0]) != before:
                raise UndeError(
                    f"{kind.name} changes example {i} itself: it must leave what it is given as it is, and return a "
                    "new one"
                )
            if digest(one) != digest(two):
                raise UndeError(
                    f"{kind.name} gives another copy of example {i} when called again: draw random numbers from "
                    "the generator that it is given, and from nowhere else"
                )
            if form(_unlabelled(one, original)) != form(original):
                raise UndeError(
                    f"{kind.name} made {form(one)} of example {i}, which is {form(original)}: expected the same "
                    "structure, shapes and types"
                )
        self.check_model()


def _unlabelled(copy: Any, original: Any) -> Any:
    """A copy without labels that only it has: a masked text is hidden before it is perturbed."""
    if isinstance(copy, dict) and isinstance(original, dict) and "labels" not in original:
        return {k: v for k, v in copy.items() if k != "labels"}
    return copy


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
