"""Task: what a model is trained on and what is attributed, one value for each example of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from unde.errors import unknown
from unde.tasks.perturb import Noise, Perturbation


class Task:
    """Subclass and define `loss`; override `measure` to differentiate something else.

    Losses are (B,) tensors: entry b depends on example b alone.

    >>> class Regression(Task):
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return (model(x).squeeze(-1) - y) ** 2
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no loss(model, batch) -> (B,) tensor")

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        """What is differentiated; `name` is the method's choice, `ids` are the examples' positions."""
        if name != "loss":
            raise unknown(f"measure of {type(self).__name__}", name, ["loss"])
        return self.loss(model, batch)

    def measures(
        self, model: nn.Module, batch: Any, names: Sequence[str], ids: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Several measures; override where they share a forward pass."""
        return {name: self.measure(model, batch, name=name, ids=ids) for name in names}

    def passes(self, batch: Any, ids: Sequence[int] | None) -> Iterator[Any]:
        """The batches to run for one batch of examples; gradients add up over them. Default: one."""
        yield batch

    def portions(self, batch: Any) -> Iterator[tuple[slice, Any]]:
        """The batch in parts that go through the model one after the other, and which examples each has.

        Default: the whole. Override where an example is many rows to the model.
        """
        yield slice(None), batch

    def within(self, memory: int, example: Any, peak: Callable[[Any, int], int]) -> Task:
        """The same task, its passes no larger than `memory` bytes hold. Default: as it is.

        `example` is a batch of one; `peak(part, B)` tells how many bytes a pass of B examples takes.
        """
        return self

    def brief(self) -> Task:
        """A task that runs the same code on less of an example, for checks. Default: as it is."""
        return self

    def step(self, c: int, steps: int) -> Task:
        """The task at one step of a trajectory of `steps`, for methods that sum over steps."""
        raise TypeError(f"{type(self).__name__} knows no trajectories")

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """How training examples are perturbed to learn weights from, one way or two; `examples` are some of them.

        Default: Gaussian noise on floating inputs.
        """
        return [Noise()]

    def mask(self, batch: Any) -> Tensor | None:
        """(B, T), True at positions that are real and not padding; None if all are."""
        return None

    def collate(self, examples: list[Any]) -> Any:
        return default_collate(examples)
