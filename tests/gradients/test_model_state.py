"""After the block, whatever happened in it, the model and the random number generators are as before."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from oracles import check, plan
from unde.data import Rows
from unde.gradients import Collector, make_units, plan_coverage
from unde.gradients.model_state import frozen_eval
from unde.tasks import Classification


class Counting(nn.Module):
    """Changes its buffers in each of the ways that people do, and the states of the generators."""

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("through_data", torch.full((2,), float("nan")))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.in_place.add_(1)
        self.through_data.data.fill_(x.shape[0])
        self.replaced = self.replaced + 1
        self.register_buffer("added", torch.ones(1), persistent=False)
        random.random()
        np.random.rand()
        torch.manual_seed(x.shape[0])
        return x


class Raising(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, trap):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.trap = inputs[1]

    @staticmethod
    def backward(ctx, g):
        ctx.trap.spring("backward")
        return g, None


class Trap(nn.Module):
    """Raises on call number `at`, in the forward or the backward pass."""

    where, at, error = None, 0, KeyboardInterrupt

    def spring(self, where):
        if where == self.where:
            self.at -= 1
            if self.at < 0:
                raise self.error

    def forward(self, x):
        self.spring("forward")
        return Raising.apply(x, self) if self.where == "backward" else x


class Mixed(nn.Module):
    """Frozen and trainable layers, all four ways of covering a parameter, training and evaluation mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.counting = Counting()
        self.scale = nn.Parameter(torch.ones(6))  # expanded
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)  # vmap or loop
        self.frozen = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.trap = Trap()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.counting(self.norm(self.first(x))) * self.scale
        h = h.unsqueeze(1)
        h = self.attention(h, h, h, need_weights=False)[0].squeeze(1)
        return self.head(self.trap(self.drop(self.frozen(h))))


def problem():
    torch.manual_seed(0)
    model = Mixed().train()
    model.norm.eval()
    model.drop.eval()
    model.frozen.requires_grad_(False)
    model.frozen.bias.requires_grad_(True)
    model.norm.running_mean.normal_()
    model.first.weight.grad = torch.randn(6, 5)
    model.frozen.weight.grad = torch.randn(6, 6)
    model.scale.grad = None
    model.counting.in_place.fill_(-0.0)
    return model, Classification(), Rows((torch.randn(6, 5), torch.randint(3, (6,))))


def bits(tensor):
    return None if tensor is None else (id(tensor), tensor.detach().numpy().tobytes())


def snapshot(model):
    """All that must stay, objects by identity and numbers by their bits."""
    state = {}
    for name, m in model.named_modules():
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        state[name, "hooks"] = [list(h.items()) for h in hooks]
        state[name, "mode"] = m.training
        state[name, "buffers"] = {k: bits(b) for k, b in m._buffers.items()}
        state[name, "children"] = list(m._modules.items())
    for name, p in model.named_parameters():
        state[name] = (p.requires_grad, bits(p), bits(p.grad), p._backward_hooks)
    state["python"], state["torch"] = random.getstate(), torch.get_rng_state().numpy().tobytes()
    state["numpy"] = [x.tobytes() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]
    state["fast path"] = torch.backends.mha.get_fastpath_enabled()
    return state


def assert_same(model, before):
    after = snapshot(model)
    assert list(after) == list(before)
    for key in before:
        assert after[key] == before[key], key


def test_after_planning_and_collecting():
    model, task, rows = problem()
    before = snapshot(model)
    units, coverage = plan(model, task, rows)
    assert_same(model, before)
    assert coverage.modules
    assert coverage.expanded
    assert coverage.looped  # vmap refuses a forward pass that changes buffers
    with Collector(model, task, units, coverage) as collector:
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
        for ids in ([0, 1, 2], [3, 4], [5]):
            collector(rows.batch(ids), ids)
            assert not any(p.requires_grad for p in model.parameters())
    assert_same(model, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_when_the_body_raises(error):
    model, task, rows = problem()
    units, coverage = plan(model, task, rows)
    before = snapshot(model)

    def body():
        with Collector(model, task, units, coverage) as collector:
            collector(rows.batch([0, 1]), [0, 1])
            raise error

    with pytest.raises(error):
        body()
    assert_same(model, before)


@pytest.mark.parametrize("way", ["hook", "vmap", "loop", "unused"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_interrupted_in_a_pass(where, way):
    """The first pass is the hooked one; later ones are those of the general ways."""
    model, task, rows = problem()
    if way == "vmap":
        model.counting = nn.Identity()
    units, coverage = plan(model, task, rows)
    assert coverage.vmapped if way == "vmap" else coverage.looped
    if way == "unused":  # these are watched, that is made to require grad for a while
        coverage.looped, coverage.unused = [], coverage.looped
    before = snapshot(model)
    model.trap.where, model.trap.at = where, int(way in ("vmap", "loop"))
    with pytest.raises(KeyboardInterrupt), Collector(model, task, units, coverage) as collector:
        collector(rows.batch([0, 1, 2]), [0, 1, 2])
    assert_same(model, before)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_planning_interrupted_at_any_pass(where):
    model, task, rows = problem()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    units = make_units(model, names, "none", 0)
    before = snapshot(model)
    interrupted = 0
    for at in range(100):
        model.trap.where, model.trap.at = where, at
        try:
            plan_coverage(model, task, rows, units)
        except KeyboardInterrupt:
            interrupted += 1
            assert_same(model, before)
        else:
            break
    assert 8 < interrupted < 100
    assert_same(model, before)


def test_a_collector_can_go_on_after_a_failed_batch():
    model, task, rows = problem()
    units, coverage = plan(model, task, rows)
    with Collector(model, task, units, coverage) as collector:
        expected, _ = collector(rows.batch([0, 1]), [0, 1])
        model.trap.where, model.trap.at, model.trap.error = "backward", 0, ArithmeticError
        with pytest.raises(ArithmeticError):
            collector(rows.batch([0, 1]), [0, 1])
        model.trap.where = None
        again, _ = collector(rows.batch([0, 1]), [0, 1])
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_hooks_of_the_user_work_and_stay():
    model, task, rows = problem()
    seen = []

    def doubled(_module, _args, output):
        seen.append("forward")
        return 2 * output

    model.first.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.first.register_forward_hook(doubled)
    model.head.register_full_backward_hook(lambda *_: seen.append("backward"))
    before = snapshot(model)
    units, coverage = plan(model, task, rows)
    seen.clear()
    with Collector(model, task, units, coverage) as collector:
        found, values = collector(rows.batch([0, 1]), [0, 1])
    assert {"pre", "forward", "backward"} <= set(seen)
    assert_same(model, before)
    with frozen_eval(model):
        plain = task.loss(model, rows.batch([0, 1]))
    torch.testing.assert_close(values, plain)
    weight = next(u for u in units if u.name == "first.weight")
    assert found[:, weight.columns].abs().sum() > 0


def test_a_forward_hook_of_the_user_counts_in_the_gradient():
    """The gradient that a layer's parameters see is that of its own output, before the user's hook."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    rows = Rows((torch.randn(4, 5).double(), torch.randint(3, (4,))))
    model[0].register_forward_hook(lambda _m, _a, out: 2 * out)
    check(model, Classification(), rows)


def test_a_graph_of_the_user_survives():
    """A loss computed before the block can be differentiated after it."""
    model, task, rows = problem()
    model.eval()
    loss = task.loss(model, rows.batch([0, 1])).sum()
    units, coverage = plan(model, task, rows)
    with Collector(model, task, units, coverage) as collector:
        collector(rows.batch([0, 1]), [0, 1])
    model.zero_grad()
    loss.backward()
    assert model.first.weight.grad.abs().sum() > 0
