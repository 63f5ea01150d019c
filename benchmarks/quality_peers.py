"""The fine-tuning bank by other libraries and by unde: LDS of 250 queries, seconds from nothing to scores, bytes kept.

    python -m benchmarks.quality_peers [NAME ...]

Each runs once, in a process of its own with one thread, peers in the environments of `benchmarks.peers.host`. All have
the summed loss of a sequence as loss and as measurement, float32, labels of the data, and a damping of 0.1 × the mean
eigenvalue where they have one that is relative. Peers take the weights of linear layers, no embeddings and no norms:
for kronfluence and dattri Conv1D of GPT-2 is turned into nn.Linear (transposed weights), and the tied head is one of
them; bergson reads Conv1D, and takes the layers below the head. Its passes are of one sequence: it refuses to put more
tokens into a batch than the model has positions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "quality_peers.json"
BANK = "finetuned-gpt2"
BATCH = 50
Found = tuple[Any, float, float, int]  # (Q, N) scores, seconds before queries, seconds of queries, bytes kept


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _seconds() -> float:
    """Of the processor, in this process and those that ended within it: other load of the machine does not count."""
    return sum(os.times()[:4])


def unde(cell: Any, folder: Path, projection: str) -> Found:
    from unde.methods import EKFAC

    store = "auto" if projection.startswith("factored") else "int8"
    begun = _seconds()
    index = cell.build(folder / "index", EKFAC(projection), store_dtype=store, progress=False)
    built, kept = _seconds(), _size(folder / "index")
    total = index.score(cell.queries("eval")).total()
    return total, built - begun, _seconds() - built, kept


def exact(cell: Any, folder: Path, _: str) -> Found:
    import unde as library

    begun = _seconds()
    scores = library.attribute(
        cell.model, cell.task(), cell.train(), cell.queries("eval"), memory="4GB", progress=False
    )
    return scores.total(), 0.0, _seconds() - begun, 0


def kronfluence(cell: Any, folder: Path, rank: str) -> Found:
    import kronfluence as library
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments

    from benchmarks.peers.inputs import with_linear_layers

    task = cell.task()

    class Wrapped(library.Task):
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Any:
            return _total(task, model, batch)

        def compute_measurement(self, batch: Any, model: Any) -> Any:
            return _total(task, model, batch)

    begun, wrapped = _seconds(), Wrapped()
    model = prepare_model(with_linear_layers(cell.model), wrapped)
    analyzer = Analyzer("bank", model, wrapped, cpu=True, output_dir=str(folder), disable_tqdm=True)
    train, queries = _rows(cell)
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
    import torch
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask
    from torch.utils.data import DataLoader

    from benchmarks.peers.inputs import with_linear_layers

    task, model = cell.task(), with_linear_layers(cell.model)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    labelled = [[row | {"labels": row["input_ids"]} for row in rows] for rows in _rows(cell)]
    loaders = [DataLoader(rows, batch_size=BATCH) for rows in labelled]
    begun = _seconds()
    attributor = LoGraAttributor(
        AttributionTask(lambda model, batch, device: _total(task, model, batch), model, model.state_dict()),
        layers, hessian="eFIM", damping=0.1, device="cpu", proj_dim=int(rank) ** 2, offload="cpu",
        cache_dir=str(folder),
    )  # fmt: skip
    attributor.cache(loaders[0])
    built, kept = _seconds(), 4 * attributor.total_proj_dim * len(loaders[0].dataset)
    total = attributor.attribute(*loaders).T
    return total, built - begun, _seconds() - built, kept


def bergson(cell: Any, folder: Path, method: str) -> Found:
    """Its pipeline of commands on files: gradients of queries, factors, K g(q), then a pass over the training data."""
    from bergson.config.config import (
        DataConfig,
        DistributedConfig,
        HessianConfig,
        HessianPipelineConfig,
        IndexConfig,
        PreprocessConfig,
        QuerySetConfig,
        ScoreConfig,
    )  # fmt: skip
    from bergson.hessians.pipeline import hessian_pipeline
    from transformers import PreTrainedTokenizerFast

    from datasets import Dataset

    cell.model.save_pretrained(folder / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=cell.corpus().tokenizer)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder / "model")
    for name, rows in zip(("train", "eval"), _rows(cell)):
        ids = [row["input_ids"].tolist() for row in rows]
        Dataset.from_dict({"input_ids": ids}).save_to_disk(str(folder / name))
    begun = _seconds()
    config = IndexConfig(
        str(folder / "run"), model=str(folder / "model"), data=DataConfig(dataset=str(folder / "train")),
        distributed=DistributedConfig(nproc_per_node=1), token_batch_size=64, projection_dim=0,
    )  # fmt: skip
    hessian_pipeline(
        config,
        HessianConfig(method="kfac", ev_correction=True, use_dataset_labels=True),
        ScoreConfig(),
        PreprocessConfig(),
        HessianPipelineConfig(query=QuerySetConfig(dataset=str(folder / "eval"))),
    )
    from unde.integrations import peers

    total = peers.bergson(folder / "run" / "scores").total()
    return total, 0.0, _seconds() - begun, _size(folder / "run" / "hessian")


RUNS: dict[str, tuple[Callable[..., Found], str]] = {
    "unde kron(16)": (unde, "kron(16)"),
    "unde factored(1)": (unde, "factored(1)"),
    "unde factored(4)": (unde, "factored(4)"),
    "unde none": (unde, "none"),
    "unde, exact": (exact, ""),
    "kronfluence": (kronfluence, ""),
    "kronfluence, queries of rank 32": (kronfluence, "32"),
    "dattri LoGra, rank 16": (dattri, "16"),
    "dattri LoGra, rank 64": (dattri, "64"),
    "bergson": (bergson, ""),
}


def _total(task: Any, model: Any, batch: Any) -> Any:
    return task.loss(model, batch).sum()


def _rows(cell: Any) -> list[list[dict[str, Any]]]:
    return [
        [{"input_ids": row} for row in data["input_ids"]] for data in (cell.train(), cell.queries("eval"))
    ]


def run_here(name: str) -> dict[str, Any]:
    import torch
    from experiments.shared import cells

    cell = cells.get(BANK)
    run, what = RUNS[name]
    cell.model.eval(), cell.train(), cell.queries("eval")
    with tempfile.TemporaryDirectory() as folder:
        total, before, asked, kept = run(cell, Path(folder), what)
    found = {"seconds": {"before queries": before, "queries": asked}, "bytes": kept}
    return found | {"lds": cell.lds(torch.as_tensor(total).float()).as_dict()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        given.here.write_text(json.dumps(run_here(given.names[0])))
        return
    from benchmarks.machine import provenance
    from benchmarks.peers import PEERS, host

    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    for name in given.names or RUNS:
        peer = RUNS[name][0].__name__
        python = host.python_of(peer) if peer in PEERS else sys.executable
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            words = [str(python), "-m", "benchmarks.quality_peers", name]
            done = subprocess.run([*words, "--here", str(out)], env=os.environ | {"OMP_NUM_THREADS": "1"})
            if done.returncode:
                print(f"{name}: failed", flush=True)
                continue
            results[name] = json.loads(out.read_text()) | {"version": PEERS.get(peer, "")}
        print(name, results[name], flush=True)
        about = provenance(0, quick=False)
        RESULTS.write_text(json.dumps({"results": results, "provenance": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
