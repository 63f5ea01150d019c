"""Plans against the memory that processes really took: what Linux says a stage added to its process at most.

    python -m benchmarks.plan_check               # prints planned and measured peaks, writes results/plan_check.json

The models are two of benchmarks/cases.py; training takes as many examples at a time as a pass of features. Every
stage runs in fresh processes that have used torch, so that libraries are loaded, but have no model yet: one in which
freed memory goes back to the system at once, and one with the usual allocator of Linux, which keeps and scatters some
of it. The work space inside kernels is in what is measured, and not in what is planned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.cases import CASES
from benchmarks.machine import status as _status
from unde import Index, methods
from unde.data import Rows
from unde.plan import Plan, plan
from unde.tasks import Classification

RESULTS = Path(__file__).parent / "results" / "plan_check.json"
STAGES = ("training", "build", "kernel")
EXAMPLES = {"resnet": 768, "gpt2": 96}
ALLOCATORS = {"exact": {"MALLOC_MMAP_THRESHOLD_": str(2**18)}, "usual": {}}
METHOD = methods.LoGRA(projection="kron(24)")


def plan_of(case: str) -> Plan:
    setup = CASES[case].setup()
    example = Rows(setup.train_data, setup.task.collate).batch([0])
    return plan(setup.model, setup.task, example, n_examples=EXAMPLES[case], method=METHOD)


def planned(case: str) -> dict[str, int]:
    made = plan_of(case)
    build = max(made.peak("check"), made.peak("features"))
    return {"training": made.peak("training with Adam"), "build": build, "kernel": made.peak("kernel")}


def data(case: str) -> Rows:
    setup = CASES[case].setup()
    rows = Rows(setup.train_data, setup.task.collate)
    return Rows([rows[i % len(rows)] for i in range(EXAMPLES[case])], setup.task.collate)


def build(case: str, folder: str) -> Index:
    setup = CASES[case].setup()
    return Index.build(setup.model, setup.task, data(case), folder, method=METHOD, progress=False)


def train(case: str, size: int) -> None:
    setup, rows = CASES[case].setup(), data(case)
    optimizer = torch.optim.Adam(setup.model.parameters())
    setup.model.eval()  # as plans do: no masks of dropout
    for start in (0, size, 0):
        batch = rows.batch(range(start, start + size))
        optimizer.zero_grad()
        setup.task.loss(setup.model, batch).mean().backward()
        optimizer.step()


def fit(index: Index) -> None:
    """The kernel, without a query."""
    index._state.scorer.training(METHOD)


def measure(case: str, stage: str, folder: str) -> int:
    """Bytes that a stage adds to this process at most."""
    with tempfile.TemporaryDirectory() as other:  # torch and this package have run before
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 4))
        small = torch.randn(64, 3, 4, 4), torch.randint(4, (64,))
        made = Index.build(net, Classification(), small, other, method=METHOD, progress=False)
        fit(made)
    size = plan_of(case).pass_size
    from transformers import GPT2LMHeadModel, ResNetForImageClassification  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    if stage == "training":
        train(case, size)
    elif stage == "build":
        build(case, folder)
    else:
        fit(Index.open(folder))
    return _status("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", nargs=3, metavar=("CASE", "STAGE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.measure:
        print(measure(*options.measure))
        return
    found = []
    for case in EXAMPLES:
        expected = planned(case)
        for stage in STAGES:
            row = {"case": case, "stage": stage, "planned": expected[stage]}
            for name, environment in ALLOCATORS.items():
                row[name] = in_a_process(case, stage, environment)
            found.append(row)
            ratios = ", ".join(
                f"{name} {row[name] / 2**20:.0f} MiB (ratio {row['planned'] / row[name]:.2f})"
                for name in ALLOCATORS
            )
            print(f"{case} {stage}: planned {row['planned'] / 2**20:.0f} MiB, {ratios}", flush=True)
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


def in_a_process(case: str, stage: str, environment: dict[str, str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if stage == "kernel":
            build(case, f"{folder}/index")
        command = [sys.executable, "-m", "benchmarks.plan_check", "--measure", case, stage, f"{folder}/index"]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | environment
        )
    return int(done.stdout)


if __name__ == "__main__":
    main()
