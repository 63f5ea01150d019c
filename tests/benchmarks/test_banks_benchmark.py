"""The benchmark of banks, on a model that takes no time."""

import json

import pytest
import torch

from benchmarks import banks
from unde.evaluate.bank.stacked import Unstackable


@pytest.fixture
def short_turns(monkeypatch):
    monkeypatch.setattr(banks, "SECONDS", 1e-4)


def test_every_way_is_compared_with_the_plain_loop(short_turns):
    row = json.loads(json.dumps(banks.measure_case("mlp", rounds=3)))
    ways = row["ways"]
    assert next(iter(ways)) == banks.PLAIN and "stacks of 8" in ways
    for way in ways.values():
        assert way["ci"][0] <= way["ms"] <= way["ci"][1] and way["best_ms"] <= way["ms"]
        assert way["times_plain"] == pytest.approx(ways[banks.PLAIN]["best_ms"] / way["best_ms"])
    floor = row["floor"]
    # Two layers, forward and the gradients of their weights; the gradient of the second's input; 32 examples.
    assert floor["gflop"] == pytest.approx(2e-9 * 32 * (2 * 64 * 64 + 3 * 64 * 10))
    assert floor["ms"] == pytest.approx(1e3 * floor["gflop"] / max(floor["gflop_per_second"].values()))
    assert set(floor["gflop_per_second"]) == {"torch"} and floor["ms"] > 0


def test_a_way_that_does_not_run_is_reported(short_turns, monkeypatch):
    real = banks.make_step

    def make_step(training, way):
        if way == "stacks of 8":
            raise Unstackable("no batching rule")
        return real(training, way)

    monkeypatch.setattr(banks, "make_step", make_step)
    ways = banks.measure_case("mlp", rounds=1)["ways"]
    assert ways["stacks of 8"] == {"error": "no batching rule"} and "ms" in ways["stacks of 32"]


def test_stacks_and_loops_take_the_same_steps():
    """Else their times would not be those of the same work."""
    training = banks.CASES["mlp"]()
    stacked, size = banks.make_step(training, "stacks of 8")
    alone, one = banks.make_step(training, banks.PLAIN)
    assert (size, one) == (banks.STACKED, 1)
    for _ in range(10):  # beyond an epoch
        stacked()
        alone()
    stack, learner = (step.__closure__ for step in (stacked, alone))
    stack = next(c.cell_contents for c in stack if isinstance(c.cell_contents, banks.StackedTrainer))
    learner = next(c.cell_contents for c in learner if isinstance(c.cell_contents, banks.SingleTrainer))
    for name, p in learner.model.named_parameters():
        torch.testing.assert_close(stack.trained[name][0], p, rtol=1e-4, atol=1e-5)
