"""Conjugate gradients on the Gauss-Newton matrix beside EKFAC, for a few queries of the fine-tuning bank.

`unde.attribute` with cg=0 (EKFAC) and with a few steps, on queries that are spread over the evaluation set. LDS is
compared query by query; seconds are of the processor, with one thread.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import unde
from experiments.shared import cells
from unde.data import evenly
from unde.evaluate import lds, paired

PAPER = ""
BANK = "finetuned-gpt2"
VARIANTS = (BANK,)
QUERIES, STEPS = 8, (0, 4)


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    cell = cells.get(variant)
    where = evenly(cell.bank.utility["eval"].shape[1], QUERIES)
    queries = {name: values[where] for name, values in cell.queries("eval").items()}
    found, seconds = {}, {}
    for steps in STEPS:
        begun = time.process_time()
        scores = unde.attribute(
            cell.model, cell.task(), cell.train(), queries, "ekfac", cg=steps, memory="4GB", threads=1
        )
        seconds[steps] = time.process_time() - begun
        found[steps] = lds(scores.total(), cell.bank.masks, cell.bank.utility["eval"][:, where])
    gains = {steps: paired(found[0], found[steps]) for steps in STEPS[1:]}
    return {
        "queries": len(where),
        "lds": {str(s): [e.mean, e.ci95] for s, e in found.items()},
        "gain": {str(s): [e.mean, e.ci95] for s, e in gains.items()},
        "seconds": {str(s): t for s, t in seconds.items()},
    }
