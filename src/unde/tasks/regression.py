"""Squared errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks import sampling
from unde.tasks.prediction import Prediction, first, label_tensor
from unde.tasks.tokens import Unreadable


class Regression(Prediction):
    """Real numbers: labels are (B,) or (B, outputs), losses the mean of squared errors over the outputs.

    Batches are those of `Classification`. As `problem_type="regression"` of transformers.

    >>> import torch
    >>> Regression().loss(nn.Identity(), (torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 5.0])))
    tensor([0., 9.])
    """

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        output, labels = self.logits(model, batch), self.split(batch)[1]
        labels = label_tensor(labels, "real numbers", len(output))
        values, target = output.reshape(len(output), -1), labels.reshape(len(labels), -1)
        if values.shape != target.shape:
            shapes = f"predictions of shape {tuple(output.shape)} for labels of shape {tuple(labels.shape)}"
            raise UndeError(f"{shapes}: expected as many numbers in each")
        row = first(~torch.isfinite(target).all(1))
        if row is not None:
            raise Unreadable(row, f"has the label {target[row].tolist()}: expected finite numbers")
        return values, target.to(values.dtype)

    def compare(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits - labels).square().mean(1)

    def sample_labels(self, logits: Tensor, ids: Sequence[int] | None) -> Tensor:
        """A squared error is the −log p of a normal distribution with variance 1/2."""
        u = sampling.uniforms(ids, logits.shape[1]).clamp(min=2.0**-54).to(logits.device)
        return logits + (torch.special.ndtri(u) / 2**0.5).to(logits.dtype)

    def fisher_term(self, logits: Tensor, labels: Tensor, label: int) -> Tensor:
        """Errors are independent with variance 1/2: an output times √2, over their number."""
        return logits[:, label] * (2**0.5 / logits.shape[1])
