"""Linear layers by the faster library: the same features, and the model as it was. Forced here on any processor."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from cases import BY_NAME
from oracles import assert_features, check, collect, explicit, plan, slow_gradients
from unde import bench, onednn
from unde.data import Rows
from unde.gradients.meter import Meter
from unde.onednn import FrozenLinear, frozen_linears, times
from unde.tasks import Classification

pytestmark = pytest.mark.skipif(not onednn.available(), reason="torch was built without oneDNN")


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(onednn, "_LEAST", 0)
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: True)


class Products(TorchDispatchMode):
    """Counts products by oneDNN."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func._overloadpacket is torch.ops.mkldnn._linear_pointwise
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("projection", ["none", "kron(2)"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "vit", "shared"])
def test_features_are_gradients_of_single_examples(forced, name, projection):
    model, task, rows = BY_NAME[name].make(torch.float32)
    truth = slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows, projection)
    with Products() as count:
        features = collect(model, task, rows, units, coverage, 3)
    layers = sum(isinstance(m, nn.Linear) or onednn.is_conv1d(m) for m in model.modules())
    assert count.seen > layers > 0  # backward passes use it, too
    assert_features(features, {u.name: explicit(u.projection, truth[u.name]) for u in units}, units, 1e-5)


class InPlace(nn.Module):
    """Changes what its layers give, of the data and of the layer before; calls one by the name of its argument."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu_(self.first(x))
        x = self.second(input=x).mul_(2).add_(x)
        return self.last(x).mean(1)


def test_outputs_may_be_changed_in_place(forced):
    torch.manual_seed(0)
    model, task = InPlace(), Classification()
    rows = Rows((torch.randn(6, 4, 5), torch.randint(3, (6,))))
    _, coverage = check(model, task, rows, tolerance=1e-5, batch_size=4)
    assert [m.name for m in coverage.modules] == ["first", "second", "last"]
    bench.frozen_pass(model, task, [rows.batch([0, 1, 2])])


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (0, 5), (2, 1, 3, 5)])
def test_times_is_a_product(forced, shape):
    torch.manual_seed(0)
    x, w, bias = torch.randn(shape), torch.randn(4, 5), torch.randn(4)
    strided = torch.randn(*shape[:-1], 10)[..., ::2]
    for given in (x, strided):
        for matrix in (w, torch.randn(5, 4).T, torch.randn(8, 10)[::2, ::2]):
            for b in (None, bias):
                truth = linear(given.double(), matrix.double(), None if b is None else b.double())
                torch.testing.assert_close(times(given, matrix, b).double(), truth, rtol=1e-5, atol=1e-6)


def test_what_is_left_to_torch(forced):
    """Other types, and rows with gaps, for which oneDNN has no fast kernel."""
    precise = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    gaps = torch.randn(3, 5), torch.randn(4, 8)[:, 2:7]
    with Products() as count:
        for x, w in (precise, gaps):
            torch.testing.assert_close(times(x, w), x @ w.T)
        assert count.seen == 0
        times(gaps[0], torch.randn(5, 4).T)
    assert count.seen == 1


def test_derivatives_of_derivatives(forced):
    torch.manual_seed(0)
    x, w = torch.randn(6, 5), torch.randn(4, 5)

    def second(function):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(given).pow(3).sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)[0]

    torch.testing.assert_close(second(lambda v: FrozenLinear.apply(v, w, None)), second(lambda v: v @ w.T))


def test_layers_are_as_they_were_after_an_error(forced):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))

    def run():
        with frozen_linears(model):
            assert "forward" in vars(model[0]) and "forward" in vars(model[2])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert not any("forward" in vars(m) for m in model.modules())


class Custom(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_not_a_plain_frozen_layer_is_left_alone(forced):
    replaced = nn.Linear(3, 3)
    replaced.forward = lambda x: x + 1
    model = nn.ModuleDict(
        {
            "custom": Custom(3, 3),
            "replaced": replaced,
            "trained": nn.Linear(3, 3),
            "precise": nn.Linear(3, 3).double(),
        }
    )
    x = torch.randn(2, 3)
    with frozen_linears(model), Products() as count:
        assert {name for name, m in model.items() if "forward" in vars(m)} == {"replaced", "trained"}
        torch.testing.assert_close(model["replaced"](x), x + 1)
        model["trained"](x).sum().backward()
        frozen = model["trained"].requires_grad_(False)
        by_example = torch.func.vmap(torch.func.grad(lambda v: frozen(v).pow(2).sum()))(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert frozen(x).dtype == torch.bfloat16
        assert count.seen == 0
        frozen(x)
        assert count.seen == 1
    assert model["trained"].weight.grad is not None and vars(replaced)["forward"](x).equal(x + 1)
    w = model["trained"].weight
    torch.testing.assert_close(by_example, 2 * (x @ w.T + model["trained"].bias) @ w)


@pytest.mark.parametrize("reason", ["switch", "processor"])
def test_without_it_products_are_those_of_torch(monkeypatch, reason):
    monkeypatch.setattr(onednn, "_LEAST", 0)
    monkeypatch.setenv("UNDE_ONEDNN", "0" if reason == "switch" else "1")
    monkeypatch.setattr(onednn, "_amd", lambda: reason == "switch")
    monkeypatch.setattr(onednn, "onednn_is_faster", onednn.onednn_is_faster.__wrapped__)
    model, x = nn.Sequential(nn.Linear(5, 4)).requires_grad_(False), torch.randn(3, 5)
    with frozen_linears(model), Products() as count:
        assert torch.equal(model(x), linear(x, model[0].weight, model[0].bias))
        assert torch.equal(times(x, model[0].weight), linear(x, model[0].weight))
    assert count.seen == 0


def test_the_meter_counts_them(forced):
    x, w = torch.randn(2, 3, 5), torch.randn(4, 5)
    with Meter() as here:
        times(x, w)
    with Meter() as there:
        x @ w.T
    assert here.flops == there.flops == 2 * 6 * 5 * 4


def test_the_floor_has_them_and_the_plain_pass_has_not(forced):
    model, task, rows = BY_NAME["mlp"].make(torch.float32)
    seen = []
    for run in (bench.plain_pass, bench.frozen_pass):
        with Products() as count:
            run(model, task, [rows.batch([0, 1, 2])])
        seen.append(count.seen)
    assert seen[0] == 0 < seen[1]
