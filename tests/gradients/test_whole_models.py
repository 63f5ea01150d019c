"""Whole models: features equal explicit per-example gradients; every parameter goes the expected way."""

import pytest
import torch

from cases import BY_NAME, CASES
from oracles import TOLERANCE, assert_features, collect, explicit, plan, slow_gradients, ways
from unde.gradients import Collector


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_a_loop_of_backward_passes(case, dtype):
    model, task, rows = case.make(dtype, examples=7)
    truth = slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows)
    found = ways(units, coverage)
    assert list(found) == [n for n, p in model.named_parameters() if p.requires_grad]
    for name, way in found.items():
        assert way in case.expected(name), f"{name}: {way}, expected {case.expected(name)}"
    features = collect(model, task, rows, units, coverage, batch_size=5)  # a whole batch and a short one
    assert features.dtype == dtype
    assert_features(features, truth, units, TOLERANCE[dtype])


@pytest.mark.parametrize("projection", ["kron(3)", "sjlt(7)", "dense(7, normal)"])
@pytest.mark.parametrize("name", [c.name for c in CASES if c.name not in ("gru", "resnet-groupnorm")])
def test_projected(name, projection):
    model, task, rows = BY_NAME[name].make(torch.float64, examples=4)
    truth = slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows, projection, seed=3)
    assert max(u.stop - u.start for u in units) <= 9
    features = collect(model, task, rows, units, coverage, batch_size=4)
    assert_features(features, {u.name: explicit(u.projection, truth[u.name]) for u in units}, units, 1e-10)


def test_values_are_the_losses():
    model, task, rows = BY_NAME["gpt2"].make(torch.float64, examples=6)
    units, coverage = plan(model, task, rows)
    with Collector(model, task, units, coverage) as collector:
        _, values = collector(rows.batch(range(6)), range(6))
    with torch.no_grad():
        losses = torch.cat([task.loss(model, rows.batch([i])) for i in range(6)])
    assert not values.requires_grad
    torch.testing.assert_close(values, losses, rtol=1e-12, atol=0)
