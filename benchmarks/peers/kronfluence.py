"""kronfluence: no features are kept. A pass over the training examples gives their scores for four queries, by inner
products of whole gradients (strategy "identity": no factors are fitted)."""

from __future__ import annotations

import copy
import time
from typing import Any

from torch import Tensor, nn

from benchmarks.peers.inputs import BuildInputs, refuse_diffusion, with_linear_layers

NOTE = "linear and convolutional layers, scores of 4 queries from whole gradients, of which none are kept: no rank"
QUERIES = 4


def run(given: BuildInputs) -> dict[str, Any]:
    import kronfluence
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.utils.dataset import DataLoaderKwargs

    refuse_diffusion(given)

    class Wrapped(kronfluence.Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return given.setup.task.loss(model, batch).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return given.setup.task.loss(model, batch).sum()

    begun = time.perf_counter()
    model = with_linear_layers(copy.deepcopy(given.setup.model))
    wrapped = Wrapped()
    analyzer = Analyzer(
        "bench",
        prepare_model(model, wrapped),
        wrapped,
        cpu=True,
        output_dir=str(given.folder),
        disable_tqdm=True,
    )
    analyzer.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=given.rows.collate))
    examples = given.chosen
    analyzer.fit_all_factors("none", examples, factor_args=FactorArguments(strategy="identity"))
    ready = time.perf_counter()
    analyzer.compute_pairwise_scores(
        "scores", "none", examples[:QUERIES], examples, per_device_query_batch_size=QUERIES,
        per_device_train_batch_size=given.case.batch, score_args=ScoreArguments(damping_factor=None),
    )  # fmt: skip
    done = time.perf_counter()
    return {"seconds": done - ready, "planning": ready - begun, "numbers": QUERIES}
