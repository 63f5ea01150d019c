"""The benchmark of banks, with threads in place of its processes and a model that takes no time."""

import json
import multiprocessing
import threading
from contextlib import contextmanager

import pytest
import torch

from benchmarks import banks
from unde.evaluate.bank.stacked import Unstackable


@pytest.fixture
def here(monkeypatch, tmp_path):
    @contextmanager
    def two_threads():
        pipes = []
        for _ in range(2):
            ours, theirs = multiprocessing.Pipe()
            threading.Thread(target=banks.serve, args=(theirs,), daemon=True).start()
            pipes.append(ours)
        yield pipes
        for pipe in pipes:
            pipe.send(None)

    monkeypatch.setattr(banks, "two_processes", two_threads)
    monkeypatch.setattr(banks, "SECONDS", 1e-4)
    monkeypatch.setattr(banks, "RESULTS", tmp_path / "results" / "banks.json")
    alone = {way: (processes, 1, how) for way, (processes, _, how) in banks.WAYS.items()}
    monkeypatch.setattr(banks, "WAYS", alone)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_way_is_compared_with_the_loop_of_two_threads(here):
    found = banks.measure(quick=True, cases=["mlp"])
    (row,) = json.loads(json.dumps(found))["rows"]
    ways = row["ways"]
    assert next(iter(ways)) == banks.PLAIN and "stacks of 8, a process a core" in ways
    for way in ways.values():
        assert way["ci"][0] <= way["ms"] <= way["ci"][1] and way["best_ms"] <= way["ms"]
        assert way["times_plain"] == pytest.approx(ways[banks.PLAIN]["best_ms"] / way["best_ms"])
    floor = row["floor"]
    # Two layers, forward and the gradients of their weights; the gradient of the second's input; 32 examples.
    assert floor["gflop"] == pytest.approx(2e-9 * 32 * (2 * 64 * 64 + 3 * 64 * 10))
    assert floor["ms"] == pytest.approx(1e3 * floor["gflop"] / max(floor["gflop_per_second"].values()))
    assert set(floor["gflop_per_second"]) == {"torch"} and floor["ms"] > 0


def test_a_way_that_does_not_run_is_told_and_what_was_measured_before_stays(here, monkeypatch):
    real = banks.stepping

    def stepping(training, how):
        if how == "stacked":
            raise Unstackable("no batching rule")
        return real(training, how)

    (row,) = banks.measure(quick=True, cases=["mlp"])["rows"]
    banks.keep(row)
    monkeypatch.setattr(banks, "stepping", stepping)
    (row,) = banks.measure(quick=True, cases=["mlp"])["rows"]
    assert row["ways"]["stacks of 8, 2 threads"] == {"error": "no batching rule"}
    del row["ways"]["+ fused optimizer"]
    banks.keep(row)
    (kept,) = json.loads(banks.RESULTS.read_text())["rows"]
    assert kept["ways"]["stacks of 8, a process a core"] == {"error": "no batching rule"}
    assert "ms" in kept["ways"]["+ fused optimizer"]


def test_stacks_and_loops_take_the_same_steps():
    """Else their times would not be those of the same work."""
    training = banks.CASES["mlp"]()
    stacked, size = banks.stepping(training, "stacked")
    alone, one = banks.stepping(training, "loop")
    assert (size, one) == (banks.STACKED, 1)
    for _ in range(10):  # beyond an epoch
        stacked()
        alone()
    stack, learner = (step.__closure__ for step in (stacked, alone))
    stack = next(c.cell_contents for c in stack if isinstance(c.cell_contents, banks.StackedTrainer))
    learner = next(c.cell_contents for c in learner if isinstance(c.cell_contents, banks.SingleTrainer))
    for name, p in learner.model.named_parameters():
        torch.testing.assert_close(stack.trained[name][0], p, rtol=1e-4, atol=1e-5)
