"""Tasks of the user's own: losses, measures and passes."""

import pytest
import torch
from torch import nn

from oracles import plan
from refusals import refused
from unde.data import Rows
from unde.gradients import Collector, make_units, plan_coverage
from unde.gradients.fallback import compute_measures
from unde.tasks import Task
from unde.tasks.base import Batching, with_batching


class Regression(Task):
    """Squared error; the prediction can be asked for by name; weights of examples by their ids."""

    def loss(self, model, batch):
        x, y = batch
        return (model(x).squeeze(-1) - y) ** 2

    def measure(self, model, batch, *, name="loss", ids=None):
        if name == "prediction":
            return model(batch[0]).squeeze(-1)
        if name == "weighted":
            return self.loss(model, batch) * torch.tensor([1.0 + i for i in ids], dtype=torch.float64)
        return super().measure(model, batch, name=name, ids=ids)


class TwoPasses(Batching):
    """Over each batch, as diffusion makes one for each block of timesteps."""

    def passes(self, batch, ids):
        x, y = batch
        yield x, y
        yield 2 * x, y


class Twice(Regression):
    batching = TwoPasses()


def problem():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double(), Rows((torch.randn(6, 3).double(), torch.randn(6).double()))


def features(task, measure="loss"):
    model, rows = problem()
    units = make_units(model, ["weight", "bias"], "none", 0)
    coverage = plan_coverage(model, task, rows, units, measure)
    with Collector(model, task, units, coverage, measure) as collector:
        return model, rows, *collector(rows.batch([1, 4, 5]), [1, 4, 5])


def test_the_loss_in_closed_form():
    """The gradient of (w·x + b − y)² is 2 (w·x + b − y) (x, 1)."""
    model, rows, found, values = features(Regression())
    for row, value, i in zip(found, values, [1, 4, 5]):
        x, y = rows[i]
        residual = (model(x) - y).item()
        assert value.item() == pytest.approx(residual**2, rel=1e-12)
        expected = 2 * residual * torch.cat([x, torch.ones(1).double()])
        torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-14)


def test_a_measure_by_name_in_closed_form():
    model, rows, found, values = features(Regression(), "prediction")
    for row, value, i in zip(found, values, [1, 4, 5]):
        torch.testing.assert_close(row, torch.cat([rows[i][0], torch.ones(1).double()]), rtol=0, atol=0)
        assert value.item() == pytest.approx(model(rows[i][0]).item(), rel=1e-12)


def test_measures_get_the_ids():
    _, _, plain, _ = features(Regression())
    _, _, weighted, _ = features(Regression(), "weighted")
    torch.testing.assert_close(weighted, plain * torch.tensor([[2.0], [5.0], [6.0]]).double())


def test_passes_add_up():
    model, rows, found, values = features(Twice())
    for row, value, i in zip(found, values, [1, 4, 5]):
        x, y = rows[i]
        losses = [(model(k * x).squeeze() - y) ** 2 for k in (1, 2)]
        grads = torch.autograd.grad(sum(losses), list(model.parameters()))
        torch.testing.assert_close(row, torch.cat([g.flatten() for g in grads]), rtol=1e-12, atol=1e-14)
        assert value.item() == pytest.approx(sum(losses).item(), rel=1e-12)


def test_passes_add_up_on_the_general_ways():
    """Parameters that no rule covers get the sum over passes too."""
    torch.manual_seed(0)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = nn.Bilinear(3, 3, 1)

        def forward(self, x):
            return self.pair(x, x)

    model, rows = Bare().double(), problem()[1]
    units, coverage = plan(model, Twice(), rows)
    assert coverage.vmapped or coverage.looped
    with Collector(model, Twice(), units, coverage) as collector:
        found, _ = collector(rows.batch([1, 4]), [1, 4])
    for row, i in zip(found, [1, 4]):
        x, y = rows.batch([i])
        loss = sum((model(k * x).squeeze(-1) - y) ** 2 for k in (1, 2)).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(row, torch.cat([g.flatten() for g in grads]), rtol=1e-12, atol=1e-14)


def test_a_task_that_is_not_cut_stays_itself():
    task = Regression()
    assert with_batching(task, task.batching.reduced()) is task
    other = with_batching(task, TwoPasses())
    assert type(other) is Regression
    assert len(list(other.batching.passes((1, 2), None))) == 2
    assert len(list(task.batching.passes((1, 2), None))) == 1


def test_steps_of_what_has_none():
    refused("steps of a sampler, and examples of this task have none", Regression().batching.step, 0, 5)


def test_several_measures_one_by_one():
    model, rows = problem()
    batch = rows.batch([2, 0])
    found = compute_measures(Regression(), model, batch, ["loss", "prediction"], [2, 0])
    assert torch.equal(found["loss"], Regression().loss(model, batch))
    assert torch.equal(found["prediction"], model(batch[0]).squeeze(-1))


def test_unknown_measures_suggest():
    refused(r"unknown measure of Regression 'los'.*Did you mean 'loss'\?", features, Regression(), "los")


def test_a_task_without_a_loss_says_so():
    class Empty(Task):
        pass

    with pytest.raises(TypeError, match="Empty defines no loss"):
        Empty().loss(nn.Identity(), None)


def test_default_collate():
    x, y = Task().collate([(torch.zeros(2), 1), (torch.ones(2), 2)])
    assert x.tolist() == [[0, 0], [1, 1]]
    assert y.tolist() == [1, 2]
