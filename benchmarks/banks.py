"""How long the models of a bank take to train: one after the other in a plain loop, and stacked.

    python -m benchmarks run banks

The trainings of the studies (experiments/shared) on random data of the same shape, and two smaller ones. Milliseconds
are those of a step of one model, on the threads of torch; the ways take turns. Ratios are those of the fastest turns.
The floor is the time of the multiplications and additions of a step at the rate of large matrix products.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import SEED
from benchmarks.rounds import Failed, Run, interleaved, timed
from unde.bench import median_interval
from unde.evaluate import TrainingSpec
from unde.evaluate.bank.stacked import StackedTrainer, Unstackable, default_stack, stacked_batches
from unde.evaluate.bank.training_spec import SingleTrainer, isolated_rng

N = 512  # examples


def images(data_set: str, architecture: str) -> TrainingSpec:
    from experiments.shared.classification_bank import training

    shape = (1, 28, 28) if data_set == "mnist" else (3, 32, 32)
    return training(data_set, architecture, (torch.rand(N, *shape), torch.randint(0, 10, (N,))))


def language(vocabulary: int, **changes: Any) -> TrainingSpec:
    from experiments.shared.corpora import training
    from experiments.shared.language_bank import initial

    tokens = torch.randint(0, vocabulary, (N, 64))
    return training(partial(initial, vocabulary=vocabulary), tokens, **{"epochs": 5, **changes})


def cifar2() -> TrainingSpec:
    from experiments.shared import cifar2 as study
    from experiments.shared.denoising import training

    data = {"x": torch.randn(N, 3, 16, 16)}
    return training(lambda seed: study.unet(), data, steps=study.STEPS, lr=study.LR, batch_size=study.BATCH)


def robots() -> TrainingSpec:
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


def tiny(make: Callable[[], nn.Module]) -> TrainingSpec:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return TrainingSpec(
        model=lambda seed: make(),
        data=(torch.randn(N, 64), torch.randint(0, 10, (N,))),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        epochs=50,
        batch_size=32,
    )


CASES: dict[str, Callable[[], TrainingSpec]] = {
    "linear": lambda: tiny(lambda: nn.Linear(64, 10)),
    "mlp": lambda: tiny(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))),
    "mnist-resnet": lambda: images("mnist", "resnet"),
    "mnist-vit": lambda: images("mnist", "vit"),
    "cifar10-resnet": lambda: images("cifar10", "resnet"),
    "cifar10-vit": lambda: images("cifar10", "vit"),
    "sotu-gpt2": lambda: language(2048),
    "wikitext-gpt2": lambda: language(3072),
    "finetuned-gpt2": lambda: language(4096, epochs=3),
    "cifar2": cifar2,
    "robots": robots,
}
QUICK = ("mlp", "mnist-vit")


def subsets(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.random.default_rng(i).permutation(N)[: N // 2], i) for i in range(count)]


# --- what is measured -------------------------------------------------------------------------------------

STACKED, ROUNDS = 8, 7
SECONDS = 0.1  # of a turn
LARGE = 1024  # rows and columns of the matrix products whose rate is measured
PLAIN = "plain loop"
WAYS = (PLAIN, "channels last", f"stacks of {STACKED}", "stacks of 32")


def make_step(training: TrainingSpec, way: str) -> tuple[Callable[[], Any], int]:
    """A function that takes one step, and the number of models that it trains."""
    if way.startswith("stacks"):
        members = subsets(int(way.rsplit(maxsplit=1)[-1]))
        stack = StackedTrainer(training, members)
        stack.batches = repeat(partial(stacked_batches, training, members))
        stack.schedule = None  # more steps are taken than a schedule has

        def stacked_step() -> None:
            stack.backward()
            stack.step()

        return stacked_step, len(members)
    ((indices, seed),) = subsets(1)
    with isolated_rng(seed):
        trainer = SingleTrainer(replace(training, channels_last=way == "channels last"), indices, seed)
    trainer.schedule = None
    batches = repeat(partial(training.batches, indices, seed))

    def step() -> None:
        trainer.backward(next(batches))
        trainer.step()

    return step, 1


def repeat(batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Half of the examples are whole batches, so that all steps have one shape."""
    while True:
        yield from batches()


def make_run(training: TrainingSpec, way: str) -> Run:
    """Seconds of a step of one model, over as many steps as fill a turn; made on first use."""
    state: dict[str, Any] = {}

    def run() -> float:
        if not state:
            try:
                step, models = make_step(training, way)
                step()
            except (Unstackable, RuntimeError) as e:
                raise Failed(str(e).partition("\n")[0]) from None
            state.update(step=step, models=models, steps=max(1, int(SECONDS / timed(step))))
        seconds = timed(lambda: [state["step"]() for _ in range(state["steps"])])
        return seconds / state["steps"] / state["models"]

    return run


def measure_case(case: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    training = CASES[case]()
    small = case in ("linear", "mlp")
    images = not small and not case.endswith(("vit", "gpt2"))
    applies = {"channels last": images, "stacks of 32": small}
    a, b = torch.randn(2, LARGE, LARGE)
    runs: dict[str, Run] = {way: make_run(training, way) for way in WAYS if applies.get(way, True)}
    seconds, failed = interleaved({**runs, "product": lambda: timed(lambda: a @ b)}, rounds, SEED)
    rate = 2e-9 * LARGE**3 / min(seconds.pop("product"))
    ways: dict[str, dict[str, Any]] = {way: {"error": error} for way, error in failed.items()}
    for way in runs:
        if way in seconds:
            ms = [1e3 * value for value in seconds[way]]
            ways[way] = {"ms": statistics.median(ms), "ci": list(median_interval(ms)), "best_ms": min(ms)}
            ways[way]["times_plain"] = 1e3 * min(seconds[PLAIN]) / min(ms)
    gflop = count_operations(training)
    floor = {"gflop": gflop, "gflop_per_second": {"torch": rate}, "ms": 1e3 * gflop / rate}
    stack = default_stack(training, seed=SEED)
    single = "channels last" if training.channels_last else "a plain loop"
    chosen = f"stacks of {stack}" if stack > 1 else single
    return {"case": case, "ways": {w: ways[w] for w in WAYS if w in ways}, "floor": floor, "chosen": chosen}


def count_operations(training: TrainingSpec) -> float:
    ((indices, seed),) = subsets(1)
    with isolated_rng(seed):
        trainer = SingleTrainer(training, indices, seed)
        with FlopCounterMode(display=False) as counter:
            trainer.backward(next(trainer.batches))
    return counter.get_total_flops() / 1e9


def measure(quick: bool = False) -> dict[str, Any]:
    rows = [measure_case(case, 3 if quick else ROUNDS) for case in (QUICK if quick else CASES)]
    return {"stacked": STACKED, "rows": rows}
