"""Where the studies keep things."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent.parent
BANKS = HERE / "banks"  # retrained models: what LDS is measured against; in the repository
MODELS = HERE / "models"  # attributed models, in half precision; in the repository
RESULTS = HERE / "results"  # what studies found; in the repository
RUNS = HERE / "runs"  # indexes, query features, unfinished work: can be deleted
