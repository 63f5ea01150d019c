"""bergson: gradients of the linear layers below the head, projected on both sides, written to disk by its collector."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.inputs import BuildInputs

NOTE = "linear layers below the head, without biases, rank² numbers each, on disk"


def run(given: BuildInputs) -> dict[str, Any]:
    from bergson import GradientCollector, GradientProcessor, IndexConfig, collect_gradients
    from bergson.config import PreprocessConfig

    from datasets import Dataset

    model = given.setup.model
    if "input_ids" not in given.rows[0]:
        return _own_loop(given)
    begun = time.perf_counter()
    model.requires_grad_(False)  # as its own builds do
    model.get_input_embeddings().requires_grad_(True)
    tokens = [given.rows[i]["input_ids"].tolist() for i in range(given.examples)]
    data = Dataset.from_dict({"input_ids": tokens, "length": list(map(len, tokens))})
    processor = GradientProcessor(projection_dim=given.rank)
    config = IndexConfig(run_path=str(given.folder / "index"), projection_dim=given.rank)
    config.partial_run_path.mkdir(parents=True)
    ready = time.perf_counter()
    collect_gradients(model, data, processor, config, batches=[list(b) for b in given.batches()])
    done = time.perf_counter()
    shapes = GradientCollector(
        model=model.base_model, cfg=config, processor=processor, data=data, skip_index=True,
        preprocess_cfg=PreprocessConfig(),
    ).shapes()  # fmt: skip
    numbers = sum(shape.numel() for shape in shapes.values())
    return {"seconds": done - ready, "planning": ready - begun, "numbers": numbers}


def _own_loop(given: BuildInputs) -> dict[str, Any]:
    """Its hooks with our loss, for what is no text: its own loop reads tokens only."""
    from bergson import GradientProcessor, IndexConfig, InMemoryCollector

    from datasets import Dataset

    model = given.setup.model
    collector = InMemoryCollector(
        model=model, data=Dataset.from_dict({"i": list(range(given.examples))}),
        cfg=IndexConfig(run_path=str(given.folder), projection_dim=given.rank),
        processor=GradientProcessor(projection_dim=given.rank),
    )  # fmt: skip
    begun = time.perf_counter()
    for where in given.batches():
        with collector.with_batch(None):
            losses = given.setup.task.loss(model, given.rows.batch(where))
            losses.sum().backward()
        model.zero_grad()
        collector.process_batch(list(where), losses=losses)
    collector.teardown()
    numbers = sum(shape.numel() for shape in collector.shapes().values())
    return {"seconds": time.perf_counter() - begun, "planning": 0.0, "numbers": numbers}
