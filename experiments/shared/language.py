"""What the language studies share: the attributed GPT-2-like and Llama-like models, their indexes and methods."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.shared.corpora import EPOCHS, PEAK_LR, VOCABULARY, Corpus, adamw, corpus, gpt2, llama, train
from experiments.shared.paths import HERE
from unde import Index, Weights, learn_weights
from unde.evaluate import (
    Estimate,
    TailPatch,
    bm25,
    paired,
    random_indices,
    representation_similarity,
    tail_patch,
)
from unde.methods import EKFAC, TRAK, LoGRA, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import CausalLM

PROJECTION = "kron(32)"
METHODS: dict[str, Method] = {"TracIn": TracIn(), "TRAK": TRAK(), "LoGRA": LoGRA(), "EKFAC": EKFAC()}
MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}
LAST_BLOCK = {"gpt2": "transformer.h.3", "llama": "model.layers.3"}


@dataclass
class Attributed:
    """A model trained on all training sequences of a corpus, its optimizer state, and the index of its gradients."""

    data: Corpus
    model: nn.Module
    optimizer_state: dict[str, Any]
    index: Index
    architecture: str

    def baselines(self, queries: Tensor) -> dict[str, Tensor]:
        return baselines(self.data, self.model, queries, LAST_BLOCK[self.architecture])

    def patch(self, queries: dict[str, Tensor], **step: Any) -> Callable[[Tensor], TailPatch]:
        """What one more step, at a tenth of the peak rate, on some training sequences does to queries."""
        train = {"input_ids": self.data.train}
        return lambda indices: tail_patch(
            self.model, CausalLM(), train, queries, indices, optimizer=adamw, optimizer_state=self.optimizer_state,
            lr=PEAK_LR / 10, max_grad_norm=1.0, **step,
        )  # fmt: skip


def baselines(
    data: Corpus, model: nn.Module, queries: Tensor, layer: str = LAST_BLOCK["gpt2"]
) -> dict[str, Tensor]:
    """(Q, N) scores that need no gradients: of words, and of mean-pooled hidden states of the last block."""
    layer = next(name for name, _ in model.named_modules() if name.endswith(layer))  # also below an adapter
    texts = [[data.text(row) for row in rows] for rows in (data.train, queries)]
    columns = [{"input_ids": rows} for rows in (data.train, queries)]
    return {
        "BM25": bm25(*texts),
        "similarity": representation_similarity(model, CausalLM(), *columns, layer=layer),
    }


def trained(name: str, architecture: str) -> tuple[nn.Module, dict[str, Any]]:
    model, path = MODELS[architecture](VOCABULARY[name]), HERE / "runs" / f"{name}-{architecture}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        return model.eval(), state["optimizer"]
    model, optimizer = train(model, corpus(name).train, epochs=EPOCHS[name], seed=0)
    path.parent.mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer.state_dict()


def attributed(name: str, architecture: str = "gpt2", study: str = "language") -> Attributed:
    """The index is built anew in a folder of the study, so that two studies can run at the same time."""
    torch.set_num_threads(1)  # one thread trains and indexes the same bits on every machine of a kind
    data = corpus(name)
    model, state = trained(name, architecture)
    folder = HERE / "runs" / f"{study}-{name}-{architecture}"
    shutil.rmtree(folder, ignore_errors=True)
    index = Index.build(
        model,
        CausalLM(),
        {"input_ids": data.train},
        folder,
        method=EKFAC(projection=PROJECTION),
        store_dtype="float32",
        memory="4GB",
    )
    return Attributed(data, model, state, index, architecture)


def patch_baselines(
    there: Attributed, patch: Callable[[Tensor], TailPatch], queries: Tensor, k: int
) -> dict[str, Any]:
    """Tail-patch of random sequences, and of those that baselines find."""
    found = {"random": random_indices(len(there.data.train), len(queries), k)}
    found |= {title: scores.topk(k).indices for title, scores in there.baselines(queries).items()}
    results = {}
    for title, indices in found.items():
        patched = patch(indices)
        results[title] = patched.as_dict()
        print(row(title, patched.per_token), flush=True)
    print(row("", *HEAD))
    return results


def patched(
    title: str, learn: GroupScores, evaluate: GroupScores, patch: Callable[[Tensor], TailPatch], k: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Tail-patch of the top k of a method, and these, without and with weights.

    Weights are by Algorithm 1 of the paper on learning queries, at one k and λ′ for all methods.
    """
    tops = {kind: evaluate.top(k, w).indices for kind, w in ways_to_weigh(learn).items()}
    found = {kind: patch(top) for kind, top in tops.items()}
    return gains(title, found, {kind: f.per_token for kind, f in found.items()}), tops


def ways_to_weigh(learn: GroupScores) -> dict[str, Weights | None]:
    return {"unweighted": None, "weighted": learn_weights(learn)}


def gains(title: str, found: Mapping[str, Any], measured: Mapping[str, Estimate]) -> dict[str, Any]:
    """What was found, and the paired difference of the measured, which is printed."""
    difference = paired(measured["unweighted"], measured["weighted"])
    print(row(title, *measured.values(), difference), flush=True)
    result = {kind: f.as_dict() for kind, f in found.items()}
    return result | {"differences": {"weighted": difference.as_dict()}}


HEAD = ("w/o w", "w", "difference")  # of what `gains` prints


def row(title: str, *cells: Any) -> str:
    """A line of a printed table; estimates as mean ± half width of the 95 % interval."""
    shown = [f"{c.mean:8.2f} ± {c.ci95:4.2f}" if hasattr(c, "ci95") else f"{c:>15}" for c in cells]
    return f"{title:30}" + "".join(f"{s:>20}" for s in shown)
