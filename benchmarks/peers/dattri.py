"""dattri: its LoGra attributor, gradients of all nn.Linear layers projected on both sides, in memory: its files ask for
pinned memory, which needs a GPU."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from benchmarks.peers.inputs import BuildInputs, Cannot, refuse_diffusion, with_linear_layers

NOTE = "nn.Linear layers with biases (Conv1D of GPT-2 turned into them), rank² numbers each, in memory"


def run(given: BuildInputs) -> dict[str, Any]:
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    refuse_diffusion(given)
    model = with_linear_layers(given.setup.model)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if len(layers) < 2:
        raise Cannot(f"nn.Linear layers only, of which this model has {len(layers)}")

    def named(examples: list[Any]) -> dict[str, Tensor]:
        """As transformers names them: of a tuple dattri would run the first example without its batch."""
        batch = given.rows.collate(examples)
        return batch if isinstance(batch, dict) else {"pixel_values": batch[0], "labels": batch[1]}

    def loss(model: nn.Module, batch: dict[str, Tensor], device: str) -> Tensor:
        found = (batch["pixel_values"], batch["labels"]) if "pixel_values" in batch else batch
        return given.setup.task.loss(model, found).sum()

    begun = time.perf_counter()
    loader = given.loader(named)
    attributor = LoGraAttributor(
        AttributionTask(loss, model, model.state_dict()), layers, hessian="Identity", device="cpu",
        proj_dim=given.rank**2, offload="cpu", cache_dir=str(given.folder),
    )  # fmt: skip
    attributor._setup_compressors(loader)  # as `cache` does first
    ready = time.perf_counter()
    attributor.cache(loader)
    done = time.perf_counter()
    return {"seconds": done - ready, "planning": ready - begun, "numbers": attributor.total_proj_dim}
