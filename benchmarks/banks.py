"""How long the models of a bank take to train: one after the other, one for each core, stacked, compiled.

    python -m benchmarks run banks                   # all, and writes benchmarks/results/banks.json
    python -m benchmarks.banks --case mnist-vit --compile      # one, in place of an earlier row

The trainings are those of the studies (experiments/shared), on random data of the same shape; `linear` and `mlp` are
models that are smaller still. Milliseconds are those of a step of one model: where two processes train at the same
time, half of what each takes. All ways take turns; shown is the median over rounds with its 95 % interval.
Ratios are those of the quickest turns: whatever else a machine does only ever adds, and most to two threads that wait
for each other. Loops as people write them have processes of their own, in which nothing else has happened.
Ways that compile say apart how long that took.

The floor is the time of the multiplications and additions of a step at the rate of large products on both cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bank_cases import CASES, QUICK, which
from benchmarks.machine import machine
from unde.bench import median_interval
from unde.evaluate import TrainingSpec
from unde.evaluate.bank.stacked import StackedTrainer, Unstackable, default_stack, stacked_batches
from unde.evaluate.bank.training_spec import SingleTrainer, isolated_rng

RESULTS = Path(__file__).parent / "results" / "banks.json"
STACKED, ROUNDS = 8, 7
SECONDS = 0.1  # of a turn of a way

# name → processes at the same time, threads of each, how a model is trained
WAYS: dict[str, tuple[int, int, str]] = {
    "loop, 2 threads": (1, 2, "loop"),
    "loop, 1 thread": (1, 1, "loop"),
    "loop, a process a core": (2, 1, "loop"),
    "+ fused optimizer": (2, 1, "fused"),
    "+ channels last": (2, 1, "channels last"),
    "stacks of 8, 2 threads": (1, 2, "stacked"),
    "stacks of 8, a process a core": (2, 1, "stacked"),
    "stacks of 32, a process a core": (2, 1, "stacked 32"),
    "compiled, a process a core": (2, 1, "compiled"),
    "compiled stacks of 8, a process a core": (2, 1, "compiled stacked"),
}
PLAIN = "loop, 2 threads"
TINY = (
    "stacks of 8, 2 threads",
    "stacks of 32, a process a core",
)  # for models that are smaller than the studies'
LARGE = 1024  # rows and columns of the products whose rate is measured
PRODUCT = "large product"


def stepping(training: TrainingSpec, how: str) -> tuple[Callable[[], Any], int]:
    """A function that takes one step, and of how many models."""
    if how == PRODUCT:
        a, b = torch.randn(2, LARGE, LARGE)
        return partial(torch.mm, a, b), 1
    if "stacked" in how:
        size = 32 if how.endswith("32") else STACKED
        stack = StackedTrainer(training, which(size))
        stack.batches = endless(partial(stacked_batches, training, which(size)))
        stack.schedule = None  # steps go on for longer than it does
        if how.startswith("compiled"):
            stack.single_loss = torch.compile(stack.single_loss, dynamic=False)

        def step() -> None:
            stack.backward()
            stack.step()

        return step, size
    ((indices, seed),) = which(1)
    with isolated_rng(seed):
        trainer = SingleTrainer(replace(training, channels_last=how == "channels last"), indices, seed)
    trainer.schedule = None
    if how == "loop":  # as people write it
        trainer.optimizer = training.optimizer(list(trainer.parameters))
    if how == "compiled":
        trainer.model = torch.compile(trainer.model, dynamic=False)
    batches = endless(partial(training.batches, indices, seed))

    def step() -> None:
        trainer.backward(next(batches))
        trainer.step()

    return step, 1


def operations(training: TrainingSpec) -> float:
    """Multiplications and additions of a step, 10⁹."""
    ((indices, seed),) = which(1)
    with isolated_rng(seed):
        trainer = SingleTrainer(training, indices, seed)
        with FlopCounterMode(display=False) as counter:
            trainer.backward(next(trainer.batches))
    return counter.get_total_flops() / 1e9


def endless(batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Half of N examples are whole batches, so that all steps have one shape."""
    while True:
        yield from batches()


def serve(connection: Connection) -> None:
    """Of a process of its own: makes ways when they are first asked for, takes as many steps as it is told."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    training, made = None, {}
    while (asked := connection.recv()) is not None:
        if isinstance(asked, str):
            torch.manual_seed(0)
            training, made = CASES[asked](), {}
            continue
        assert training is not None
        threads, how, steps = asked
        torch.set_num_threads(threads)
        if how not in made:
            start = time.perf_counter()
            try:
                made[how] = stepping(training, how)
                made[how][0]()
            except Unstackable as e:
                made[how] = str(e)
            except Exception as e:  # a way that does not run is told, the others go on
                made[how] = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            connection.send((time.perf_counter() - start, made[how] if isinstance(made[how], str) else None))
            continue
        step, size = made[how]
        start = time.perf_counter()
        for _ in range(steps):
            step()
        connection.send((time.perf_counter() - start) / steps / size)


@contextmanager
def two_processes() -> Generator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    workers, pipes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        workers.append(context.Process(target=serve, args=(theirs,), daemon=True))
        workers[-1].start()
        pipes.append(ours)
    yield pipes
    for pipe in pipes:
        pipe.send(None)
    for worker in workers:
        worker.join()


def measure_case(
    case: str, ways: list[str], rounds: int, plain: list[Connection], ours: list[Connection]
) -> dict[str, Any]:
    for pipe in (*plain, *ours):
        pipe.send(case)

    def ask(how: str, processes: int, threads: int, steps: int, made: int = 0) -> list[Any]:
        pipes = (plain if how == "loop" else ours)[made:processes]
        for pipe in pipes:
            pipe.send((threads, how, steps))
        return [pipe.recv() for pipe in pipes]

    found, times, steps = {}, {}, {}
    made: dict[str, int] = {}  # how models are trained → how many processes can
    failed: dict[str, str] = {}
    for way in ways:
        processes, threads, how = WAYS[way]
        answers = ask(how, processes, threads, 0, made.get(how, 0))
        told = next((error for _, error in answers if error is not None), None) or failed.get(how)
        if told is not None:
            failed[how], made[how], found[way] = told, len(ours), {"error": told}
            continue
        if how.startswith("compiled"):
            found[way] = {"compile_seconds": max(seconds for seconds, _ in answers)}
        made[how] = processes
        first = max(ask(how, processes, threads, 1))
        size = 32 if how.endswith("32") else STACKED if "stacked" in how else 1
        steps[way] = max(1, int(SECONDS / (first * size)))
        times[way] = []
    ask(PRODUCT, 2, 1, 0)
    rate = 0.0  # 10⁹ operations a second, of both processes
    for _ in range(rounds):
        for way in steps:
            processes, threads, how = WAYS[way]
            times[way].append(1e3 * statistics.mean(ask(how, processes, threads, steps[way])) / processes)
        rate = max(rate, 2 * 2e-9 * LARGE**3 / statistics.mean(ask(PRODUCT, 2, 1, 5)))
    for way, taken in times.items():
        found[way] = {
            **found.get(way, {}),
            "ms": statistics.median(taken),
            "ci": list(median_interval(taken)),
            "best_ms": min(taken),
        }
    quickest = found[PLAIN]["best_ms"]
    for row in found.values():
        if "ms" in row:
            row["times_plain"] = quickest / row["best_ms"]
    torch.manual_seed(0)
    gflop = operations(CASES[case]())
    floor = {"gflop": gflop, "gflop_per_second": {"torch": rate}, "ms": 1e3 * gflop / rate}
    return {"case": case, "ways": found, "floor": floor}


def chosen(case: str) -> str:
    """What `Bank.run` does by default."""
    training = CASES[case]()
    stacked = default_stack(training, seed=0)
    single = "channels last" if training.channels_last else "a plain loop"
    return f"stacks of {stacked}" if stacked > 1 else single


def measure(quick: bool = False, cases: list[str] | None = None, compile: bool = False) -> dict[str, Any]:
    rows = list(_measured(quick, cases or (QUICK if quick else CASES), compile))
    return {"machine": machine(), "torch": torch.__version__, "stacked": STACKED, "rows": rows}


def _measured(quick: bool, cases: Iterable[str], compile: bool) -> Iterator[dict[str, Any]]:
    with two_processes() as plain, two_processes() as ours:
        for case in cases:
            ways = [
                way
                for way, (_, _, how) in WAYS.items()
                if (compile or not how.startswith("compiled"))
                and (not quick or how in ("loop", "fused", "stacked"))
                and ("channels last" not in how or not case.endswith(("vit", "gpt2", "linear", "mlp")))
                and (case in ("linear", "mlp") or way not in TINY)
            ]
            row = measure_case(case, ways, 3 if quick else ROUNDS, plain, ours)
            row = row if quick else {**row, "chosen": chosen(case)}
            show(row)
            yield row


def show(row: dict[str, Any]) -> None:
    print(f"{row['case']}" + (f" (the bank takes: {row['chosen']})" if "chosen" in row else ""))
    for way, found in row["ways"].items():
        if "error" in found:
            print(f"  {way:40s} does not run: {found['error'][:90]}")
            continue
        apart = f"  compiling {found['compile_seconds']:.0f} s" if "compile_seconds" in found else ""
        low, high = found["ci"]
        spread = f"{found['ms']:8.2f} ms ({low:.2f}-{high:.2f}), best {found['best_ms']:.2f}"
        print(f"  {way:40s} {spread}  {found['times_plain']:.2f}x{apart}", flush=True)
    floor = row["floor"]
    rate = floor["gflop_per_second"]["torch"]
    print(f"  {'floor':40s} {floor['ms']:8.2f} ms: {floor['gflop']:.3g} GFLOP, a second at most {rate:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--compile", action="store_true", help="compiled steps too: half a minute each")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        measure(quick=True)
        return
    for row in _measured(False, options.case or CASES, options.compile):
        keep(row)


def keep(row: dict[str, Any]) -> None:
    """Into the results file, in place of an earlier row of the same case; ways that were not measured now stay."""
    there = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {row["case"]: row for row in there}
    before = rows.get(row["case"], {}).get("ways", {})
    rows[row["case"]] = {**row, "ways": {**before, **row["ways"]}}
    result = {
        "machine": machine(),
        "torch": torch.__version__,
        "stacked": STACKED,
        "rows": [rows[case] for case in CASES if case in rows],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
