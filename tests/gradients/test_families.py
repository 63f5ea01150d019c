"""More families of Hugging Face models: none of their parameters goes a slow way, and all features are gradients."""

import copy

import pytest
import torch

from oracles import TOLERANCE, assert_features, collect, explicit, plan, slow_gradients, ways
from unde.gradients.hooks import restore_coverage
from zoo import BY_NAME, FAMILIES, assert_rounded, make, their_gradients

# They compute in float32 inside, whatever the type of the model.
SINGLE = ("gemma", "mixtral", "qwen", "gpt-oss")


def precision(case):
    return torch.float32 if case.name.startswith(SINGLE) else torch.float64


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_equal_to_gradients_of_single_examples(case):
    """By the task's own loss, and by that which transformers computes."""
    dtype = precision(case)
    model, task, rows = make(case, dtype)
    units, coverage = plan(model, task, rows)
    for name, way in ways(units, coverage).items():
        assert way in case.expected(name), f"{name}: {way}"
    features = collect(model, task, rows, units, coverage, batch_size=5)
    assert_features(features, slow_gradients(model, task, rows), units, TOLERANCE[dtype])
    assert_features(features, their_gradients(model, rows), units, max(1e-6, TOLERANCE[dtype]))


@pytest.mark.parametrize("projection", ["kron(3)", "sjlt(7)"])
@pytest.mark.parametrize("name", ["t5", "bart", "mixtral", "gpt-oss", "opt"])
def test_projected(name, projection):
    case = BY_NAME[name]
    dtype = precision(case)
    model, task, rows = make(case, dtype, examples=4)
    units, coverage = plan(model, task, rows, projection, seed=3)
    assert not coverage.vmapped and not coverage.looped
    features = collect(model, task, rows, units, coverage, batch_size=4)
    truth = slow_gradients(model, task, rows)
    assert_features(
        features, {u.name: explicit(u.projection, truth[u.name]) for u in units}, units, 5 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("name", ["t5", "t5-gated-untied", "bart", "opt", "gemma3", "mixtral", "bert-mlm"])
def test_weights_in_bfloat16(name):
    """Against float32 gradients at the same weights: no further off than torch's own backward pass in bfloat16."""
    case = BY_NAME[name]
    model, task, rows = make(case, torch.bfloat16)
    if name == "mixtral":  # torch multiplies in groups only where rows are 16 bytes long
        model.set_experts_implementation("eager")
    truth, rough = slow_gradients(copy.deepcopy(model).float(), task, rows), slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows)
    for parameter, way in ways(units, coverage).items():
        assert way in case.expected(parameter), f"{parameter}: {way}"
    assert_rounded(collect(model, task, rows, units, coverage, batch_size=7), truth, rough, units)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize("how", ["eager", "batched_mm"])
def test_experts_whichever_way_they_are_run(name, how):
    model, task, rows = make(BY_NAME[name], torch.float32)
    model.set_experts_implementation(how)
    units, coverage = plan(model, task, rows)
    assert not coverage.vmapped and not coverage.looped
    features = collect(model, task, rows, units, coverage, batch_size=5)
    assert_features(features, slow_gradients(model, task, rows), units, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_coverage_is_recorded_and_restored(name):
    model, task, rows = make(BY_NAME[name], torch.float32)
    units, coverage = plan(model, task, rows)
    again = restore_coverage(coverage.describe(), model, units)
    assert again.describe() == coverage.describe()
    found = [collect(model, task, rows, units, c, batch_size=4) for c in (coverage, again)]
    assert torch.equal(*found)


def test_routers_alone():
    """The rest is frozen, so that nothing in front of the first of them needs a gradient."""
    model, task, rows = make(BY_NAME["mixtral"], torch.float32)
    for n, p in model.named_parameters():
        p.requires_grad_(".gate.weight" in n)
    units, coverage = plan(model, task, rows)
    assert set(ways(units, coverage).values()) == {"hook"}
    features = collect(model, task, rows, units, coverage, batch_size=5)
    assert_features(features, slow_gradients(model, task, rows), units, TOLERANCE[torch.float32])
