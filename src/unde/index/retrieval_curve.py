"""The retrieval curve of a method: the share of perturbed training examples that find themselves.

Copies of training examples are perturbed more and more, and at each strength the share is counted whose own original
scores higher than all other training examples. Strengths are fixed for each kind of perturbation, and the same for all
methods: at the strength that self-retrieval searches, the share is the same by construction and would tell nothing.

What it tells: whether a method recognises an example through a change that leaves most of it as it was. A method that
cannot do that will hardly find what mattered to a new query.

What it does not tell: whether scores predict retrained models, which is what LDS measures; nor does it rank methods and
dampings as LDS does. A proxy that is wrong in the same way for a copy and for its original goes unseen, and numbers of
different data do not compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.errors import NotRetrievable, UndeError
from unde.evaluate.estimate import Estimate
from unde.groups import Groups
from unde.index.query_api import QueryableIndex
from unde.index.self_retrieval import EXAMPLES, FEWEST, Copier, Parts, Retrieval
from unde.index.state import IndexState
from unde.methods import Method
from unde.scoring.group_scores import GroupScores
from unde.tasks.perturb import Perturbation
from unde.weights import Weights, learn_weights

STRENGTHS = 5
SHOWN = 60  # examples; with five strengths, 300 passes


@dataclass(frozen=True)
class Curve:
    """Of one kind of perturbation: the share of copies that find their original, at each strength."""

    kind: str
    strengths: list[float]
    before: list[float]  # unweighted
    after: list[float] | None  # weighted, if there were weights
    examples: int

    def interval(self, share: float) -> tuple[float, float]:
        """The 95 % interval of a share on this curve."""
        return wilson(share, self.examples)


@dataclass(frozen=True)
class Trust:
    """What `index.trust` found. Print it for a table.

    `before` and `after` are the shares that find themselves, on average over strengths and kinds: one number to compare
    methods and weights by. `gain` is their difference, paired by example, with the half width of its 95 % interval.
    `held_out` is False where there were too few training examples to leave some alone: then the shares are of
    examples that self-retrieval reports on, which weights were not learned from.
    """

    method: str
    curves: list[Curve]
    before: float
    after: float | None
    gain: float | None
    gain_ci95: float | None
    examples: int
    held_out: bool
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        heads = ["strength", "before", "95 %", *(["after", "95 %"] if self.after is not None else [])]
        lines = []
        for curve in self.curves:
            lines += ["", f"copies that find their original, {curve.kind}, {curve.examples} examples:"]
            rows = [heads, *_rows(curve)]
            widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
            lines += ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows]
        return "\n".join([*lines[1:], self.in_words()])

    def in_words(self) -> str:
        """The one number, in a line."""
        text = f"trust in {self.method}: {_percent(self.before)}"
        if self.after is not None:
            text += f" before weights, {_percent(self.after)} after ({self.change})"
        few = "; of the examples that self-retrieval reports on: there are few"
        return text if self.held_out else text + few

    @property
    def change(self) -> str:
        """The gain with its interval, in points."""
        return f"{100 * (self.gain or 0):+.1f} ± {100 * (self.gain_ci95 or 0):.1f}".replace("-", "−")


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count`, after Wilson: inside [0, 1], and not empty at its ends.

    >>> [round(x, 3) for x in wilson(0.0, 60)], [round(x, 3) for x in wilson(0.5, 60)]
    ([0.0, 0.06], [0.377, 0.623])
    """
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def strengths(kind: Perturbation) -> list[float]:
    """From the least to the most, evenly spaced in the logarithm."""
    return [float(s) for s in np.geomspace(kind.least, kind.most, STRENGTHS)]


def measure_trust(copier: Copier, weights: Mapping[str, Weights], examples: int) -> dict[str, Trust]:
    """See `Index.trust_of`."""
    which, held_out = _held_out_examples(copier, weights, examples)
    ways: dict[str | None, Tensor | None] = {None: None}
    ways |= {name: w.aligned_to(copier.index.groups.names) for name, w in weights.items()}
    shares: list[dict[str | None, Tensor]] = []  # for each kind and way, (strengths, examples)
    for i, kind in enumerate(copier.kinds):
        copies = (copier.copies(kind, which[i :: len(copier.kinds)], s) for s in strengths(kind))
        hits = [{way: c.retrieved(w).double() for way, w in ways.items()} for c in copies]
        shares.append({way: torch.stack([one[way] for one in hits]) for way in ways})
    copier.check_model()
    return {name or "unweighted": _summarize(copier, shares, name, held_out) for name in weights or {None}}


def _summarize(
    copier: Copier, shares: list[dict[str | None, Tensor]], way: str | None, held_out: bool
) -> Trust:
    curves = [
        Curve(
            kind.name,
            strengths(kind),
            ways[None].mean(1).tolist(),
            None if way is None else ways[way].mean(1).tolist(),
            ways[None].shape[1],
        )
        for kind, ways in zip(copier.kinds, shares)
    ]
    each = {key: torch.cat([ways[key].mean(0) for ways in shares]) for key in {None, way}}  # (examples,)
    gain = None if way is None else Estimate((each[way] - each[None]).numpy())
    return Trust(
        method=str(copier.method),
        curves=curves,
        before=float(each[None].mean()),
        after=None if way is None else float(each[way].mean()),
        gain=None if gain is None else gain.mean,
        gain_ci95=None if gain is None else gain.ci95,
        examples=len(each[None]),
        held_out=held_out,
        seed=copier.seed,
    )


def _held_out_examples(copier: Copier, weights: Mapping[str, Weights], examples: int) -> tuple[Tensor, bool]:
    """Training examples that self-retrieval uses for nothing; or, and False, those that it reports on."""
    if examples < FEWEST:
        raise UndeError(f"examples is {examples}: expected at least {FEWEST} to tell a share by")
    try:
        parts = Parts.draw(copier.index, copier.content, EXAMPLES, len(copier.kinds), copier.seed)
    except UndeError as e:
        raise UndeError(f"no trust curve: {e}") from None
    used = {digest for w in weights.values() for digest in w.query_digests}
    rest = _unused(copier, parts.rest, used)
    if len(rest) >= examples:
        return rest[:examples], True
    learned = (set(w.query_digests) - set(copier.digests(_reported(copier, w))) for w in weights.values())
    reported = _unused(copier, parts.report, set().union(*learned))
    if len(reported) < FEWEST * len(copier.kinds):
        raise UndeError(
            f"no trust curve: {len(reported)} training examples are left that the weights were not learned from, "
            f"expected at least {FEWEST * len(copier.kinds)}: pass the seed= that the weights were learned with"
        )
    return reported[:examples], False


def _reported(copier: Copier, weights: Weights) -> Tensor:
    """The training examples that weights by self-retrieval were reported on, none if they came in other ways."""
    parts = weights.provenance.get("examples")
    same = weights.provenance.get("scores", {}).get("data") == copier.index.stored.manifest.data
    where = parts.get("report", []) if same and isinstance(parts, Mapping) else []
    return torch.tensor(where, dtype=torch.long)


def _unused(copier: Copier, which: Tensor, used: set[str]) -> Tensor:
    free = [d not in used for d in copier.digests(which)]
    return which[torch.tensor(free, dtype=torch.bool)]


def _rows(curve: Curve) -> list[list[str]]:
    rows = []
    for i, strength in enumerate(curve.strengths):
        row = [f"{strength:.2g}"]
        for shares in (curve.before, curve.after):
            if shares is not None:
                low, high = curve.interval(shares[i])
                row += [_percent(shares[i]), f"[{100 * low:.0f}, {100 * high:.0f}]"]
        rows.append(row)
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


class RetrievalIndex(QueryableIndex):
    """The part of `Index` that judges scores and weights by self-retrieval."""

    def __init__(self, state: IndexState) -> None:
        super().__init__(state)
        self._retrieved: tuple[Any, Retrieval] | None = None

    def learn_weights(
        self,
        queries: Any = None,
        method: str | Method | None = None,
        perturb: Any = None,
        examples: int = EXAMPLES,
        seed: int = 0,
    ) -> Weights:
        """Learn weights with which perturbed training examples find themselves, without labels.

        Costs as much as 600 queries, and `examples` more, at most.

        Args:
            queries: Learn from these queries by the paper's Algorithm 1 instead:
                `unde.learn_weights(index.score(queries, method), seed=seed)`.
            method: The method to learn for; by default that of the calibration or of the index.
            perturb: A function (example, strength, random) -> example, with a strength from 0.05 to 1 and a NumPy
                generator to draw from; "weights" for noise on the model's weights; None for the perturbations of the
                task: noise, replaced tokens, augmented images. The strength is searched.
            examples: Copies to learn from. Others judge and report, all of different training examples.
            seed: Seed of the examples and their copies.

        Returns:
            The weights; uniform ones where no candidate passes the guard. `weights.provenance` records why.

        Raises:
            UndeError: If the index was opened without model, task or training data, or has too few examples.

        >>> weights = index.learn_weights()  # doctest: +SKIP
        """
        if queries is not None:
            if (perturb, examples) != (None, EXAMPLES):
                raise UndeError("perturb= and examples= belong to learning without queries: leave them out")
            return learn_weights(self.score(queries, method), seed=seed)
        chosen = self._method(method)
        if (perturb, examples, seed) == (None, EXAMPLES, 0):
            return self._default_retrieval(chosen, self.groups).weights()
        self._retrieved = None  # free its memory
        return Retrieval(Copier(self._state, chosen, perturb, seed), examples).weights()

    def trust(
        self,
        weights: Weights | None = None,
        method: str | Method | None = None,
        examples: int = SHOWN,
        seed: int = 0,
        perturb: Any = None,
    ) -> Trust:
        """Measure how many training examples retrieve themselves through a perturbation, by its strength.

        Args:
            weights: Weights of the groups; unweighted by default.
            method: A method or its name; by default the one that the index was built for.
            examples: How many examples to perturb.
            seed: Seeds the choice of examples and the perturbations.
            perturb: As in `learn_weights`.

        Returns:
            The curve; printing it draws it.

        >>> index.trust()  # doctest: +SKIP
        """
        named = {} if weights is None else {"weighted": weights}
        return next(iter(self.trust_of(named, method, examples, seed, perturb).values()))

    def trust_of(
        self,
        weights: Mapping[str, Weights],
        method: str | Method | None = None,
        examples: int = SHOWN,
        seed: int = 0,
        perturb: Any = None,
    ) -> dict[str, Trust]:
        """`trust` for each named set of weights on the same perturbed copies; without any, of the unweighted method."""
        return measure_trust(Copier(self._state, self.method_for(method), perturb, seed), weights, examples)

    def self_retrieval(self, scores: GroupScores) -> Retrieval:
        """Judge of `unde.learn_weights`: self-retrieval under the method and groups of `scores`."""
        if None in (self.model, self.task, self.train_data):
            raise NotRetrievable("the index was opened without its model, task or training data")
        return self._default_retrieval(scores.method, scores.partition)

    def _default_retrieval(self, method: Method, groups: Groups) -> Retrieval:
        """Self-retrieval with default settings under one method and partition; the last one is cached."""
        key = (method, tuple(groups.members.items()))
        if self._retrieved is None or self._retrieved[0] != key:
            self._retrieved = None  # free its memory
            copier = Copier(self._state, method, None, 0, groups)
            self._retrieved = (key, Retrieval(copier, EXAMPLES))
        return self._retrieved[1]
