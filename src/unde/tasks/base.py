"""Task: what a model is trained on and what is attributed, one value for each example of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from unde.errors import unknown
from unde.tasks.batching import Batching
from unde.tasks.identity import identity
from unde.tasks.perturb import Noise, Perturbation


class Task:
    """Subclass and define `loss`; override `measure` to differentiate something else, `collate` to batch otherwise.

    Losses are (B,) tensors: entry b depends on example b alone. Optional are `perturbations`, for weights learned from
    perturbed examples, `mask`, where batches are padded, and `check`, to refuse models.

    Attributes:
        version: Raise it when the code begins to compute other numbers: an index of another version is refused.

    >>> class Regression(Task):
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return (model(x).squeeze(-1) - y) ** 2
    """

    version = 1
    batching: Batching = Batching()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no loss(model, batch) -> (B,) tensor")

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        """What is differentiated; `name` is the method's choice, `ids` are the examples' positions."""
        if name != "loss":
            raise unknown(f"measure of {type(self).__name__}", name, ["loss"])
        return self.loss(model, batch)

    def outputs(self, model: nn.Module, batch: Any) -> int | None:
        """How many labels `measure` enumerates for fisher="true", as "true 0", "true 1", …; None: it cannot."""
        return None

    def collate(self, examples: list[Any]) -> Any:
        return default_collate(examples)

    def identity(self) -> dict[str, Any]:
        """Name, version, settings and tensors as JSON: an index refuses a task of another identity.

        All attributes count. Override it to leave out one that changes no number, such as a counter.
        """
        return identity(self)

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """One or two ways to perturb training examples, to learn weights from; `examples` are some of them."""
        return [Noise()]

    def mask(self, batch: Any) -> Tensor | Sequence[Tensor] | None:
        """(B, T), True at positions that are no padding; several for sequences of several lengths; None if all are."""
        return None

    def check(self, model: nn.Module, batch: Any) -> None:
        """Raise an UndeError if the loss of this model means nothing. Called before a build, on one batch."""
