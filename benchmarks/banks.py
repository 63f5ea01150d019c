"""How long the models of a bank take to train: one after the other, one for each core, stacked, compiled.

    python -m benchmarks.banks                       # prints the table, writes benchmarks/results/banks.json
    python -m benchmarks.banks --case mnist-vit --compile

The trainings are those of the studies (experiments/shared), on random data of the same shape; `linear` and `mlp` are
models that are smaller still. Milliseconds are those of a step of one model: where two processes train at the same
time, half of what each takes. All ways take turns; shown is the median over rounds with its 95 % interval.
Ratios are those of the quickest turns: whatever else a machine does only ever adds, and most to two threads that wait
for each other.
Ways that compile say apart how long that took.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import machine
from unde.bench import median_interval
from unde.evaluate import Training
from unde.evaluate.bank.loop import Learner
from unde.evaluate.bank.luck import own_luck
from unde.evaluate.bank.stacked import Stack, Unstackable, stacked_batches
from unde.evaluate.bank.ways import settled

RESULTS = Path(__file__).parent / "results" / "banks.json"
N, STACKED, MODELS, ROUNDS = 512, 8, 64, 7
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
PLAIN, DEFAULT = "loop, 2 threads", "loop, 1 thread"


def digits(architecture: str) -> Training:
    from experiments.shared.classification_bank import training

    return training(architecture, (torch.rand(N, 1, 28, 28), torch.randint(0, 10, (N,))))


def cifar10(architecture: str) -> Training:
    from experiments.shared.cifar10_bank import training

    return training(architecture, (torch.randn(N, 3, 32, 32), torch.randint(0, 10, (N,))))


def language(vocabulary: int, **changes: Any) -> Training:
    from experiments.shared.corpora import training
    from experiments.shared.language_bank import initial

    tokens = torch.randint(0, vocabulary, (N, 64))
    return training(partial(initial, vocabulary=vocabulary), tokens, **{"epochs": 5, **changes})


def cifar2() -> Training:
    from experiments.shared import cifar2 as study
    from experiments.shared.denoising import training

    data = {"x": torch.randn(N, 3, 16, 16)}
    return training(lambda seed: study.unet(), data, steps=study.STEPS, lr=study.LR, batch_size=study.BATCH)


def robots() -> Training:
    """The UNet with LoRA, fresh: its frozen weights are not those of the study, which takes a file."""
    from experiments.shared import pictures
    from experiments.shared import robots as study
    from experiments.shared.denoising import training

    from unde.integrations.diffusers import add_lora

    def initial(seed: int) -> nn.Module:
        add_lora(model := pictures.unet(), rank=pictures.RANK)
        return model

    conditions, nothing = torch.randn(N, pictures.TOKENS, 384), torch.zeros(1, pictures.TOKENS, 384)
    data = {"x": torch.randn(N, pictures.CHANNELS, 8, 8), "conditions": conditions}
    return training(initial, data, steps=study.STEPS, lr=study.LR, nothing=nothing)


def tiny(make: Callable[[], nn.Module]) -> Training:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Training(
        model=lambda seed: make(),
        data=(torch.randn(N, 64), torch.randint(0, 10, (N,))),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        epochs=50,
        batch_size=32,
    )


CASES: dict[str, Callable[[], Training]] = {
    "linear": lambda: tiny(lambda: nn.Linear(64, 10)),
    "mlp": lambda: tiny(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))),
    "mnist-resnet": lambda: digits("resnet"),
    "mnist-vit": lambda: digits("vit"),
    "cifar10-resnet": lambda: cifar10("resnet"),
    "cifar10-vit": lambda: cifar10("vit"),
    "sotu-gpt2": lambda: language(2048),
    "wikitext-gpt2": lambda: language(3072),
    "finetuned-gpt2": lambda: language(4096, epochs=3),
    "cifar2": cifar2,
    "robots": robots,
}
QUICK = ("mlp", "mnist-vit")


def which(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.random.default_rng(i).permutation(N)[: N // 2], i) for i in range(count)]


def stepping(training: Training, how: str) -> tuple[Callable[[], None], int]:
    """A function that takes one step, and of how many models."""
    if "stacked" in how:
        size = 32 if how.endswith("32") else STACKED
        stack = Stack(training, which(size))
        stack.batches = endless(partial(stacked_batches, training, which(size)))
        stack.schedule = None  # steps go on for longer than it does
        if how.startswith("compiled"):
            stack._one = torch.compile(stack._one, dynamic=False)

        def step() -> None:
            stack.backward()
            stack.advance()

        return step, size
    ((indices, seed),) = which(1)
    with own_luck(seed):
        learner = Learner(training, indices, seed, channels_last=how == "channels last")
    learner.schedule = None
    if how == "loop":  # as people write it
        learner.optimizer = training.optimizer(list(learner.parameters))
    if how == "compiled":
        learner.model = torch.compile(learner.model, dynamic=False)
    batches = endless(partial(training.batches, indices, seed))

    def step() -> None:
        learner.backward(next(batches))
        learner.advance()

    return step, 1


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


def measure_case(case: str, ways: list[str], rounds: int, pipes: list[Connection]) -> dict[str, Any]:
    for pipe in pipes:
        pipe.send(case)

    def ask(way: str, steps: int) -> list[Any]:
        processes, threads, how = WAYS[way]
        for pipe in pipes[:processes]:
            pipe.send((threads, how, steps))
        return [pipe.recv() for pipe in pipes[:processes]]

    found, times, steps = {}, {}, {}
    made: dict[str, int] = {}  # how models are trained → how many processes can
    failed: dict[str, str] = {}
    for way in ways:
        processes, threads, how = WAYS[way]
        for pipe in pipes[made.get(how, 0) : processes]:
            pipe.send((threads, how, 0))
        answers = [pipe.recv() for pipe in pipes[made.get(how, 0) : processes]]
        told = next((error for _, error in answers if error is not None), None) or failed.get(how)
        if told is not None:
            failed[how], made[how], found[way] = told, len(pipes), {"error": told}
            continue
        if how.startswith("compiled"):
            found[way] = {"compile_seconds": max(seconds for seconds, _ in answers)}
        made[how] = processes
        first = max(ask(way, 1))
        size = 32 if how.endswith("32") else STACKED if "stacked" in how else 1
        steps[way] = max(1, int(SECONDS / (first * size)))
        times[way] = []
    for _ in range(rounds):
        for way in steps:
            times[way].append(1e3 * statistics.mean(ask(way, steps[way])) / WAYS[way][0])
    for way, taken in times.items():
        found[way] = {
            **found.get(way, {}),
            "ms": statistics.median(taken),
            "ci": list(median_interval(taken)),
            "best_ms": min(taken),
        }
    plain = found[PLAIN]["best_ms"]
    for row in found.values():
        if "ms" in row:
            row["times_plain"] = plain / row["best_ms"]
    return {"case": case, "ways": found}


def chosen(case: str) -> str:
    """What `Bank.run` settles on, for 64 models in 2 processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        return str(settled(CASES[case](), which(MODELS // 2), MODELS, workers=2))
    finally:
        torch.set_num_threads(before)


def measure(quick: bool = False, cases: list[str] | None = None, compile: bool = False) -> dict[str, Any]:
    with two_processes() as pipes:
        rows = list(_measured(pipes, quick, cases or (QUICK if quick else CASES), compile))
    return {"machine": machine(), "torch": torch.__version__, "stacked": STACKED, "rows": rows}


def _measured(
    pipes: list[Connection], quick: bool, cases: Iterable[str], compile: bool
) -> Iterator[dict[str, Any]]:
    for case in cases:
        ways = [
            way
            for way, (_, _, how) in WAYS.items()
            if (compile or not how.startswith("compiled"))
            and (not quick or how in ("loop", "fused", "stacked"))
            and (how != "channels last" or not case.endswith(("vit", "gpt2", "linear", "mlp")))
            and (how != "stacked 32" or case in ("linear", "mlp"))
        ]
        row = measure_case(case, ways, 3 if quick else ROUNDS, pipes)
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
    with two_processes() as pipes:
        for row in _measured(pipes, False, options.case or CASES, options.compile):
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
