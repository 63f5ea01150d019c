"""How long the live page takes to rank anew when a slider is moved.

    python -m benchmarks run explorer

An index of random features is made for a model with as many groups; a query is asked, and sliders are moved at random.
What is timed is all that the server does for one move: weights of the groups, the product with the contributions that
are held, `final` of the method, the best ten and the worst ten, unweighted and weighted, and the JSON of the answer.
"""

from __future__ import annotations

import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import Index, Setup
from unde.tasks import Classification
from unde.ui.explorer import Session
from unde.ui.explorer.jobs import BackgroundJob
from unde.ui.explorer.query_builder import Inquiry


class Wide(nn.Module):
    """Many small layers beside one another, a group each."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(groups))

    def forward(self, x: Tensor) -> Tensor:
        return sum((part(x) for part in self.parts), torch.zeros(2))


def measure(quick: bool = False) -> dict[str, Any]:
    """Milliseconds of a move, median and 95th percentile, by method and number of groups."""
    examples, moves = (1_000, 5) if quick else (50_000, 50)
    rows = []
    for method, groups in product(("tracin", "tracin-cosine"), (24, 128, 512)):
        found = 1000 * moved(examples, groups, method, moves)
        median, most = float(np.median(found)), float(np.quantile(found, 0.95))
        rows.append({"method": method, "groups": groups, "ms": round(median, 1), "p95": round(most, 1)})
        print(rows[-1], flush=True)
    return {"examples": examples, "rows": rows}


def moved(examples: int, groups: int, method: str, moves: int) -> np.ndarray:
    torch.manual_seed(0)
    x, y = torch.randn(examples + 1, 4), torch.randint(2, (examples + 1,))
    model = Wide(groups)
    setup = Setup(model, Classification(), (x[:-1], y[:-1]), eval_queries=(x[-1:], y[-1:]))
    random, taken = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        index = Index.build(
            model, setup.task, setup.train_data, Path(folder) / "i", method="tracin", progress=False
        )
        session = Session(index, setup)
        asked = Inquiry.read({"plus": [{"kind": "eval", "at": 0}], "method": method})
        answer = session.ask(asked, BackgroundJob(lambda job: None, False))["answer"]
        for _ in range(moves):
            values = random.uniform(0, 2, len(session.sliders.names)).tolist()
            begun = time.perf_counter()
            json.dumps(session.rank({"answer": answer, "values": values}))
            taken.append(time.perf_counter() - begun)
    return np.array(taken)
