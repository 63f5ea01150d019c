"""Hugging Face models as they come: features equal single backward passes, and none goes a slow way."""

import copy

import pytest
import torch
from torch import nn

from oracles import TOLERANCE, assert_features, check, collect, plan, slow_gradients, ways
from unde.data import Rows
from unde.gradients.hooks import restore_coverage
from unde.tasks import Classification
from zoo import BY_NAME, CLASSIFIERS, FAMILIES, LANGUAGE, assert_rounded, make, their_gradients

ZOO = [*LANGUAGE, *CLASSIFIERS]
# They compute in float32 inside, whatever the type of the model.
SINGLE = {case.name for case in FAMILIES if case.name.startswith(("gemma", "mixtral", "qwen", "gpt-oss"))}


def precision(name, attention="sdpa"):
    # In float64 transformers itself gives NaN for padding behind the window.
    single = name in SINGLE or (name, attention) == ("mistral", "eager")
    return torch.float32 if single else torch.float64


def assert_fast(case, units, coverage):
    for name, way in ways(units, coverage).items():
        assert way in case.expected(name), f"{name}: {way}, expected {case.expected(name)}"


@pytest.mark.parametrize(
    ("case", "attention"),
    [
        *(
            (case, kind)
            for case in ZOO
            for kind in ("sdpa", "eager")
            if (case.name, kind) != ("resnet", "eager")
        ),
        *((case, "as it comes") for case in FAMILIES),
    ],
    ids=str,
)
def test_equal_to_a_loop_of_backward_passes(case, attention):
    """Of the task's own loss, and of that which transformers computes itself, through model(labels=...).

    Transformers rounds the logits of language models to float32, hence 1e-6.
    """
    dtype = precision(case.name, attention)
    model, task, rows = make(case, dtype)
    if attention != "as it comes" and case.name != "resnet":
        model.set_attn_implementation(attention)
    units, coverage = plan(model, task, rows)
    assert [u.name for u in units] == [n for n, _ in model.named_parameters()]
    assert_fast(case, units, coverage)
    features = collect(model, task, rows, units, coverage, batch_size=5)
    assert_features(features, slow_gradients(model, task, rows), units, TOLERANCE[dtype])
    if attention != "eager":  # which transformers rounds more
        assert_features(features, their_gradients(model, rows), units, max(1e-6, TOLERANCE[dtype]))


@pytest.mark.parametrize("projection", ["kron(3)", "sjlt(7)"])
@pytest.mark.parametrize("name", ["t5", "bart", "mixtral", "gpt-oss", "opt"])
def test_projected(name, projection):
    dtype = precision(name)
    _, coverage = check(*make(BY_NAME[name], dtype, examples=4), projection, 5 * TOLERANCE[dtype], seed=3)
    assert not coverage.vmapped and not coverage.looped


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


BFLOAT16 = [*(c.name for c in ZOO), "t5", "t5-gated-untied", "bart", "opt", "gemma3", "mixtral", "bert-mlm"]


@pytest.mark.parametrize("name", BFLOAT16)
def test_weights_in_bfloat16(name):
    """Against float32 gradients at the same weights: no further off than torch's own backward pass in bfloat16."""
    case = BY_NAME[name]
    model, task, rows = make(case, torch.bfloat16)
    if name == "mixtral":  # torch multiplies in groups only where rows are 16 bytes long
        model.set_experts_implementation("eager")
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


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize("how", ["eager", "batched_mm"])
def test_experts_whichever_way_they_are_run(name, how):
    model, task, rows = make(BY_NAME[name], torch.float32)
    model.set_experts_implementation(how)
    _, coverage = check(model, task, rows, tolerance=TOLERANCE[torch.float32])
    assert not coverage.vmapped and not coverage.looped


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
    found, _ = check(model, task, rows, tolerance=TOLERANCE[torch.float32])
    assert set(found.values()) == {"hook"}


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
    rows = Rows((torch.randn(6, 4).double(), torch.randint(3, (6,))))
    check(CalledOnSomethingElse().double(), Classification(), rows)
