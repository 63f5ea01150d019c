"""A feature runner: what queries need is settled once."""

import threading

import pytest
import torch

import toy
from unde import UndeError
from unde.data import Rows
from unde.gradients.coverage import plan_coverage
from unde.gradients.hooks import restore_coverage
from unde.index import feature_runner as module
from unde.methods import TRAK


@pytest.fixture
def index(tmp_path):
    return toy.build(tmp_path / "i", method=TRAK(projection="kron(3)"))


def test_the_second_query_costs_one_pass_and_nothing_else(index, monkeypatch):
    """One forward pass, no coverage plan, no fingerprint of all weights, no projection drawn anew."""
    passes = []
    opened = toy.reopen(index, task=toy.Watched(lambda batch: passes.append(len(batch[0]))))
    x, y = toy.data(5, seed=3)
    opened.score((x[:1], y[:1])).total()
    want = index.score((x, y)).total()
    passes.clear()
    for name in ("feature_runner.fingerprints", "feature_runner.plan_coverage", "feature_runner.make_units"):
        monkeypatch.setattr(f"unde.index.{name}", lambda *a, name=name: pytest.fail(f"{name} again"))
    for i in range(1, 5):
        one = opened.score((x[i : i + 1], y[i : i + 1])).total()
        torch.testing.assert_close(one, want[i : i + 1], rtol=1e-5, atol=1e-6)
    assert passes == [1] * 4


def test_the_full_check_finds_what_a_sample_may_miss(index):
    weight = index.model[0].weight
    weight.detach().numpy()  # an alias
    runner = index._state.runner
    runner.check_model(full=True)
    big = torch.nn.Linear(1000, 3)
    sample = module.ModelWatch(big)
    # past the version counter, between the entries that are looked at
    big.weight.detach().numpy()[1, 501] += 1
    assert sample.unchanged()
    weight.detach().numpy()[1, 1] += 1
    with pytest.raises(UndeError, match="not those"):
        runner.check_model(full=True)


def test_coverage_is_restored_as_it_was_decided(index):
    stored, model = toy.stored(index), index.model
    units = index._state.runner.units
    decided = plan_coverage(model, index.task, Rows(toy.data(22)), units)
    again = restore_coverage(stored.manifest.resolved.coverage[0], model, units)
    assert again.describe() == decided.describe()
    assert [type(u.rule) for u in again.modules] == [type(u.rule) for u in decided.modules]


def test_threads_take_turns(index):
    """Hooks change the model: two threads that ask at once get what each would alone."""
    x, y = toy.data(40, seed=5)
    want = [index.score((x[i : i + 4], y[i : i + 4])).total() for i in range(0, 40, 4)]
    got = [None] * 10

    def ask(i):
        got[i] = index.score((x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])).total()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
