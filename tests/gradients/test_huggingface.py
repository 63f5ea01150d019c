"""Hugging Face models as they come: features equal single backward passes, and none goes a slow way."""

import copy

import pytest
import torch
from torch import nn

from oracles import TOLERANCE, assert_features, collect, plan, slow_gradients, ways
from unde.data import Rows
from unde.tasks import Classification
from zoo import BY_NAME, CLASSIFIERS, LANGUAGE, assert_rounded, make, their_gradients

ZOO = [*LANGUAGE, *CLASSIFIERS]


def assert_fast(case, units, coverage):
    for name, way in ways(units, coverage).items():
        assert way in case.expected(name), f"{name}: {way}, expected {case.expected(name)}"


@pytest.mark.parametrize(
    ("case", "attention"),
    [(case, kind) for case in ZOO for kind in ("sdpa", "eager") if (case.name, kind) != ("resnet", "eager")],
    ids=str,
)
def test_equal_to_a_loop_of_backward_passes(case, attention):
    # In float64 transformers itself gives NaN for padding behind the window.
    dtype = torch.float32 if (case.name, attention) == ("mistral", "eager") else torch.float64
    model, task, rows = make(case, dtype)
    if case.name != "resnet":
        model.set_attn_implementation(attention)
    units, coverage = plan(model, task, rows)
    assert [u.name for u in units] == [n for n, _ in model.named_parameters()]
    assert_fast(case, units, coverage)
    features = collect(model, task, rows, units, coverage, batch_size=5)
    assert_features(features, slow_gradients(model, task, rows), units, TOLERANCE[dtype])


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_equal_to_the_gradients_of_the_loss_of_transformers(case):
    """Nothing of ours in what is compared with: one example at a time through model(labels=...).

    Transformers rounds the logits of language models to float32, hence 1e-6.
    """
    model, task, rows = make(case)
    units, coverage = plan(model, task, rows)
    features = collect(model, task, rows, units, coverage, batch_size=7)
    assert_features(features, their_gradients(model, rows), units, 1e-6)


@pytest.mark.parametrize(
    ("name", "other", "first"),
    [
        ("gpt2-tied", "gpt2-untied", "wte"),
        ("llama-tied", "llama", "embed_tokens"),
        ("qwen3-tied", "qwen3", "embed_tokens"),
    ],
)
def test_tied_heads_are_one_parameter(name, other, first):
    """Its gradient is the sum of what the two of an untied model with the same weights get."""
    model, task, rows = make(BY_NAME[name])
    untied, _, _ = make(BY_NAME[other])
    untied.load_state_dict(model.state_dict())
    found = {}
    for m in (model, untied):
        units, coverage = plan(m, task, rows)
        features = collect(m, task, rows, units, coverage, batch_size=7)
        found[m] = {u.name: features[:, u.columns] for u in units}
    assert not any("lm_head" in n for n in found[model])
    (tied,) = (f for n, f in found[model].items() if first in n)
    (a,) = (f for n, f in found[untied].items() if first in n)
    (b,) = (f for n, f in found[untied].items() if "lm_head" in n)
    torch.testing.assert_close(tied, a + b, rtol=1e-9, atol=1e-12)
    assert min(a.norm(), b.norm()) > 0.01 * tied.norm()


@pytest.mark.parametrize("name", [c.name for c in ZOO])
def test_weights_in_bfloat16(name):
    """Against float32 gradients at the same weights: no further off than torch's own backward pass in bfloat16."""
    case = BY_NAME[name]
    model, task, rows = make(case, torch.bfloat16)
    exact, whole = copy.deepcopy(model).float(), Rows(as_float(rows.data), rows.collate)
    truth, rough = slow_gradients(exact, task, whole), slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows)
    assert_fast(case, units, coverage)
    features = collect(model, task, rows, units, coverage, batch_size=7)
    assert features.dtype == torch.float32
    assert_rounded(features, truth, rough, units)


def as_float(data):
    """Inputs in float32, with the values that bfloat16 left them."""
    if isinstance(data, dict):
        return {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    return data


class CalledOnSomethingElse(nn.Module):
    """A layer that first sees what is no batch of examples, as those of DoRA see an identity matrix."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        columns = self.inner(torch.eye(4, dtype=x.dtype)).reshape(4, 5).detach().norm(dim=0)
        return self.head(self.inner(x) / columns)


def test_a_layer_called_on_something_else_first():
    torch.manual_seed(0)
    model, rows = CalledOnSomethingElse().double(), Rows((torch.randn(6, 4).double(), torch.randint(3, (6,))))
    units, coverage = plan(model, Classification(), rows)
    features = collect(model, Classification(), rows, units, coverage, batch_size=4)
    assert_features(features, slow_gradients(model, Classification(), rows), units, 1e-10)
