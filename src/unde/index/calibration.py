"""A calibration: the setting and weights that retrained models chose, the LDS to expect of them, and a file for it; the
settings that an index can give without another pass over the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from unde import methods
from unde.errors import UndeError
from unde.evaluate.estimate import Estimate, SubsetBootstrap, paired
from unde.index.reader import IndexReader
from unde.methods import CUSTOM, EKFAC, TRAK, Damped, LoGRA, Method, TracIn
from unde.projection import MATRICES, WHOLE, Spec
from unde.store.files import read_json, write_atomically
from unde.store.remote import StorePath, Unreachable, place
from unde.weights import Weights

FORMAT, VERSION = "unde calibration", 1
RETRAIN, LOCAL, BANK = "retrain", "local", "bank"
FITTED = "fitted to retrained models"
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


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What retrained models say about the settings of an index. Make one with `Index.calibrate`.

    Attributes:
        setting: The chosen method with its damping, Fisher matrix and checkpoints.
        weights: The weights that go with it; None where uniform weights are as good.
        expected: The LDS to expect of both, cross-fitted: no model or query is judged by what it chose. `ci95_total`
            is the half width of its 95 % interval over queries and models.
        unweighted: The LDS to expect without the weights, cross-fitted alike; None where weights are uniform.
        ceiling: The LDS that a perfect prediction would have, given the noise between two seeds; None if unknown.
        settings: {"name", "lds", "ci95"} of every setting with uniform weights, the best first. The chosen one was
            chosen by these models, so its LDS here is slightly too high; `expected` is not.
        baselines: {name: {"lds", "ci95"}} of simple baselines.
        how: "retrain", "local" (short continued trainings: the order of settings is meant, not the LDS) or "bank".
        halves: How many subsets were trained on; `trainings` counts models, some subsets are trained twice.
        seconds: What the trainings took, all together.
        index: The id of the index. An index that changed since has another.
        query_digests: The queries that it was made with, by content.
        provenance: Seeds, versions and whatever else says where it comes from.
        masks: (S, N) bool, the subsets that models were trained on.
        utility: (S, Q) how well each model did on each query.
    """

    setting: Setting
    weights: Weights | None
    expected: Estimate
    ceiling: float | None
    settings: Sequence[Mapping[str, Any]]
    baselines: Mapping[str, Mapping[str, float]]
    how: str
    halves: int
    trainings: int
    seconds: float
    index: str
    query_digests: Sequence[str]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    unweighted: Estimate | None = None
    masks: np.ndarray | None = None
    utility: np.ndarray | None = None

    @property
    def gain(self) -> Estimate | None:
        """The LDS that weights add, cross-fitted, query by query; None where weights are uniform."""
        return None if self.unweighted is None else paired(self.unweighted, self.expected)

    @property
    def method(self) -> Method:
        return self.setting.method

    @property
    def choice(self) -> str:
        """The setting in words."""
        return self.setting.name + ("" if self.weights is None else ", with fitted weights")

    def __str__(self) -> str:
        lds, half = _percent(self.expected)
        most = "" if self.ceiling is None else f" of at most {100 * self.ceiling:.0f}"
        if self.ceiling is not None and self.ceiling <= self.expected.mean:
            most = ", as much as the noise between seeds leaves"
        others = ", ".join(f"{name} {100 * b['lds']:.0f}" for name, b in self.baselines.items())
        others = others and f"; {others}"
        if self.how == LOCAL:
            return (
                f"{self.choice}: LDS {lds:.0f} (± {half:.0f}) on {self.halves} short continued trainings{others}. "
                "This orders settings; it is no estimate for retrained models"
            )
        added = ""
        if self.gain is not None:
            added = ", of which weights add {:.1f} (± {:.1f})".format(*_percent(self.gain))
        return (
            f"{self.choice}: on {self.halves} retrained models these scores predict {lds:.0f} (± {half:.0f})"
            f"{added}{most}{others} (LDS, %)"
        )

    def __repr__(self) -> str:
        return f"Calibration({self})"

    def table(self, rows: int = 10) -> str:
        """The best settings, one to a line, with a bar; the chosen one is marked."""
        shown = list(self.settings[:rows])
        if self.setting.name not in {s["name"] for s in shown}:
            shown += [s for s in self.settings if s["name"] == self.setting.name]
        width = max(len(s["name"]) for s in shown)
        top, mark = max(*(s["lds"] for s in shown), 1e-9), "  <- chosen"
        lines = [
            f"{s['name']:<{width}}  {100 * s['lds']:5.1f} ± {100 * s['ci95']:4.1f}  "
            f"{'#' * round(20 * s['lds'] / top)}{mark if s['name'] == self.setting.name else ''}".rstrip()
            for s in shown
        ]
        rest = len(self.settings) - len(shown)
        return "\n".join([*lines, f"… and {rest} more settings"] if rest else lines)

    # --- a file -----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | StorePath) -> None:
        """Write a JSON file; an interrupted write leaves an older file as it is."""
        weights = self.weights
        content = {
            "format": FORMAT,
            "version": VERSION,
            "summary": str(self),
            "method": self.method.describe(),
            "last_checkpoint": self.setting.last_checkpoint,
            "weights": None
            if weights is None
            else dict(zip(weights.groups, weights.values.tolist(), strict=True)),
            "expected": _describe(self.expected),
            "unweighted": None if self.unweighted is None else _describe(self.unweighted),
        }
        if self.masks is not None and self.utility is not None:
            packed = [np.packbits(row).tobytes().hex() for row in self.masks]
            content["outcomes"] = {"masks": packed, "utility": self.utility.tolist()}
        content |= {name: getattr(self, name) for name in _PLAIN}
        content["checksum"] = _checksum(content)
        write_atomically(place(path), (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str] | StorePath) -> Calibration:
        """Read a file that `save` has written.

        Raises:
            UndeError: If there is no such file, or it is not whole.
        """
        at = place(path)
        try:
            content = read_json(at)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError("it is not a calibration")
            if content.get("version") != VERSION:
                raise ValueError(f"it is of version {content.get('version')!r}, this release reads {VERSION}")
            if content.get("checksum") != _checksum(content):
                raise ValueError("its checksum is wrong")
            return _from_content(content)
        except Unreachable:
            raise
        except FileNotFoundError:
            raise UndeError(f"there is no calibration at {at}: make one with index.calibrate(...)") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UndeError(
                f"{at} cannot be read as a calibration ({e}): delete it, and calibrate again"
            ) from None


_CODED = ("setting", "weights", "expected", "unweighted", "masks", "utility")
# fields that a file holds as they are
_PLAIN = [f.name for f in fields(Calibration) if f.name not in _CODED]


def _percent(estimate: Estimate) -> tuple[float, float]:
    """The mean and the half width of the widest interval that is known, in %."""
    return 100 * estimate.mean, 100 * (estimate.ci95_total or estimate.ci95)


def _describe(estimate: Estimate) -> dict[str, Any]:
    spread = estimate.subset_bootstrap
    return {
        "per_query": [None if np.isnan(v) else v for v in estimate.per_query.tolist()],
        "replicates": [] if spread is None else spread.means.tolist(),
    }


def _estimate(content: Mapping[str, Any]) -> Estimate:
    values = np.array([np.nan if v is None else v for v in content["per_query"]], dtype=np.float64)
    replicates = np.array(content["replicates"], dtype=np.float64)
    spread = SubsetBootstrap(replicates, len(replicates), "jackknife") if len(replicates) else None
    return Estimate(values, spread)


def _from_content(content: Mapping[str, Any]) -> Calibration:
    named, plain = content["weights"], content.get("unweighted")
    weights = None
    if named is not None:
        tensor = torch.tensor([float(v) for v in named.values()], dtype=torch.float64)
        weights = Weights(tensor, list(named), content["query_digests"], {"how": FITTED})
    masks = utility = None
    if "outcomes" in content:
        packed = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in content["outcomes"]["masks"]]
        masks = np.unpackbits(np.stack(packed), axis=1, count=content["provenance"]["examples"]).astype(bool)
        utility = np.array(content["outcomes"]["utility"], dtype=np.float64)
    return Calibration(
        Setting(methods.parse(content["method"]), bool(content["last_checkpoint"])),
        weights,
        _estimate(content["expected"]),
        unweighted=None if plain is None else _estimate(plain),
        **{name: content[name] for name in _PLAIN},
        masks=masks,
        utility=utility,
    )


def _checksum(content: Mapping[str, Any]) -> str:
    signed = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(signed).encode()).hexdigest()
