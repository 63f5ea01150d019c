"""Contributions of the tokens of a training sequence to its score; they add up to the score.

The loss of a sequence is a sum over its tokens, so its gradient is, and so is its score:

    ⟨ w ⊙ g(q), K g(n) ⟩ = Σ_t ⟨ K (w ⊙ g(q)), g_t(n) ⟩

The right side is the change of every token's loss along one direction in parameter space: a single forward-mode
derivative for each pair of query and sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from unde.checkpoints import load_checkpoint
from unde.data import Rows, to_device
from unde.default_device import host_default
from unde.errors import UndeError
from unde.gradients.feature_pass import exclusive
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.index.state import IndexState
from unde.scoring import GroupScores, WeightsLike

NO_FORWARD_MODE = (RuntimeError, NotImplementedError)


class TokenScores:
    """Contributions of single tokens under the scores of some queries; `index.tokens(scores)` returns it.

    >>> tokens = index.tokens(scores, weights)  # doctest: +SKIP
    >>> tokens(0, train_data[7])  # (T,), which adds up to scores.total(weights)[0, 7]  # doctest: +SKIP
    """

    def __init__(self, state: IndexState, scores: GroupScores, weights: WeightsLike = None) -> None:
        runner = state.runner
        if not hasattr(runner.inputs.task, "token_losses"):
            raise UndeError(
                f"{type(runner.inputs.task).__name__} defines no token_losses(model, batch): scores have parts "
                "for tokens where the loss is a sum over tokens, as that of CausalLM is"
            )
        self.runner, self.scorer, self.collate, self.scores = runner, state.scorer, state.collate, scores
        self.w = scores.align_weights(weights)
        train = state.scorer.train_features(scores.method)
        blocks = [
            scores.select_block(queries).query_side.apply_weights(self.w) for queries in scores.query_blocks
        ]
        parts = [[train.kernel_times(c, q).cpu() for c, q in enumerate(weighted)] for weighted in blocks]
        self.directions = torch.cat([torch.stack(part) for part in parts], 1)  # (C, Q, D)

    @host_default
    def __call__(self, q: int, example: Any) -> Tensor:
        """Contributions of the tokens of a training example.

        Args:
            q: Number of the query.
            example: A row of the training data.

        Returns:
            (T,) contributions, which add up to the score of the example for query q.
        """
        inputs = self.runner.inputs
        model, checkpoints = inputs.model, inputs.checkpoints
        device, dtype = placement(model)
        batch = to_device(Rows([example], self.collate).batch([0]), device)
        total = torch.zeros(())
        with exclusive(model):
            self.runner.check_model()
            for c, directions in enumerate(self.directions):
                with load_checkpoint(model, checkpoints, c):
                    total = total + self._along(c, directions[q].to(device, dtype), batch).cpu().double()
        return self._finish(q, example, total)

    def _along(self, c: int, direction: Tensor, batch: Any) -> Tensor:
        """d/dε of the tokens' losses at θ + ε Pᵀ direction."""
        model: Any = self.runner.inputs.model
        named = dict(model.named_parameters())
        tangents = {
            u.name: u.projection.back(direction[u.columns].unsqueeze(0)).view(u.shape).to(named[u.name].dtype)
            for u in self.runner.units_at(c)
        }
        wrapped = _TokenLosses(model, self.runner.inputs.task)

        def losses(*values: Tensor) -> Tensor:
            swapped = {f"model.{name}": v for name, v in zip(tangents, values)}
            return functional_call(wrapped, swapped, (batch,), tie_weights=True)[0]

        primals = tuple(named[name].detach() for name in tangents)
        with frozen_eval(model):
            try:
                with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward-mode derivative
                    return jvp(losses, primals, tuple(tangents.values()))[1]
            except NO_FORWARD_MODE:
                return _loop_over_tokens(losses, primals, tuple(tangents.values()))

    def _finish(self, q: int, example: Any, linear: Tensor) -> Tensor:
        """Final contributions: under a cosine all tokens share the norms."""
        method, total = self.scores.method, float(linear.sum())
        if method.linear or total == 0:
            return linear
        features = self.runner.features(Rows([example], self.collate)).features  # (C, 1, D)
        example_scores = self.scorer.scores(method, features, [""]).regroup(self.scores.partition)
        squares = example_scores.query_side.squared_norms
        context = replace(self.scores.final_context(slice(q, q + 1), slice(0)), train_squares=lambda: squares)
        whole = torch.tensor([[total]], device=squares.device)
        return linear * (float(method.final(whole, context, self.w.to(squares.device))) / total)


class _TokenLosses(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, task: Any) -> None:
        super().__init__()
        self.training = model.training
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Tensor:
        return self.task.token_losses(self.model, batch)


def _loop_over_tokens(losses: Any, primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    """One backward pass for each token, for models with operations that have no forward mode."""
    leaves = tuple(p.clone().requires_grad_() for p in primals)
    values = losses(*leaves)
    out = torch.zeros_like(values)
    for t in range(len(values)):
        if values[t].requires_grad:
            grads = torch.autograd.grad(values[t], leaves, retain_graph=True, allow_unused=True)
            out[t] = sum((g * v).sum() for g, v in zip(grads, tangents) if g is not None)
    return out.detach()
