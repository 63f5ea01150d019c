"""The paper's Llama protocol on a small Llama-type model: generated queries, top-1 tail-patch.

The model (RoPE, grouped queries, SwiGLU, RMSNorm, trained from scratch on 2,048 sequences of State of the Union
addresses) continues snippets of its own training sequences: the first 16 tokens of each, 48 more sampled from its
predictions. Only what it generated counts as the query; the snippet is masked (with it, the sequence that the
snippet is from would be top-1 nearly always). 128 such texts learn weights by Algorithm 1, 128 from other snippets
evaluate. For each query the model takes one AdamW step on its top-1 training sequence; printed is 100 × Δ log p a
token. Also: the qualitative figure, the top-1 passage of LoGRA beside that of weighted LoGRA, where they differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.shared.corpora import LENGTH, PEAK_LR
from experiments.shared.language import METHODS, attributed, patch_baselines, patched
from unde.tasks.language import IGNORE

PAPER = "Table 13, Figures 10 and 11"
SNIPPET, QUERIES = 16, 128
SHOWN = 4


@torch.no_grad()
def continued(model: nn.Module, prompts: Tensor, seed: int) -> Tensor:
    """(n, 64): each prompt, and tokens sampled one after the other from the model's own distribution."""
    draw, tokens = torch.Generator().manual_seed(seed), prompts
    while tokens.shape[1] < LENGTH:
        probabilities = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=draw)], 1)
    return tokens


def asked(rows: Tensor) -> dict[str, Tensor]:
    """The generated tokens alone have a loss."""
    labels = rows.clone()
    labels[:, :SNIPPET] = IGNORE
    return {"input_ids": rows, "labels": labels}


def run(variant: str | None) -> dict[str, Any]:
    there = attributed("sotu", "llama", study="llama_tail_patch")
    snippets = torch.randperm(len(there.data.train), generator=torch.Generator().manual_seed(0))
    roles = [
        continued(there.model, there.data.train[which, :SNIPPET], seed)
        for seed, which in enumerate(snippets[: 2 * QUERIES].split(QUERIES))
    ]
    learn, evaluate = (there.index.features(asked(rows)) for rows in roles)
    patch = there.patch(asked(roles[1]))
    results: dict = {"setting": {"k": 1, "queries": QUERIES, "lr": PEAK_LR / 10, "snippet": SNIPPET}}
    results |= patch_baselines(there, patch, roles[1][:, SNIPPET:], 1)
    source = snippets[QUERIES : 2 * QUERIES]
    for title in ("TracIn", "LoGRA"):
        scores = (there.index.score(features, METHODS[title]) for features in (learn, evaluate))
        results[title], tops = patched(title, *scores, patch, 1)
        own = {kind: float((top[:, 0] == source).float().mean()) for kind, top in tops.items()}
        results[title]["own snippet is top-1"] = own
        print(
            "    the snippet's own sequence is top-1:", {kind: f"{share:.0%}" for kind, share in own.items()}
        )
    plain, weighted = (top[:, 0] for top in tops.values())
    results["qualitative"] = [
        {
            "query": there.data.text(roles[1][q]),
            "LoGRA": there.data.text(there.data.train[plain[q]]),
            "weighted LoGRA": there.data.text(there.data.train[weighted[q]]),
        }
        for q in (plain != weighted).nonzero()[:SHOWN, 0].tolist()
    ]
    return results
