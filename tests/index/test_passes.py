"""How many examples go through the model at a time: from memory and speed, settled once, and no matter to features."""

import pytest
import torch
from torch import nn

import toy
from unde import Index
from unde.data import Rows
from unde.gradients import make_units, plan_coverage
from unde.gradients.feature_pass import MOST, FeaturePass, Measurement, choose_pass_size, largest
from unde.methods import TRAK, TracIn
from unde.tasks import CausalLM, Classification

# Relative to the norm of a feature: another pass size is another order of additions, and nothing else.
TOLERANCE = 1e-5


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))


def images(n):
    torch.manual_seed(1)
    return torch.randn(n, 3, 8, 8), torch.randint(3, (n,))


@pytest.mark.parametrize("size", [1, 3, 60])
def test_features_of_another_pass_size(tmp_path, size):
    """Within the tolerance that is promised, and not bit for bit."""
    made = {}
    for name, most in (("a", 16), ("b", size)):
        options = {"model": conv(), "train_data": images(60), "method": TracIn(projection="kron(4)")}
        index = toy.build(tmp_path / name, **options, pass_size=most)
        assert index.manifest.resolved.pass_size == most
        made[name] = toy.stored(index).rows(torch.arange(60))[0]
    error = (made["a"] - made["b"]).norm(dim=1) / made["a"].norm(dim=1)
    assert error.max() <= TOLERANCE


@pytest.mark.parametrize("size", [1, 7, 512])
def test_passes_have_the_batch_size_of_the_user(tmp_path, monkeypatch, size):
    counts, over = [], FeaturePass.over

    def counting(self, *given, **options):
        for result in over(self, *given, **options):
            counts.append(len(result.where))
            yield result

    monkeypatch.setattr(FeaturePass, "over", counting)
    index = Index.build(
        conv(), Classification(), images(20), tmp_path / "i", method="tracin", batch_size=size, progress=False
    )
    assert counts == [min(size, 20 - at) for at in range(0, 20, size)]
    assert index.manifest.resolved.pass_size == min(size, 20)


@pytest.mark.parametrize("budget", [300_000, 1_000_000, 10_000_000])
def test_a_pass_takes_no_more_than_its_share(budget):
    model, rows = conv(), Rows(images(300))
    what = Measurement(make_units(model, [n for n, _ in model.named_parameters()], "kron(4)", 0))
    coverage = plan_coverage(model, Classification(), rows, what.units)
    size, _ = choose_pass_size(model, Classification(), rows, what, coverage, budget)
    with FeaturePass(model, Classification(), what, coverage) as run:
        peaks = []
        for count in (size, size + 1):
            batch = rows.batch(range(count))
            with run.collect.meter() as meter:
                run.collect(batch, list(range(count)))
            peaks.append(meter.peak)
    assert peaks[0] <= 1.05 * budget / 2
    assert size == MOST or peaks[1] > 0.95 * budget / 2  # no fewer than fit


def test_the_longest_example_counts():
    """Texts of other lengths: what a pass takes is that of the longest that was looked at."""
    rows = Rows([{"input_ids": list(range(1, 3 + i % 7))} for i in range(40)], CausalLM().collate)
    assert len(rows[largest(rows)]["input_ids"]) == 8


def test_small_models_get_large_passes_and_large_ones_small(tmp_path):
    """Per-call overhead is what small models wait for; on large ones it is no matter."""
    sizes = {}
    for name, width in (("small", 8), ("large", 4500)):
        model = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )
        data = (torch.randn(400, 8), torch.randint(3, (400,)))
        index = Index.build(
            model, Classification(), data, tmp_path / name, method=TRAK(projection="kron(4)"), progress=False
        )
        sizes[name] = index.manifest.resolved.pass_size
    assert sizes["small"] == MOST
    assert 8 <= sizes["large"] < 64


class Idle(nn.Module):
    """With a weight that is used twice, and one that no example reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.idle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.twice(self.twice(x).tanh()))


def test_what_was_in_the_memory_of_features_does_not_matter():
    torch.manual_seed(0)
    model, data = Idle(), (torch.randn(9, 6), torch.randint(3, (9,)))
    rows, names = Rows(data), [n for n, _ in model.named_parameters()]
    units = make_units(model, names, "none", 0)
    coverage = plan_coverage(model, Classification(), rows, units)
    out = torch.full((9, units[-1].stop), torch.nan)
    with FeaturePass(model, Classification(), Measurement(units), coverage) as run:
        for found in run.over(rows.batches([range(4), range(4, 9)]), out.split([4, 5])):
            assert found.features.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    losses = Classification().loss(model, data)
    for row, loss in zip(out, losses):
        grads = torch.autograd.grad(
            loss, list(model.parameters()), retain_graph=True, materialize_grads=True, allow_unused=True
        )
        torch.testing.assert_close(row, torch.cat([g.flatten() for g in grads]))
    idle = next(u for u in units if u.name == "idle.weight")
    assert not out[:, idle.columns].any()
