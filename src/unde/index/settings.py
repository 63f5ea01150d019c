"""The settings that an index can give without another pass over the model (methods, dampings, Fisher matrices,
checkpoints), and what they predict for retrained models:

    prediction(s, q, j) = Σ_c η_c ⟨ g_j(q), [K_c Σ_{n ∈ s} g(n)]_j ⟩

Scores are linear in the training features, so S subset sums replace N examples: one pass over the stored features
serves all methods and dampings, and each of them costs one kernel applied to S rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from unde import console
from unde.data import Rows
from unde.devices import double_device, put
from unde.errors import UndeError
from unde.index.kernel_cache import KernelCache
from unde.index.reader import FeatureSource, IndexReader
from unde.index.scorer import Scorer
from unde.index.state import IndexState
from unde.methods import CUSTOM, EKFAC, TRAK, Damped, LoGRA, Method, TracIn
from unde.projection import MATRICES, WHOLE, Spec

DAMPINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # relative
WIDE = 2**16  # whole gradients with more numbers than this, and than examples
FEW_DAMPINGS = DAMPINGS[::2]  # for methods whose scores are no sums over groups: each costs all scores


@dataclass(frozen=True)
class Setting:
    """A method with all its numbers; `last_checkpoint` leaves the earlier checkpoints out."""

    method: Method
    last_checkpoint: bool = False

    @property
    def name(self) -> str:
        """Short and unique among the settings of an index, such as "LoGRA, damping 0.03"."""
        damping = [f"damping {self.method.damping:g}"] if isinstance(self.method, Damped) else []
        return ", ".join([self.family, *damping])

    @property
    def family(self) -> str:
        """The name without the damping: settings of one family differ in that alone."""
        fisher = getattr(self.method, "fisher", "empirical")
        parts = [type(self.method).__name__]
        metric = getattr(self.method, "metric", None)
        parts += [f"{metric} metric"] if metric == "diagonal" else []
        parts += ["cosine"] if getattr(self.method, "cosine", False) else []
        parts += [f"{fisher} Fisher"] if fisher != "empirical" else []
        parts += ["one λ"] if getattr(self.method, "damping_scope", "layer") == "model" else []
        return ", ".join([*parts, *(["last checkpoint"] if self.last_checkpoint else [])])

    def terms(self, stored: IndexReader) -> Sequence[int] | None:
        """The checkpoints that count; None for all."""
        return [stored.manifest.terms - 1] if self.last_checkpoint else None


def list_settings(stored: IndexReader) -> list[list[Setting]]:
    """All settings of an index as curves: those of one curve differ in their damping alone, in ascending order."""
    built = stored.method
    curves = [_curve(method) for method in _methods(stored, built)]
    if stored.manifest.terms > 1 and built.steps == 1:
        curves += [[replace(s, last_checkpoint=True) for s in curve] for curve in curves]
    return curves


def _methods(stored: IndexReader, built: Method) -> list[Method]:
    """One method for each curve, the one that the index was built for among them.

    TRAK and LoGRA read all whole gradients again for each damping where these are wide: they are left out there.
    """
    if CUSTOM in built.describe() or built.measure != "loss" or built.steps > 1:
        return [built]
    projection = built.projection
    if isinstance(built, EKFAC) and built.whitened:
        return [replace(built, damping_scope=scope) for scope in ("layer", "model")]
    found: list[Method] = [TracIn(projection), TracIn(projection, metric="diagonal")]
    m, kind = stored.manifest, Spec.parse(str(projection)).kind
    duals = kind in WHOLE and m.width > max(WIDE, m.examples)
    found += [] if duals else [TRAK(projection)]
    if kind in MATRICES:
        found += [] if duals else [LoGRA(projection)]
        found += [EKFAC(projection)] if stored.manifest.factors else []
    found += [built] if type(built) not in {type(method) for method in found} else []
    return [variant for method in found for variant in _variants(stored, method)]


def _variants(stored: IndexReader, method: Method) -> list[Method]:
    """The method under every Fisher matrix of the index, with a λ for each layer or one for all."""
    names = {f.name for f in fields(method)}
    fishers = stored.fishers if "fisher" in names else (None,)
    scopes = ("layer", "model") if "damping_scope" in names else (None,)
    return [
        replace(method, **{k: v for k, v in (("fisher", f), ("damping_scope", s)) if v is not None})
        for f in fishers
        for s in scopes
    ]


def _curve(method: Method) -> list[Setting]:
    if not isinstance(method, Damped):
        return [Setting(method)]
    grid = DAMPINGS if method.linear and not method.groupwise else FEW_DAMPINGS
    return [Setting(replace(method, damping=damping, relative=True)) for damping in grid]


class Predictor:
    """Predictions of the same subsets and queries under any method.

    Args:
        scorer: The scorer of the index.
        queries: Query features, (C, Q, D).
        digests: Digests of the queries.
        masks: Subsets of the training examples, (S, N) bool.
    """

    def __init__(self, scorer: Scorer, queries: Tensor, digests: list[str], masks: np.ndarray) -> None:
        self.scorer, self.queries, self.digests = scorer, queries, digests
        self.members = torch.from_numpy(np.ascontiguousarray(masks)).float()  # (S, N)
        self._sums = self._sum_features()

    def predict(self, method: Method, terms: Sequence[int] | None = None) -> np.ndarray:
        """Predictions (S, Q, M) under a method; (S, Q, 1) where its scores are not sums over groups.

        Args:
            method: The method to score with.
            terms: The checkpoints that count; None for all.
        """
        if not method.linear or method.groupwise:
            total = self.scorer.scores(method, self.queries, self.digests).total()
            members, total = (put(x, self._device, torch.float64) for x in (self.members, total))
            return (members @ total.T).unsqueeze(2).cpu().numpy()
        m, groups = self.scorer.stored.manifest, self.scorer.groups
        out = torch.zeros(len(self.members), self.queries.shape[1], len(groups), device=self._device)
        for c in range(m.terms) if terms is None else terms:
            rows, queries = self._apply_kernel(method, c), put(self.queries[c], self._device)
            for j, columns in zip(groups.of(m.unit_names), m.columns):
                out[:, :, j] += m.checkpoint_weights[c] * (rows[:, columns] @ queries[:, columns].T)
        return out.cpu().numpy()

    @property
    def _device(self) -> torch.device:
        return self.scorer.stored.compute.device

    def _sum_features(self) -> list[Tensor]:
        """Σ_{n ∈ s} g(n) for each checkpoint, (S, D), from one pass over the stored features."""
        stored, m = self.scorer.stored, self.scorer.stored.manifest
        shape, place = (len(self.members), m.width), double_device(self._device)
        sums = [torch.zeros(shape, dtype=torch.float64, device=place) for _ in range(m.terms)]
        for s, rows in enumerate(m.shards):
            for total, block in zip(sums, stored.blocks(s)):
                total += (put(self.members[:, rows], block.device) @ block).to(place)
        return [put(total, self._device, torch.float32) for total in sums]

    def _apply_kernel(self, method: Method, checkpoint: int) -> Tensor:
        """K Σ_{n ∈ s} g(n), (S, D)."""
        cache = KernelCache(self.scorer.stored, method.kernel, checkpoint, self.scorer.executor)
        fitted = cache.fitted()
        combine = getattr(fitted, "combine", None)  # kernels in dual form have no need of the sums
        if combine is not None and cache.source == FeatureSource(self.scorer.stored, checkpoint):
            return combine(self.members)
        return fitted.apply(self._sums[checkpoint])


class Candidates:
    """Predictions of every setting of an index for some subsets and queries."""

    def __init__(self, opened: IndexState, queries: Rows, masks: np.ndarray) -> None:
        features = opened.runner.features(queries)
        predictor = Predictor(opened.scorer, features.features, features.digests, masks)
        curves = list_settings(opened.stored)
        self.settings: dict[str, Setting] = {}
        self.predictions: dict[str, np.ndarray] = {}
        self.refused: dict[str, str] = {}
        with console.progress("settings", sum(map(len, curves)), unit="settings") as advance:
            for setting in chain.from_iterable(curves):
                try:
                    terms = setting.terms(opened.stored)
                    self.predictions[setting.name] = predictor.predict(setting.method, terms)
                    self.settings[setting.name] = setting
                except UndeError as e:  # a kernel beyond the memory budget, a damping that rounding decides
                    self.refused[setting.name] = str(e)
                advance(1)
        self.curves = [[s.name for s in curve if s.name in self.settings] for curve in curves]
        if not self.settings:
            raise UndeError(
                f"no setting of the index can be scored; the first says: {next(iter(self.refused.values()))}"
            )

    def of(self, subsets: Sequence[int]) -> dict[str, np.ndarray]:
        """The predictions of some of the subsets."""
        return {name: p[list(subsets)] for name, p in self.predictions.items()}
