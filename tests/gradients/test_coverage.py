"""Nothing is dropped silently: what is unused is said, what cannot be right is refused, by name."""

from collections import UserDict
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import BY_NAME, CASES
from oracles import assert_features, check, collect, plan, slow_gradients, ways
from unde.data import Rows
from unde.errors import UndeError
from unde.gradients import Collector
from unde.tasks import Classification, Task


def rows_of(*shape, n=6, classes=3):
    torch.manual_seed(0)
    return Rows((torch.randn(n, *shape, dtype=torch.float64), torch.randint(classes, (n,))))


class Asleep(nn.Module):
    """Two linear layers and a raw parameter; the first layer alone takes part unless others are `awake`."""

    def __init__(self, detached=False):
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.Linear(4, 3)
        self.side = nn.Linear(4, 3)
        self.raw = nn.Parameter(torch.randn(3))
        self.awake = set()
        self.detached = detached
        self.double()

    def forward(self, x):
        out = self.main(x)
        if self.detached or "side" in self.awake:
            side = self.side(x.unsqueeze(0)).squeeze(0)  # examples along the second axis
            out = out + (side if "side" in self.awake else side.detach())
        if "raw" in self.awake:
            out = out * self.raw
        return out


def test_frozen_parameters_are_left_out_and_all_others_are_there():
    model, task, rows = BY_NAME["vit"].make()
    for name, p in model.named_parameters():
        p.requires_grad_("attention" not in name and "cls_token" not in name)
    found, _ = check(model, task, rows)
    assert list(found) == [n for n, p in model.named_parameters() if p.requires_grad]
    assert 0 < len(found) < len(list(model.parameters()))


@pytest.mark.parametrize("trainable", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3), (2, 4)),
        (nn.Conv1d(4, 4, 2, groups=2), (4, 5)),
        (nn.Conv1d(4, 4, 2), (4, 5)),
        (nn.LayerNorm(4), (2, 4)),
        (nn.BatchNorm1d(4), (4, 2)),
        (nn.GroupNorm(2, 4), (4, 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_one_parameter_of_a_layer(layer, shape, trainable):
    model = nn.Sequential(layer, nn.Flatten()).double().eval()
    for name, p in layer.named_parameters():
        p.requires_grad_(name == trainable)
    found, _ = check(model, Classification(), rows_of(*shape))
    assert found == {f"0.{trainable}": "hook"}


@pytest.mark.parametrize("detached", [False, True], ids=["not-called", "called-without-gradient"])
def test_unused_parameters_are_listed(detached):
    found, coverage = check(Asleep(detached), Classification(), rows_of(4))
    assert coverage.unused == ["raw", "side.weight", "side.bias"] and found["main.weight"] == "hook"


@pytest.mark.parametrize("detached", [False, True], ids=["not-called", "called-without-gradient"])
@pytest.mark.parametrize("what", ["side", "raw"])
def test_unused_parameters_that_wake_up_are_refused(what, detached):
    model, rows = Asleep(detached), rows_of(4)
    units, coverage = plan(model, Classification(), rows)
    with Collector(model, Classification(), units, coverage) as collector:
        collector(rows.batch([0, 1]), [0, 1])
        model.awake = {what}
        with pytest.raises(UndeError, match=f"'{what}.*had no gradient .* but has one now"):
            collector(rows.batch([0, 1]), [0, 1])


class Losing(Task):
    """Cross-entropy, then whatever a user may do to it."""

    def __init__(self, then):
        self.then = then

    def loss(self, model, batch):
        return self.then(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda x: x.mean(), r"Losing gave a scalar for a batch of 1.*shape \(1,\).*reduction='none'"),
        (lambda x: x.sum(), r"Losing gave a scalar"),
        (lambda x: x.unsqueeze(1), r"Losing gave \(1, 1\) for a batch of 1"),
        (lambda x: x.mean().item(), r"Losing gave float for a batch of 1"),
        (lambda x: x.detach(), "depends on no attributed parameter"),
        (lambda x: x / len(x), r"the loss of example \d is \d\.\d+ alone but 0\.\d+ in a batch.*batch mates"),
        (lambda x: x - x.mean(), "in a batch"),
        (lambda x: x * torch.rand(1, dtype=x.dtype), "random numbers"),
        (lambda x: x * float("nan"), r"gradients of all examples tried \(\[0, 2, 5\]\) are NaN"),
        (lambda x: x / 0, "are NaN or infinite"),
    ],
    ids=["mean", "sum", "shape", "float", "detached", "share", "centred", "random", "nan", "infinite"],
)
def test_refused_losses(then, message):
    rows = rows_of(4)
    model = nn.Linear(4, 3).double()
    with pytest.raises(UndeError, match=message):
        plan(model, Losing(then), rows)


class Always(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


NORM = nn.BatchNorm2d(4, track_running_stats=False)


@pytest.mark.parametrize(
    ("layers", "shape", "said"),
    [
        (
            [nn.Conv2d(2, 4, 3), NORM, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)],
            (2, 4, 4),
            "batch statistics",
        ),
        ([nn.Linear(4, 16), Always(), nn.Linear(16, 3)], (4,), "sampling"),
    ],
    ids=["batch statistics", "dropout that ignores eval mode"],
)
def test_refused_models(layers, shape, said):
    torch.manual_seed(0)
    with pytest.raises(UndeError, match=said):
        plan(nn.Sequential(*layers).double(), Classification(), rows_of(*shape))


def test_a_gradient_that_depends_on_the_batch_though_the_value_does_not():
    """It goes the way that runs examples one by one."""

    class Centred(nn.Module):
        def forward(self, x):
            m = x.mean(0, keepdim=True)
            return x + m - m.detach()

    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(4, 5), Centred(), nn.Linear(5, 3)).double(), Classification(), rows_of(4))


@pytest.mark.parametrize("bad", [0, 3, 4])
def test_one_example_with_nan_does_not_touch_the_others(bad):
    """Example 0 is one of those tried at the start; 3 and 4 are not."""
    model, rows = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), rows_of(4)
    rows.data[0][bad] = float("nan")
    units, coverage = plan(model, Classification(), rows)
    features = collect(model, Classification(), rows, units, coverage, 6)
    assert features[bad].isnan().any()
    good = [i for i in range(6) if i != bad]
    truth = {n: g[good] for n, g in slow_gradients(model, Classification(), rows).items()}
    assert_features(features[good], truth, units, 1e-10)


class Opaque:
    """A batch that cannot be taken apart."""

    def __init__(self, examples):
        self.x, self.y = (torch.stack([e[i] for e in examples]) for i in (0, 1))


class OpaqueTask(Task):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    def collate(self, examples):
        return Opaque(examples)


def test_what_cannot_be_confirmed_is_refused_by_name():
    model, _, rows = BY_NAME["lstm"].make()
    with pytest.raises(UndeError, match=r"'body\.cell\.weight_ih_l0'.*exclude"):
        plan(model, OpaqueTask(), Rows(rows.data, Opaque))


@pytest.mark.parametrize("name", ["lstm", "attention-batch-first"])
def test_batches_that_are_mappings_of_another_type(name):
    """As the collators of transformers give them."""

    def collate(examples):
        return UserDict(
            inputs=torch.stack([e[0] for e in examples]), labels=torch.tensor([e[1] for e in examples])
        )

    class FromDict(Task):
        def loss(self, model, batch):
            assert isinstance(batch, UserDict)
            return F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")

    model, _, rows = BY_NAME[name].make()
    check(model, FromDict(), Rows(rows.data, collate))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", ["vit", "nanogpt", "attention-time-first", "raw-parameters"])
def test_fewer_examples_than_are_tried(name, n):
    model, task, rows = BY_NAME[name].make(examples=n)
    check(model, task, rows)


def test_half_precision_models_give_single_precision_features():
    """bfloat16 keeps 8 bits: each entry is off by 0.4 % at most, and so is a sum of few."""
    model, task, rows = BY_NAME["mlp"].make(torch.float32)
    truth = slow_gradients(model, task, rows)
    half = BY_NAME["mlp"].make(torch.bfloat16)
    units, coverage = plan(*half)
    assert set(ways(units, coverage).values()) == {"hook"}
    features = collect(*half, units, coverage, 7)
    assert features.dtype == torch.float32
    assert_features(features, truth, units, 0.03)


def test_every_case_is_named_once():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("bad", "alone"), [(None, [0, 1]), (0, [0, 1, 2]), (1, [0, 1, 2])])
def test_as_many_references_as_tell(bad, alone):
    """Two examples are run alone, a third one where one of them has no gradient to compare with."""
    tried = []

    class Noted(Classification):
        def measure(self, model, batch, *, name="loss", ids=None):
            if len(ids) == 1:
                tried.extend(ids)
            values = super().measure(model, batch, name=name, ids=ids)
            return values * torch.tensor([float("nan") if i == bad else 1.0 for i in ids])

    model = nn.Linear(4, 3).double()
    with mock.patch("unde.gradients.coverage._check_mates", lambda check, coverage, *others: coverage):
        units, coverage = plan(model, Noted(), rows_of(4, n=3))
    assert tried == alone
    assert ways(units, coverage) == {"weight": "hook", "bias": "hook"}


def test_a_third_reference_reaches_what_two_do_not():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.side = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            last = x[:, :1] > 100
            return torch.where(last, self.side(x), self.main(x)) if last.any() else self.main(x)

    rows = rows_of(4, n=3)
    rows.data[0][2, 0] = 101.0
    _, coverage = check(Rare().double(), Classification(), rows)
    assert not coverage.unused


class Loose(nn.Module):
    """Parameters without a layer: `shift` is right with the first shape of its copies, `scale` if `hard` with the
    second only."""

    def __init__(self, hard):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 2, 3, 4))
        self.scale = nn.Parameter(torch.randn(3, 4) if hard else torch.randn(1, 2, 3, 4))
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head((self.scale * x + self.shift).tanh().flatten(1))


@pytest.mark.parametrize(("hard", "passes"), [(False, 4), (True, 9)])
def test_parameters_without_a_layer_are_tried_together_then_one_by_one(hard, passes, monkeypatch):
    torch.manual_seed(0)
    model, rows = Loose(hard).double(), Rows((torch.randn(6, 2, 3, 4).double(), torch.randint(3, (6,))))
    truth, taken, own = slow_gradients(model, Classification(), rows), [], Collector.__call__
    monkeypatch.setattr(Collector, "__call__", lambda *args: taken.append(1) or own(*args))
    units, coverage = plan(model, Classification(), rows, "none")
    # Layers; all copies at once, as a batch and alone. If one is wrong: shift as a batch and alone, scale in two ways,
    # the first of which fails at once, and everything once more. At last, examples that are alike.
    assert len(taken) == passes
    assert coverage.expanded == {"shift": (2, 3, 4), "scale": (1, 3, 4) if hard else (2, 3, 4)}
    features = collect(model, Classification(), rows, units, coverage, 6)
    assert_features(features, {u.name: truth[u.name].flatten(1) for u in units}, units, 1e-10)
