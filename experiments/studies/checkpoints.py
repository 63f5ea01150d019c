"""Checkpoints and ensembles: what five of either add to the LDS of a digits MLP.

The model and the training of docs/banks.md on 300 digits, 100 others as queries, 128 halves with three seeds each. The
attributed model is one training on all data; its checkpoints are those after 4, 8, 12, 16 and 20 epochs; an ensemble is
five trainings with other seeds, the first of which is the attributed model. All dampings are 0.1.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unde.evaluate import Bank, TrainingSpec, lds, paired

PAPER = ""
N, QUERIES, EPOCHS, BATCH, KEPT = 300, 100, 20, 32, 5
SUBSETS, SEEDS, BOOTSTRAP = 128, 3, 500


@cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    return x.float() / 16, y


def train_data() -> tuple[Tensor, Tensor]:
    return digits()[0][:N], digits()[1][:N]


def queries() -> tuple[Tensor, Tensor]:
    return digits()[0][N : N + QUERIES], digits()[1][N : N + QUERIES]


def make(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def utility(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"eval": -loss(model, queries())}


optimizer = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.01)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)


def trained(seed: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    model, (x, y) = make(seed), train_data()
    steps = optimizer(model.parameters())
    rates = schedule(steps, EPOCHS * -(-N // BATCH))
    found = []
    for epoch in range(1, EPOCHS + 1):
        for which in torch.randperm(N).split(BATCH):
            steps.zero_grad()
            loss(model, (x[which], y[which])).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            rates.step()
        if epoch % (EPOCHS // KEPT) == 0:
            found.append({k: v.clone() for k, v in model.state_dict().items()})
    return found


def run(variant: str | None) -> dict[str, Any]:
    """{method, projection: {"one", "checkpoints", "ensemble": {"estimate", "difference"}}}"""
    from experiments.shared.paths import RUNS
    from unde import Index
    from unde.methods import EKFAC, TRAK, LoGRA, TracIn
    from unde.tasks import Classification

    torch.set_num_threads(1)
    training = TrainingSpec(
        model=make, data=train_data(), loss=loss, optimizer=optimizer, schedule=schedule, clip=1.0, epochs=EPOCHS,
        batch_size=BATCH,
    )  # fmt: skip
    (RUNS / "checkpoints").mkdir(parents=True, exist_ok=True)
    bank = Bank.run(
        RUNS / "checkpoints" / "bank.npz", train=training, utility=utility, n_train=N, subsets=SUBSETS,
        seeds_per_subset=SEEDS, stratify=train_data()[1], name="digits MLP",
    )  # fmt: skip
    along = trained(0)
    members = [along[-1], *(trained(seed)[-1] for seed in range(1, KEPT))]
    several = {"one": [along[-1]], "checkpoints": along, "ensemble": members}
    results: dict[str, Any] = {"models": len(bank.masks) * SEEDS}
    model = make(0)
    for projection in ("kron(16)", "none"):
        found: dict[str, dict[str, Any]] = {}
        for name, states in several.items():
            with tempfile.TemporaryDirectory() as folder:
                method = EKFAC(projection=projection, damping=0.1, fisher="empirical")
                index = Index.build(
                    model, Classification(), train_data(), Path(folder) / "index", method=method, checkpoints=states,
                    progress=False,
                )  # fmt: skip
                asked = index.features(queries())
                for m in (TracIn(), TRAK(damping=0.1), LoGRA(damping=0.1), method):
                    total = index.score(asked, m).total()
                    found.setdefault(m.name, {})[name] = lds(
                        total, bank.masks, bank.utility["eval"], bootstrap=BOOTSTRAP
                    )
        for title, estimates in found.items():
            results[f"{title}, {projection}"] = {
                name: {"estimate": e.as_dict(), "difference": paired(estimates["one"], e).as_dict()}
                for name, e in estimates.items()
            }
            print(title, projection, {k: round(100 * e.mean, 1) for k, e in estimates.items()}, flush=True)
    return results
