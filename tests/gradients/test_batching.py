"""Features of an example do not depend on the batch it is in, padded or not."""

import pytest
import torch

import models
from cases import BY_NAME, Case, ragged
from oracles import TOLERANCE, assert_features, collect, plan
from unde.gradients import Collector
from unde.tasks import CausalLM

SEQUENCES = [
    Case(f"{name}-{attention}", lambda build=build, a=attention: build(a), ragged, CausalLM)
    for name, build in [("gpt2", models.gpt2), ("llama", models.llama)]
    for attention in ("sdpa", "eager")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", [*SEQUENCES, BY_NAME["nanogpt"]], ids=str)
def test_one_at_a_time_or_thirty_two_with_padding(case, dtype):
    model, task, rows = case.make(dtype, examples=32)
    lengths = [len(row["input_ids"]) for row in rows.data]
    assert min(lengths) < max(lengths)
    assert (rows.batch(range(32))["attention_mask"] == 0).any()
    units, coverage = plan(model, task, rows, "kron(4)")
    alone = collect(model, task, rows, units, coverage, batch_size=1)
    together = collect(model, task, rows, units, coverage, batch_size=32)
    assert_features(together, {u.name: alone[:, u.columns] for u in units}, units, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["resnet-batchnorm", "vit", "gpt2", "attention-time-first", "lstm"])
def test_other_batch_mates(name):
    model, task, rows = BY_NAME[name].make(torch.float64, examples=9)
    units, coverage = plan(model, task, rows, "sjlt(30)")
    with Collector(model, task, units, coverage) as collector:
        features = {
            tuple(ids): collector(rows.batch(ids), list(ids))[0]
            for ids in ([4], [4, 0], [8, 7, 4], [1, 4, 2, 6, 8], [4, 4, 4])
        }
    expected = {u.name: features[(4,)][:, u.columns] for u in units}
    for ids, found in features.items():
        assert_features(found[[ids.index(4)]], expected, units, 1e-10)
    assert_features(features[4, 4, 4][2:], expected, units, 1e-10)


def test_values_are_the_losses():
    model, task, rows = BY_NAME["gpt2"].make(torch.float64, examples=6)
    units, coverage = plan(model, task, rows)
    with Collector(model, task, units, coverage) as collector:
        _, values = collector(rows.batch(range(6)), range(6))
    with torch.no_grad():
        losses = torch.cat([task.loss(model, rows.batch([i])) for i in range(6)])
    assert not values.requires_grad
    torch.testing.assert_close(values, losses, rtol=1e-12, atol=0)
