"""What each stage of an index does on a device, counted on the pretended one of the tests.

    python -m benchmarks run devices

The GPT-2, the Llama and the ResNet of benchmarks/cases.py, EKFAC of rank 16. Counted are operations, the floating point
operations of products, the bytes that operations read and write, copies from and to the host, and waits. Nothing is
timed: the pretended device is the CPU. Bounds of a GPU are arithmetic on these counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, SEED
from unde import Setup, bench
from unde.devices import device_of

NAMES, RANK, EXAMPLES = ("gpt2", "llama", "resnet"), 16, 32
TESTS = Path(__file__).parent.parent / "tests" / "devices"


def measure(quick: bool = False) -> dict[str, Any]:
    return {name: stages(name) for name in NAMES[: 1 if quick else None]}


def stages(name: str) -> dict[str, Any]:
    """What each stage does."""
    sys.path.insert(0, str(TESTS))
    import pretended_device

    pretended_device.register()
    torch.manual_seed(SEED)
    case = CASES[name]
    made = case.setup()
    setup = Setup(made.model.to(pretended_device.NAME), made.task, made.train_data)
    found: dict[str, dict[str, int]] = {}
    here = pretended_device.counts[0]

    @contextmanager
    def counted(stage: str) -> Iterator[None]:
        here.restart()
        with bench.Traffic(device_of(setup.model)) as traffic:
            yield
        found[stage] = traffic.as_dict() | {"waits": here.waits}  # those for copies too

    # Float64 is on the device, as with CUDA.
    with torch.autograd.set_multithreading_enabled(False), pretended_device.with_float64():
        examples, queries = bench.run_stages(setup, RANK, EXAMPLES, counted)
    parameters = sum(p.numel() for p in setup.model.parameters())
    return {"examples": examples, "queries": queries, "parameters": parameters, "stages": found}
