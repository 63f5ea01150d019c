"""traker: gradients of all parameters by vmap, then one dense projection of each example, into a memory-mapped file.

Its projector for CPUs draws the matrix anew for every batch once there are more than 100 columns, which takes minutes
for a model of ten million parameters: `rank` columns are the most that are kept, so it does far less than the others.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peers.inputs import BuildInputs, Logits, refuse_diffusion

NOTE = "all parameters, but only rank numbers an example, on disk; timed on one batch"


def run(given: BuildInputs) -> dict[str, Any]:
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput, ImageClassificationModelOutput

    refuse_diffusion(given)

    class Text(AbstractModelOutput):
        def __init__(self) -> None: ...

        @staticmethod
        def get_output(model: Any, weights: Any, buffers: Any, ids: Any, _: Any) -> Any:
            out = torch.func.functional_call(model, (weights, buffers), ids.unsqueeze(0)).logits[0, :-1]
            return -torch.nn.functional.cross_entropy(out, ids[1:])

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Any:
            return torch.ones(len(batch[0]), 1)

    begun = time.perf_counter()
    text = "input_ids" in given.rows[0] if isinstance(given.rows[0], dict) else False
    model = given.setup.model if text else Logits(given.setup.model)
    kept = TRAKer(
        model, Text() if text else ImageClassificationModelOutput(), given.examples, str(given.folder),
        load_from_save_dir=False, device="cpu", proj_dim=given.rank, use_half_precision=False, logging_level=40,
    )  # fmt: skip
    kept.load_checkpoint(model.state_dict(), model_id=0)
    ready = time.perf_counter()
    for where in given.batches():
        batch = given.rows.batch(where)
        parts = [batch["input_ids"], batch["input_ids"]] if text else list(batch)
        kept.featurize(parts, num_samples=len(where))
    kept.saver.serialize_current_model_id_metadata()
    done = time.perf_counter()
    return {"seconds": done - ready, "planning": ready - begun, "numbers": given.rank}
