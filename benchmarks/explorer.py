"""How long the live page takes to rank anew when a slider is moved.

    python benchmarks/explorer.py                       # 50,000 examples, 24, 128 and 512 groups
    python benchmarks/explorer.py --examples 200000

An index of random features is made for a model with as many groups; a query is asked, and sliders are moved at random.
What is timed is all that the server does for one move: weights of the groups, the product with the contributions that
are held, `final` of the method, the best ten and the worst ten, unweighted and weighted, and the JSON of the answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

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


def measure(examples: int, groups: int, method: str, moves: int) -> np.ndarray:
    """Seconds of each of some moves."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--groups", type=int, nargs="*", default=[24, 128, 512])
    parser.add_argument("--moves", type=int, default=50)
    given = parser.parse_args()
    print(
        f"{given.examples:,} examples, {torch.get_num_threads()} threads: ms of a move, median (95th percentile)"
    )
    for method in ("tracin", "tracin-cosine"):
        for groups in given.groups:
            found = 1000 * measure(given.examples, groups, method, given.moves)
            print(
                f"{method:14} {groups:5} groups  {np.median(found):7.1f} ({np.quantile(found, 0.95):.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
