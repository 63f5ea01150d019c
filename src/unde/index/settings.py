"""The settings that an index can give without another pass over the model: methods, dampings, Fisher matrices and
checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from unde.index.reader import IndexReader
from unde.methods import CUSTOM, EKFAC, TRAK, Damped, LoGRA, Method, TracIn
from unde.projection import TWO_SIDED, Spec

DAMPINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # relative
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
    """One method for each curve, the one that the index was built for among them."""
    if CUSTOM in built.describe() or built.measure != "loss" or built.steps > 1:
        return [built]
    projection = built.projection
    found: list[Method] = [TracIn(projection), TracIn(projection, metric="diagonal"), TRAK(projection)]
    if Spec.parse(str(projection)).kind in ("none", *TWO_SIDED):
        found.append(LoGRA(projection))
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
