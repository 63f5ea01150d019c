"""The fine-tuning bank by other libraries and by unde: LDS of 250 queries, seconds of the processor, bytes kept.

    OMP_NUM_THREADS=1 python -m benchmarks.quality_peers "unde factored(4)"   # each of RUNS, in a process of its own

Peers run with the interpreter that `benchmarks.peers.host.python_of` makes for them. All have the summed loss of a
sequence as loss and as measurement, float32, labels of the data, and a damping of 0.1 × the mean eigenvalue. Peers take
the weights of linear layers, no embeddings and no norms: for kronfluence and dattri Conv1D of GPT-2 is turned into
nn.Linear (transposed weights); bergson reads Conv1D. The head is tied to the embedding: dattri takes its share as a
linear layer, bergson leaves it out, and so does kronfluence here, where it would take most of the time. Passes of
bergson are of one sequence: it refuses to put more tokens into a batch than the model has positions.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.shared import cells
from torch import nn

from benchmarks.machine import provenance
from benchmarks.peers.inputs import with_linear_layers

RESULTS = Path(__file__).parent / "results" / "quality_peers.json"
BATCH = 50
Found = tuple[Any, float, float, int]  # (Q, N) scores, seconds before queries, seconds of queries, bytes kept


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _seconds() -> float:
    """Of the processor, here and in processes that ended: other load of the machine does not count."""
    return sum(os.times()[:4])


def _rows(cell: Any) -> list[list[dict[str, Any]]]:
    return [
        [{"input_ids": row} for row in data["input_ids"]] for data in (cell.train(), cell.queries("eval"))
    ]


def unde(cell: Any, folder: Path, projection: str) -> Found:
    from unde.methods import EKFAC

    store = "auto" if projection.startswith("factored") else "int8"
    begun = _seconds()
    index = cell.build(folder / "index", EKFAC(projection), store_dtype=store)
    built, kept = _seconds(), _size(folder / "index")
    total = index.score(cell.queries("eval")).total()
    return total, built - begun, _seconds() - built, kept


def exact(cell: Any, folder: Path, _: str) -> Found:
    from unde import attribute

    begun = _seconds()
    scores = attribute(cell.model, cell.task(), cell.train(), cell.queries("eval"), memory="4GB")
    return scores.total(), 0.0, _seconds() - begun, 0


def kronfluence(cell: Any, folder: Path, rank: str) -> Found:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments

    from benchmarks.kronfluence_scores import Wrapped

    begun, model = _seconds(), with_linear_layers(cell.model)
    wrapped, (train, queries) = Wrapped(cell.task(), model, ["lm_head"]), _rows(cell)
    model = prepare_model(model, wrapped)
    analyzer = Analyzer("bank", model, wrapped, cpu=True, output_dir=str(folder), disable_tqdm=True)
    fit = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    analyzer.fit_all_factors("ekfac", train, per_device_batch_size=BATCH, factor_args=fit)
    built, kept = _seconds(), _size(folder)
    asked = ScoreArguments(damping_factor=None, query_gradient_low_rank=int(rank) if rank else None)
    analyzer.compute_pairwise_scores(
        "scores", "ekfac", queries, train, per_device_query_batch_size=len(queries),
        per_device_train_batch_size=BATCH, score_args=asked,
    )  # fmt: skip
    total = analyzer.load_pairwise_scores("scores")["all_modules"]
    return total, built - begun, _seconds() - built, kept


def dattri(cell: Any, folder: Path, rank: str) -> Found:
    """LoGra keeps its features in memory; their bytes are those of float32 numbers."""
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask
    from torch.utils.data import DataLoader

    task, model = cell.task(), with_linear_layers(cell.model)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    labelled = [[row | {"labels": row["input_ids"]} for row in rows] for rows in _rows(cell)]
    train, queries = (DataLoader(rows, batch_size=BATCH) for rows in labelled)
    begun = _seconds()
    given = AttributionTask(lambda model, batch, _: task.loss(model, batch).sum(), model, model.state_dict())
    attributor = LoGraAttributor(
        given, layers, damping=0.1, proj_dim=int(rank) ** 2, offload="cpu", cache_dir=str(folder)
    )
    attributor.cache(train)
    built, kept = _seconds(), 4 * attributor.total_proj_dim * len(labelled[0])
    total = attributor.attribute(train, queries).T
    return total, built - begun, _seconds() - built, kept


def bergson(cell: Any, folder: Path, _: str) -> Found:
    """Its pipeline of commands on files: gradients of queries, factors, K g(q), then a pass over the training data."""
    from bergson.config import config as b
    from bergson.hessians.pipeline import hessian_pipeline
    from transformers import PreTrainedTokenizerFast

    from datasets import Dataset
    from unde.integrations import peers

    cell.model.save_pretrained(folder / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=cell.corpus().tokenizer, pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "model")
    for name, rows in zip(("train", "eval"), _rows(cell)):
        Dataset.from_dict({"input_ids": [r["input_ids"].tolist() for r in rows]}).save_to_disk(folder / name)
    begun = _seconds()
    config = b.IndexConfig(
        str(folder / "run"), model=str(folder / "model"), data=b.DataConfig(dataset=str(folder / "train")),
        distributed=b.DistributedConfig(nproc_per_node=1), token_batch_size=64,
    )  # fmt: skip
    fit = b.HessianConfig(method="kfac", ev_correction=True, use_dataset_labels=True)
    asked = b.HessianPipelineConfig(query=b.QuerySetConfig(dataset=str(folder / "eval")))
    hessian_pipeline(config, fit, b.ScoreConfig(), b.PreprocessConfig(), asked)
    total = peers.bergson(folder / "run" / "scores").total()
    return total, 0.0, _seconds() - begun, _size(folder / "run" / "hessian")


RUNS: dict[str, tuple[Callable[..., Found], str]] = {
    **{f"unde {f}": (unde, f) for f in ("kron(16)", "kron(64)", "factored(1)", "factored(4)", "none")},
    "unde, exact": (exact, ""),
    "kronfluence": (kronfluence, ""),
    "kronfluence, queries of rank 32": (kronfluence, "32"),
    "dattri LoGra, rank 16": (dattri, "16"),
    "dattri LoGra, rank 64": (dattri, "64"),
    "bergson": (bergson, ""),
}


def main(name: str) -> None:
    (run, what), cell = RUNS[name], cells.get("finetuned-gpt2")
    cell.model.eval(), cell.train(), cell.queries("eval")
    with tempfile.TemporaryDirectory() as folder:
        total, before, asked, kept = run(cell, Path(folder), what)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}
    seconds = {"before queries": before, "queries": asked}
    found["results"][name] = {"seconds": seconds, "bytes": kept, "lds": cell.lds(total.float()).as_dict()}
    found["provenance"] = provenance(0, quick=False)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
