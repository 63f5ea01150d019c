"""The planned case of docs/scale.md: EKFAC on Llama-3-8B and a million sequences, with 1, 8 and 64 GPUs.

Nothing of it was run. Operations, passes and bytes come from the plan. Hours come from a rate, which is

    the peak of a GPU  ×  the share of it that training reaches  ×  what a pass of features reaches of a plain pass

The first is the maker's number, the second was published for models of this family, the third was measured here: the
time of a pass of features on a small Llama over that of a plain pass (results/language.json), against their operations.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unde import Index
from unde.methods import EKFAC
from unde.tasks import CausalLM

LANGUAGE = Path(__file__).parent / "results" / "language.json"
GPUS = (1, 8, 64)
PEAK, SHARE = 989e12, 0.40
SOURCES = {
    "peak": "H100 SXM, dense bfloat16 (NVIDIA data sheet)",
    "share": "38 to 43 % of it in pretraining on H100 (The Llama 3 Herd of Models, table 4, 2024)",
    "reached": "a Llama of 6 layers on this processor (benchmarks/language.py)",
}
DISK, EXAMPLES, TOKENS = "1GB", 1_000_000, 1024
METHOD = EKFAC(projection="kron(16)")
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000,
}
SMALL = {  # that of benchmarks/cases.py
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
}


def llama(sizes: dict[str, int]) -> nn.Module:
    """Without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0)).to(torch.bfloat16)


def reached() -> dict[str, float]:
    """How fast a pass of features works through its operations, beside a plain pass, as measured on the small model."""
    plan = Index.plan(llama(SMALL).float(), CausalLM(), n_examples=16, seq_len=256, method=METHOD)
    found = json.loads(LANGUAGE.read_text())["llama"]["passes"]["EKFAC 16"]["ratio"]
    return {"operations": plan.ratio("features"), "seconds": found, "reached": plan.ratio("features") / found}


def planned() -> dict[str, Any]:
    small = reached()
    rate = PEAK * SHARE * small["reached"]
    plan = Index.plan(
        llama(LLAMA_3_8B),
        CausalLM(),
        n_examples=EXAMPLES,
        seq_len=TOKENS,
        method=METHOD,
        store_dtype="float16",
        workers=GPUS[-1],
        flops=rate,
        disk=DISK,
    )
    assert plan.workers is not None
    return {
        "examples": EXAMPLES,
        "tokens": TOKENS,
        "method": str(METHOD),
        "rate": {"peak": PEAK, "share": SHARE, **small, "flops": rate, "sources": SOURCES},
        "features": plan.features,
        "flops": plan.flops,
        "disk": plan.disk,
        "peak_memory": plan.peak("features"),
        "workers": {str(n): replace(plan.workers, count=n).as_dict() for n in GPUS},
    }
