"""LDS against bytes: what features keep, from projections of rank 16 to whole gradients.

Each bank is indexed with kron(16), kron(64), whole gradients as 1, 4 and 16 outer products (whitened for EKFAC), and
whole gradients, a byte a number for all. Seconds are those of the processor, with one thread. Every setting of an index
(method, damping, its scope) is judged on the evaluation queries, and calibrations on 8 and 16 halves as in the study
`calibration`. Every pair of a bank and features is a result of its own, so that a run goes on where it stopped.
"""

from __future__ import annotations

import shutil
import time
from typing import Any

from experiments.shared import cells
from experiments.shared.paths import RUNS
from experiments.shared.sweep import EVERY_BANK
from experiments.studies import calibration
from unde.methods import EKFAC

PAPER = ""
FEATURES = ("kron(16)", "kron(64)", "factored(1)", "factored(4)", "factored(16)", "none")
OF_DENOISERS = ("kron(16)", "factored(4)")
DENOISERS = ("cifar2", "robots", "finetuned-unet")
DRAWS = 4


def name_of(bank: str, features: str) -> str:
    """As files are named: cifar10-vit_kron-16."""
    return f"{bank}_{features.strip(')').replace('(', '-')}"


MEASURED = {
    name_of(bank, f): (bank, f)
    for bank in EVERY_BANK
    for f in (OF_DENOISERS if bank in DENOISERS else FEATURES)
}
VARIANTS = tuple(MEASURED)
BANKS = {variant: (bank,) for variant, (bank, _) in MEASURED.items()}


def run(variant: str) -> dict[str, Any]:
    bank, features = MEASURED[variant]
    cell, folder = cells.get(bank), RUNS / "quality" / variant
    begun = time.process_time()
    index = cell.build(
        folder / "index", EKFAC(features), store_dtype="auto" if features.startswith("factored") else "int8"
    )
    seconds, m = time.process_time() - begun, index.manifest
    whole = sum(path.stat().st_size for path in index.folder.rglob("*") if path.is_file())
    each = m.terms * m.codec.nbytes(1, m.columns)
    found = calibration.measure(cell, features, index, folder / "index", DRAWS)
    asked = time.process_time() - begun - seconds
    for halves in calibration.HALVES:
        del found[str(halves)]["draws"]
    shutil.rmtree(folder)
    return {
        "examples": m.examples,
        "bytes": each,  # of an example
        "besides": whole - each * m.examples,  # factors, matrices of the projection
        "seconds": {"build": seconds, "settings": asked},
        **found,
    }
