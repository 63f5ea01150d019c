"""Methods of diffusion models: D-TRAK, Journey-TRAK and DAS, all with the kernel of TRAK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from unde.errors import UndeError, unknown
from unde.methods.base import FinalContext, Method
from unde.methods.builtin import TRAK

MIN_REST = 1e-3  # 1 − h of DAS, at least


@dataclass(frozen=True)
class DTRAK(TRAK):
    """D-TRAK: TRAK on the mean square of the predicted noise in place of the loss."""

    name: ClassVar[str] = "d-trak"
    measure: ClassVar[str] = "square"


@dataclass(frozen=True)
class JourneyTRAK(TRAK):
    """TRAK along the trajectory on which a query was sampled (`unde.diffusion.sample`).

    A query's gradients are those of the simple loss at each x_t that the sampler visited, with the noise that x_t holds
    beside the final image, ε = (x_t − √ᾱ_t x_0) / √(1 − ᾱ_t), as the target.

    `training="averaged"`, as the authors' code does, pairs their mean with the mean of the training gradients over the
    task's timesteps: one feature for each example, on the same index as TRAK. `training="per-step"` is the equation of
    the paper: the gradient at step t is paired with the training gradient at the same timestep, for each of the
    `inference_steps` of the sampler, under the kernel of their mean. It takes as many times the disk. The default is
    "averaged": it needs no index of its own, and averages the noise of single timesteps out before taking products.
    """

    name: ClassVar[str] = "journey-trak"
    training: str = "averaged"
    inference_steps: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training not in ("averaged", "per-step"):
            raise unknown("training", self.training, ("averaged", "per-step"))

    def check_query(self, example: Any) -> None:
        if not isinstance(example, Mapping) or "trajectory" not in example:
            raise UndeError(
                "Journey-TRAK follows the trajectory on which a query was sampled, but these queries have none: sample "
                "them with unde.diffusion.sample and pass its .queries(journey=True)"
            )

    def query(self, task: Any, example: Any, random: Any) -> Any:
        return task.journey(example, self.inference_steps, random)

    @property
    def steps(self) -> int:
        return self.inference_steps if self.training == "per-step" else 1


@dataclass(frozen=True)
class DAS(TRAK):
    """Diffusion attribution score, (⟨g(q), K g(n)⟩ r_n / (1 − h_n))², of the mean of the predicted noise.

    h_n = ⟨g(n), K g(n)⟩ is the leverage and r_n the mean square residual of n: for a linear model the square is the
    exact change of a prediction when n is left out. `weigh` says where weights act: "before" the square, on the signed
    inner product, Σ_j w_j C_j (contributions of groups can cancel, as they do in the unweighted score, and uniform
    weights give it back), or "after" it, Σ_j w_j (C_j r_n / (1 − h_n))² (the literal reading of Algorithm 1, whose
    uniform weights are another score, since cross terms are missing). "signed" leaves the square out, Σ_j w_j C_j
    r_n / (1 − h_n), which is what self-retrieval learns on. `by_group` gives C_j before, the squares after, and the
    signed parts.
    """

    name: ClassVar[str] = "das"
    measure: ClassVar[str] = "mean"
    extra_measures: ClassVar[tuple[str, ...]] = ("residual",)
    weigh: str = "before"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weigh not in ("before", "after", "signed"):
            raise unknown("weigh", self.weigh, ("before", "after", "signed"))

    @property
    def linear(self) -> bool:
        return self.weigh != "before"

    @property
    def groupwise(self) -> bool:
        return self.weigh != "before"

    @property
    def signed(self) -> Method:
        return replace(self, weigh="signed")

    def final(self, linear: Tensor, sides: FinalContext, weights: Tensor) -> Tensor:
        return linear if self.groupwise else (linear * _das_factor(sides).to(linear)).square()

    def by_group(self, linear: Tensor, sides: FinalContext) -> Tensor:
        if not self.groupwise:
            return linear
        scaled = linear * _das_factor(sides).to(linear).unsqueeze(-1)
        return scaled if self.weigh == "signed" else scaled.square()


def _das_factor(sides: FinalContext) -> Tensor:
    """r_n / (1 − h_n), where an example that nothing else resembles (h near 1) keeps a finite score."""
    return sides.extra_values()[:, 0] / (1 - sides.leverage()).clamp(min=MIN_REST)
