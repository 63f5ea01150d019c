"""captum: TracInCPFastRandProj, which keeps projected gradients of the last linear layer alone, in memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks.peers.inputs import BuildInputs, Cannot, Logits, refuse_diffusion

NOTE = "the last layer alone: a forward pass, and at most rank² numbers, in memory"


class _Unsorted:
    """In place of its default, a tree of neighbours, which is an extra package and no part of features."""

    def setup(self, data: torch.Tensor) -> None:
        self.data = data

    def get_nearest_neighbors(self, query: torch.Tensor, k: int) -> Any:
        raise Cannot("neighbours are not asked for")


def run(given: BuildInputs) -> dict[str, Any]:
    from captum.influence import TracInCPFastRandProj

    refuse_diffusion(given)
    if isinstance(given.rows[0], dict):
        raise Cannot("batches of inputs and one label each: no loss over the tokens of a sequence")
    begun = time.perf_counter()
    model = Logits(given.setup.model)
    last = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1]
    loader = given.loader(lambda rows: given.rows.collate(rows))
    ready = time.perf_counter()
    made = TracInCPFastRandProj(
        model, model.get_submodule(last), loader, [model.state_dict()],
        checkpoints_load_func=lambda model, state: 1.0, loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        nearest_neighbors=_Unsorted(), projection_dim=given.rank**2,
    )  # fmt: skip
    done = time.perf_counter()
    return {
        "seconds": done - ready,
        "planning": ready - begun,
        "numbers": made.src_intermediate_quantities.shape[1],
    }
