"""What the classification studies share: the attributed models, their indexes, and results with provenance."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import unde
from experiments.shared.places import HERE, RESULTS
from unde import Index
from unde.demo.digits import Digits, digits, train
from unde.evaluate import Estimate
from unde.methods import TRAK, Method, TracIn
from unde.tasks import Classification

ARCHITECTURES = ("resnet", "vit")
METHODS: dict[str, Method] = {"TracIn": TracIn(), "TRAK": TRAK()}


def attributed(architecture: str, corrupted: float = 0.0) -> tuple[Index, Digits]:
    """A model trained on all 4,000 digits and the index of its gradients, built anew in runs/ in seconds."""
    data = digits(corrupted)
    torch.set_num_threads(1)  # one thread trains and indexes the same bits on every machine of a kind
    model = train(architecture, *data.train)
    folder = HERE / "runs" / f"{Path(sys.argv[0]).stem}-{architecture}"
    shutil.rmtree(folder, ignore_errors=True)
    return Index.build(model, Classification(), data.train, folder, method=TracIn(), batch_size=64), data


def percent(e: Estimate) -> str:
    """Mean ± half width of the 95 % interval over queries (over queries and subsets)."""
    total = "" if e.ci95_total is None else f" ({100 * e.ci95_total:.2f})"
    return f"{100 * e.mean:.2f} ± {100 * e.ci95:.2f}{total}"


def save(name: str, results: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    provenance = {
        "command": f"python {' '.join([os.path.relpath(sys.argv[0], HERE.parent), *sys.argv[1:]])}",
        "unde": unde.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"results": results, "provenance": provenance}, indent=1) + "\n")
    print(f"wrote {path.relative_to(HERE.parent)}")
