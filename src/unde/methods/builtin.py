"""The methods of unde: TracIn, TRAK, LoGRA and EKFAC; their kernels are in `unde.kernels`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.kernels import Diagonal, EKFACKernel, Gram, Identity, Kernel
from unde.methods.base import OMIT_IF, FinalContext, Method
from unde.projection import MATRICES, Spec

AUTO = "auto"
DEFAULT_DAMPING = 0.1  # damping of methods and tasks that DAMPINGS does not name
# Kind of task → method → relative damping: experiments/studies/damping.py
DAMPINGS: dict[str, dict[str, float]] = {
    "diffusion": {"trak": 100.0, "journey-trak": 100.0, "d-trak": 100.0, "das": 100.0},
}
PAPER_DAMPINGS = (5e-3, 5e-2, 5e-1, 5.0, 50.0)  # absolute λ (relative=False) that the paper sweeps
# Kind of task → method of method="auto", by its LDS on whole gradients: experiments/studies/quality.py
CHOICES = {"language": "ekfac", "classification": "ekfac", "diffusion": "d-trak"}
DEFAULT_METHOD = "ekfac"  # of other tasks
FISHERS = (AUTO, "empirical", "sampled", "true")
MOST_LABELS = 32  # that fisher="true" enumerates


@dataclass(frozen=True)
class TracIn(Method):
    """Inner product of gradients; with several checkpoints, weighted by their learning rates (TracInCP).

    Args:
        cosine: Divide by the norms of both features, weights inside the norms.
        metric: "identity", or "diagonal": gradients are compared in the metric of an Adam-like optimizer,
            diag(mean g²)^−1/2, taken from the stored features.
    """

    name: ClassVar[str] = "tracin"
    cosine: bool = False
    metric: str = field(default="identity", metadata={OMIT_IF: "identity"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in ("identity", "diagonal"):
            raise unknown("metric", self.metric, ("identity", "diagonal"))
        if self.cosine and self.metric != "identity":
            raise UndeError(
                "cosine=True and metric='diagonal' of TracIn: norms are those of plain features. Use one of the two"
            )

    @property
    def kernel(self) -> Kernel:
        return Diagonal() if self.metric == "diagonal" else Identity()

    @property
    def linear(self) -> bool:
        return not self.cosine

    def final(self, linear: Tensor, sides: FinalContext, weights: Tensor) -> Tensor:
        if not self.cosine:
            return linear
        # Clamped before the root: a feature of zeros has score 0, and no NaN as its gradient.
        tiny = torch.finfo(linear.dtype).tiny
        q = (sides.query_squares().to(linear) @ weights).clamp(min=tiny).rsqrt()  # (Q,)
        n = (sides.train_squares().to(linear) @ weights).clamp(min=tiny).rsqrt()  # (N,)
        return linear * q.unsqueeze(1) * n


@dataclass(frozen=True)
class Damped(Method):
    """Base class of methods with a damped kernel.

    Args:
        damping: A multiple of the mean diagonal of the inverted matrix, or with `relative=False` the absolute λ of the
            paper. "auto" is a number by the kind of task (`DAMPINGS`), which an index records when it is built.
        relative: Whether `damping` is a multiple.
    """

    damping: float | str = AUTO
    relative: bool = True
    per_example: ClassVar[bool] = False  # whether λ is added to a mean over examples, or to their sum

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.damping == AUTO and not self.relative:
            raise UndeError(f"damping 'auto' of {name} is relative: with relative=False give λ, a number")
        if self.damping != AUTO:
            number = isinstance(self.damping, (int, float)) and not isinstance(self.damping, bool)
            if not number or not 0 <= float(self.damping) < math.inf:
                raise UndeError(f"damping {self.damping!r} of {name}: expected a number ≥ 0, or 'auto'")
            object.__setattr__(self, "damping", float(self.damping))
        if getattr(self, "fisher", AUTO) not in FISHERS:
            raise unknown("fisher", getattr(self, "fisher", AUTO), FISHERS)

    @property
    def number(self) -> float:
        """The damping; where "auto" was not resolved, that of a task of unknown kind."""
        return DEFAULT_DAMPING if isinstance(self.damping, str) else self.damping

    @property
    def labels(self) -> str:
        """`fisher`, or "empirical" where "auto" was not resolved."""
        fisher = getattr(self, "fisher", AUTO)
        return "empirical" if fisher == AUTO else fisher

    def resolve(self, kind: str, built: Method | None = None, examples: int = 1) -> Method:
        """With settings in place of "auto".

        Args:
            kind: Of the task.
            built: The method of the index that is asked: its Fisher matrix and its absolute λ are taken over.
            examples: Of that index.

        >>> TRAK().resolve("classification").damping, TRAK(damping=3).resolve("classification").damping
        (0.1, 3.0)
        >>> EKFAC().resolve("classification", TRAK(damping=50, relative=False), examples=100).damping
        0.5
        """
        method = self
        if getattr(self, "fisher", None) == AUTO:
            fits = isinstance(built, Damped) and self.measure == "loss" and self.steps == 1
            method = replace(method, fisher=built.labels if fits else "empirical")
        if self.damping != AUTO:
            return method
        if isinstance(built, Damped) and not built.relative:
            total = built.number * (examples if built.per_example else 1)
            return replace(method, damping=total / (examples if self.per_example else 1), relative=False)
        return replace(method, damping=DAMPINGS.get(kind, {}).get(self.name, DEFAULT_DAMPING))

    @property
    def probe(self) -> Method | None:
        """Gradients with other labels, where `fisher` asks for them."""
        if self.labels == "empirical":
            return None
        exact = self.labels == "true"
        return Fisher(self.projection, self.factors, exact, labels=0 if exact else 1)


@dataclass(frozen=True)
class TRAK(Damped):
    """TRAK with the loss as output function.

    Args:
        form: "primal", "dual", or "auto": the smaller.
        fisher: Gradients that K is made of. "empirical": those of the training labels. "sampled": one label drawn
            from the model's predictions for each example. "true": the expectation over all labels, Σ_y p(y|x) g_y g_yᵀ,
            for tasks with up to 32 of them; for regression 2 JᵀJ over the squared number of outputs. "auto": that of
            the index, when one is asked; when one is built "empirical", or "true" for a small model at a minimum of an
            L2 regularized loss (`unde.index.choice`).
    """

    name: ClassVar[str] = "trak"
    form: str = "auto"
    fisher: str = field(default=AUTO, metadata={OMIT_IF: "empirical"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels != "empirical" and (self.measure != "loss" or self.steps > 1):
            raise UndeError(
                f"fisher={self.fisher!r} of {type(self).__name__}: the Fisher information is that of the loss alone, "
                "use fisher='empirical'"
            )
        if self.form not in ("auto", "primal", "dual"):
            raise unknown("form", self.form, ("auto", "primal", "dual"))

    @property
    def kernel(self) -> Kernel:
        return Gram(self.number, self.relative, self.form, fisher=self.labels)


@dataclass(frozen=True)
class LoGRA(Damped):
    """LoGRA: two-sided projection, kron(r).

    Args:
        blocks: "layer", a Gram matrix for each layer, or "full", one for all (as TRAK).
        fisher: Gradients that K is made of, as in `TRAK`.
        damping_scope: What relative damping is a multiple of the mean diagonal of: each "layer", or the whole "model".
    """

    name: ClassVar[str] = "logra"
    blocks: str = "layer"
    fisher: str = field(default=AUTO, metadata={OMIT_IF: "empirical"})
    damping_scope: str = field(default="layer", metadata={OMIT_IF: "layer"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks not in ("layer", "full"):
            raise unknown("blocks", self.blocks, ("layer", "full"))
        _check_two_sided(self)

    @property
    def kernel(self) -> Kernel:
        return Gram(self.number, self.relative, "auto", self.blocks, self.labels, self.damping_scope)


@dataclass(frozen=True)
class EKFAC(Damped):
    """LoGRA features under the EKFAC kernel; unprojected EKFAC with projection="none".

    Its covariances are gathered while the index is built.

    Args:
        fisher: Gradients that the covariances and the corrected eigenvalues are taken of, as in `TRAK`. Other than
            "empirical" costs another pass over the data when the index is built, "true" one for each label.
        damping_scope: What relative damping is a multiple of the mean eigenvalue of: each parameter ("layer"), or the
            whole "model".
    """

    name: ClassVar[str] = "ekfac"
    per_example: ClassVar[bool] = True
    fisher: str = AUTO
    damping_scope: str = field(default="layer", metadata={OMIT_IF: "layer"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_two_sided(self)

    @property
    def whitened(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.projection is not None and Spec.parse(self.projection).kind == "factored"

    @property
    def factors(self) -> bool:  # ty: ignore[incompatible-property-override]
        return not self.whitened

    @property
    def probe(self) -> Method | None:
        return None if self.whitened else super().probe

    @property
    def statistics(self) -> Method:
        """The gradients that whitening is computed from."""
        return super().probe or self

    @property
    def kernel(self) -> EKFACKernel:
        return EKFACKernel(self.number, self.relative, self.labels, self.damping_scope)


def _check_two_sided(method: LoGRA | EKFAC) -> None:
    if method.damping_scope not in ("layer", "model"):
        raise unknown("damping_scope", method.damping_scope, ("layer", "model"))
    if method.projection is not None and Spec.parse(method.projection).kind not in MATRICES:
        raise UndeError(
            f"{type(method).__name__} needs both sides of a gradient, but {method.projection} projects it whole: use "
            "'none', 'factored(4)' or 'kron(16)', or TRAK"
        )


@dataclass(frozen=True)
class Fisher(Method):
    """Gradients with other labels than those of the data, which kernels are fitted to; not for scoring.

    Args:
        covariances: Whether those of EKFAC are gathered too.
        exact: Whether labels are enumerated, each weighted by the root of its probability, or one of them is drawn.
        labels: How many there are for each example; 0: as many as the task has.
    """

    name: ClassVar[str] = "fisher"
    covariances: bool = field(default=True, metadata={OMIT_IF: True})
    exact: bool = field(default=False, metadata={OMIT_IF: False})
    labels: int = field(default=1, metadata={OMIT_IF: 1})

    @property
    def kind(self) -> str:
        """The value of `fisher` that it is for."""
        return "true" if self.exact else "sampled"

    @property
    def measure(self) -> str:  # ty: ignore[incompatible-property-override]
        return self.measure_of(0)

    @property
    def factors(self) -> bool:  # ty: ignore[incompatible-property-override]
        return self.covariances

    @property
    def terms(self) -> int:
        return self.labels

    def measure_of(self, term: int) -> str:
        return f"true {term % max(1, self.labels)}" if self.exact else "sampled"

    def resolve_labels(self, task: Any, model: Any, batch: Any) -> Fisher:
        """Set the number of labels to that of the task; raise if they cannot be enumerated or are too many."""
        if self.labels:
            return self
        count = task.outputs(model, batch)
        if count is None or not 1 <= count <= MOST_LABELS:
            have = "cannot enumerate its labels" if count is None else f"has {count:,} labels"
            raise UndeError(
                f"fisher='true' needs at most {MOST_LABELS} labels, and {type(task).__name__} {have}: use "
                "fisher='sampled'"
            )
        return replace(self, labels=count)
