"""Self-retrieval on an index: draw training examples, perturb them and score the copies.

The objective, the search for a strength and the guard are in `unde.weights.retrieval`. Four disjoint parts of the
training data search the strength, learn, judge and report.
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
from unde.weights import Weights
from unde.weights.contributions import CACHE_SHARE
from unde.weights.retrieval import (
    Copies,
    JudgedWeights,
    Trial,
    best_accepted,
    judge_weights,
    learn_candidates,
    search_strength,
)

# Passes of the search, for one kind of perturbation and for two; of judging; and of the report. `examples` more are
# learned from.
SEARCH_SIZES = {1: (48, 5), 2: (30, 4)}  # examples, strengths tried at most
JUDGING, REPORTING = 260, 100
EXAMPLES = 200  # to learn from
FEWEST = 10  # examples in a part
COPY_SETS = 4  # sets of copies in memory at once for each kind of perturbation, with room for K g(n)
Perturb = Callable[[Any, float, np.random.Generator], Any]


class Retrieval:
    """Perturbed training examples under one method: to learn weights from, to judge them, and to report."""

    def __init__(self, copier: Copier, examples: int) -> None:
        """Search strengths and score the copies that judge."""
        self.copier = copier
        self.parts = Parts.draw(copier.index, copier.content, examples, len(copier.kinds), copier.seed)
        self.trials = [self._trial(i, kind) for i, kind in enumerate(copier.kinds)]

    def _trial(self, i: int, kind: Perturbation) -> Trial:
        """The strength of one kind, and held-out copies."""
        count, copies = len(self.copier.kinds), partial(self.copier.copies, kind)
        searching, judging = self.parts.search[i::count], self.parts.judge[i::count]

        def share(strength: float) -> float:
            return float(copies(searching, strength).retrieved().float().mean())

        search = search_strength(share, kind.least, kind.most, steps=SEARCH_SIZES[count][1])
        if search.strength == kind.least:
            hard = weak = copies(judging, kind.least)
        else:
            half = len(judging) // 2
            hard, weak = copies(judging[:half], search.strength), copies(judging[half:], kind.least)
        return Trial(kind.name, search, hard, weak)

    @cached_property
    def candidates(self) -> list[JudgedWeights]:
        """Weights learned from copies of each kind, judged."""
        learn = {
            t.kind: self._copies(self.parts.learn, i, t.search.strength) for i, t in enumerate(self.trials)
        }
        return judge_weights(learn_candidates(learn, self.copier.seed), self.trials)

    def weights(self) -> Weights:
        """The best candidate with its provenance, or uniform weights if the guard refuses all; print a line."""
        best = best_accepted(self.candidates)
        groups = self.trials[0].hard.scores.groups
        values = torch.ones(len(groups)) if best is None else best.weights
        shares = {}
        for i, t in enumerate(self.trials):
            copies = self._copies(self.parts.report, i, t.search.strength)
            before, after = (float(copies.retrieved(w).float().mean()) for w in (None, values))
            shares[t.kind] = {"unweighted": before, "weighted": after, "copies": len(copies.originals)}
        self.copier.check_model()
        provenance = {
            "how": "self-retrieval",
            "method": self.copier.method.name,
            "scores": self.trials[0].hard.scores.provenance,
            "strength": {t.kind: t.search.strength for t in self.trials},
            "search": {t.kind: t.search.shares for t in self.trials},
            "chosen": None if best is None else best.candidate,
            "refused": None if best is not None else max(self.candidates, key=lambda j: j.gain).objection,
            "found": shares,
            "candidates": [j.as_dict() for j in self.candidates],
            "examples": self.parts.as_dict(),
            "seed": self.copier.seed,
        }
        weights = Weights(values, groups, self.copier.digests(self.parts.used), provenance)
        console.note(f"{summary(weights)}. Only `unde calibrate` tells whether weights help on this model")
        return weights

    def _copies(self, part: Tensor, i: int, strength: float) -> Copies:
        return self.copier.copies(self.copier.kinds[i], part[i :: len(self.trials)], strength)


def summary(weights: Weights) -> str:
    """The verdict of self-retrieval on weights, in a line.

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
    def draw(cls, index: IndexState, content: Tensor, examples: int, kinds: int, seed: int) -> Parts:
        """One of each set of equal examples, in random order, dealt out; all parts shrink where there are few."""
        if examples < 2 * FEWEST:
            raise UndeError(f"examples is {examples}: expected at least {2 * FEWEST} to learn weights from")
        order = np.random.default_rng([seed, 0]).permutation(len(content))
        order = order[~index.stored.skipped.numpy()[order]]
        first = np.sort(np.unique(content.numpy()[order], return_index=True)[1])
        order = torch.from_numpy(order[first])
        wanted = [SEARCH_SIZES[kinds][0] * kinds, examples, JUDGING, REPORTING]
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
    """Make perturbed copies of training examples and score them."""

    def __init__(
        self, index: IndexState, method: Method, perturb: Any, seed: int, groups: Groups | None = None
    ) -> None:
        inputs = index.build_inputs("self-retrieval runs perturbed training examples through the model")
        if seed < 0:
            raise UndeError(f"seed is {seed}: expected a whole number, 0 or larger")
        self.index, self.method, self.seed, self.groups = index, method, seed, groups or index.groups
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
        return Copies(replace(scores, partition=self.groups, memory=share), which, self.content)

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
