"""Described trainings: single models as in a loop written out, stacks as single models."""

import json
from functools import partial

import bank_jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import Bank, TrainingSpec
from unde.evaluate.bank.stacked import Unstackable, default_stack, group_norm, train_stacked

N = 24
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, 6, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (N,), generator=GENERATOR)
WHICH = [(np.sort(np.random.default_rng(i).permutation(N)[: N // 2]), 100 + i) for i in range(3)]


class Attending(nn.Module):
    """Convolution, both norms, attention, a frozen parameter and a buffer that says nothing."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch_norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.group_norm, self.qkv = nn.GroupNorm(2, 4), nn.Linear(4, 12)
        self.head, self.drop = nn.Linear(4, 3), nn.Dropout(0.0)
        self.scale = nn.Parameter(torch.full((4,), 0.7), requires_grad=False)
        self.register_buffer("shift", torch.randn(4))
        self.double()

    def forward(self, x):
        h = self.drop(self.group_norm(self.batch_norm(self.conv(x)).relu())).flatten(2).transpose(1, 2)
        q, k, v = (
            self.qkv(h * self.scale + self.shift).unflatten(-1, (3, 2, 2)).movedim(-3, 0).transpose(2, 3)
        )
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) + h
        return self.head(h.mean(1))


def make(seed, kind=Attending):
    return kind()


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def noisy(batch, generator):
    return batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator, dtype=torch.float64), batch[1]


def one_cycle(optimizer, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)


def adamw(parameters):
    """Weight decay for matrices alone, as many do."""
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": rest}], lr=0.02)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, nesterov=True)


def training(**changes):
    given = {"model": make, "data": (X, Y), "loss": cross_entropy, "optimizer": adamw}
    return TrainingSpec(**{**given, "epochs": 4, "batch_size": 5, **changes})


def written_out(indices, seed, *, optimizer, schedule=None, clip=None, prepare=None):
    """The same, as people write it."""
    torch.manual_seed(seed)
    model, random = Attending().train(), torch.Generator().manual_seed(seed)
    steps = optimizer([p for p in model.parameters() if p.requires_grad])
    rate = schedule(steps, 4 * 3) if schedule else None
    for _ in range(4):
        for at in torch.randperm(len(indices), generator=random).split(5):
            batch = X[indices[at]], Y[indices[at]]
            batch = prepare(batch, random) if prepare else batch
            steps.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            steps.step()
            if rate:
                rate.step()
    return model.eval()


def assert_alike(a, b, within=1e-9):
    for name, value in a.state_dict().items():
        torch.testing.assert_close(b.state_dict()[name], value, rtol=within, atol=within, msg=name)


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": sgd},
        {"optimizer": sgd, "clip": 0.4},
        {"optimizer": adamw, "schedule": one_cycle},
        {"optimizer": adamw, "schedule": one_cycle, "clip": 0.4, "prepare": noisy},
        *({"optimizer": partial(kind, lr=0.01)} for kind in (torch.optim.RMSprop, torch.optim.NAdam)),
    ],
    ids=["sgd", "clipped", "schedule", "all", "rmsprop", "nadam"],
)
def test_stacked_models_have_the_weights_of_a_loop_written_out(given):
    for (indices, seed), model in zip(WHICH, train_stacked(training(**given), WHICH), strict=True):
        expected = written_out(indices, seed, **given)
        assert_alike(expected, model)
        assert_alike(expected, training(**given)(indices, seed))
        assert not model.training and int(model.batch_norm.num_batches_tracked) == 12


def test_clipping_bounds_each_model_by_itself():
    """One model with a gradient a million times that of the other: a common norm would silence the other."""
    data = (torch.cat([1e3 * X[:12], X[12:]]).double(), torch.cat([X[:12, :1, 0, 0] * 1e3, X[12:, :1, 0, 0]]))
    which = [(np.arange(12), 0), (np.arange(12, 24), 1)]
    linear = training(
        data=data,
        model=lambda seed: nn.Sequential(nn.Flatten(), nn.Linear(108, 1)).double(),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        clip=0.5,
    )
    for (indices, seed), model in zip(which, train_stacked(linear, which), strict=True):
        assert_alike(linear(indices, seed), model)


def test_tied_and_conditional_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.unused = nn.Linear(2, 2)  # without a gradient, so its weights do not decay either

        def forward(self, ids):
            return self.head(self.embed(ids).mean(1))

    ids = torch.randint(0, 9, (N, 5), generator=torch.Generator().manual_seed(3))
    tied = training(
        model=lambda seed: Tied().double(),
        data={"ids": ids, "y": Y},
        loss=lambda model, batch: F.cross_entropy(model(batch["ids"]), batch["y"]),
    )
    for (indices, seed), model in zip(WHICH, train_stacked(tied, WHICH), strict=True):
        assert_alike(tied(indices, seed), model)
        assert model.head.weight is model.embed.weight


def test_group_norm_in_single_steps():
    x, w, b = torch.randn(2, 6, 3, 3), torch.randn(6), torch.randn(6)
    torch.testing.assert_close(group_norm(x, 3, w, b, 1e-3), F.group_norm(x, 3, w, b, 1e-3))
    torch.testing.assert_close(group_norm(x[..., 0], 2), F.group_norm(x[..., 0], 2))


class Replacing(nn.Linear):
    def __init__(self):
        super().__init__(108, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x.flatten(1))


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Dropout(0.5), nn.Linear(108, 3))
        self.double()


def cut(batch, generator):
    return batch[0][: 3 + int(torch.randint(3, (), generator=generator))], batch[1]


def masked(batch, generator):
    x, y = batch
    return {"x": x, "y": y} | ({"mask": y >= 0} if int(torch.randint(2, (), generator=generator)) else {})


def masked_loss(model, batch):
    return cross_entropy(model, (batch["x"], batch["y"]))


REFUSED = [
    ({"model": partial(make, kind=Dropping)}, "random"),
    ({"model": partial(make, kind=Replacing)}, "another tensor in place of the buffer 'seen'"),
    ({"optimizer": lambda p: torch.optim.Rprop(p)}, "Rprop is not known to step each number by itself"),
    ({"prepare": lambda batch, generator: (*batch, "a word")}, "batches hold a str"),
    ({"prepare": cut}, "their batches have shapes"),
    ({"loss": masked_loss, "prepare": masked}, "their batches have different columns"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_what_cannot_be_stacked_is_told_and_trained_by_itself(tmp_path, given, why):
    described = training(**given)
    with pytest.raises(Unstackable, match=why):
        train_stacked(described, WHICH)
    if "prepare" in given:
        return
    with pytest.raises(UndeError, match=rf"cannot be trained as one \(.*{why}.*stacked=1"):
        run(tmp_path / "bank", train=described, stacked=4)
    bank = run(tmp_path / "bank", train=described)
    (environment,) = bank.provenance["environments"]
    assert environment["stacked"] == 1
    seed = int(bank.seeds[1, 0])
    assert_utility(bank, described(np.flatnonzero(bank.masks[1]), seed), 1)


def utility(model):
    with torch.no_grad():
        return -F.cross_entropy(model(X), Y, reduction="none")


def assert_utility(bank, model, subset):
    np.testing.assert_allclose(bank.utility["queries"][subset], utility(model).numpy(), rtol=1e-8)


def run(path, **changes):
    return Bank.run(
        path, **{"train": training(), "utility": utility, "n_train": N, "subsets": 7, "name": "n"} | changes
    )


def test_a_bank_of_stacks_is_the_bank_of_single_models(tmp_path):
    alone = run(tmp_path / "alone", stacked=1)
    stacks = run(tmp_path / "stacks", stacked=3)
    np.testing.assert_allclose(stacks.utility["queries"], alone.utility["queries"], rtol=1e-8)
    np.testing.assert_array_equal(stacks.masks, alone.masks)
    assert (stacks.seconds > 0).all()
    assert sorted((e["stacked"], e["models"]) for e in stacks.provenance["environments"]) == [(1, 1), (3, 6)]
    loop = partial(written_out, optimizer=adamw)
    written = run(tmp_path / "loop", train=loop)
    np.testing.assert_allclose(stacks.utility["queries"], written.utility["queries"], rtol=1e-8)
    assert "stacked" not in written.provenance["environments"][0]


def test_a_stack_that_ends_early_loses_its_own_models_and_is_gone_on_with(tmp_path):
    alone, left = run(tmp_path / "alone", stacked=1), iter(range(4))

    def fail_later(model):
        next(left)
        return utility(model)

    with pytest.raises(UndeError, match="StopIteration") as caught:
        run(tmp_path / "bank", stacked=3, utility=fail_later)
    assert "4 of 7 models are kept" in str(caught.value)
    measured = []
    bank = run(tmp_path / "bank", utility=lambda model: measured.append(model) or utility(model))
    assert len(measured) == 3  # one that was trained already but not written, and those that had not begun
    np.testing.assert_allclose(bank.utility["queries"], alone.utility["queries"], rtol=1e-8)
    assert sorted((e["stacked"], e["models"]) for e in bank.provenance["environments"]) == [(1, 3), (3, 4)]


def test_a_bank_begun_by_a_loop_goes_on_in_stacks(tmp_path):
    loop, left = partial(written_out, optimizer=adamw), iter(range(2))
    with pytest.raises(UndeError, match="StopIteration"):
        run(tmp_path / "bank", train=lambda indices, seed: (next(left), loop(indices, seed))[1])
    bank = run(tmp_path / "bank", stacked=4)
    assert sorted(e["models"] for e in bank.provenance["environments"]) == [1, 2, 4]
    np.testing.assert_allclose(
        bank.utility["queries"], run(tmp_path / "loop", train=loop).utility["queries"], rtol=1e-8
    )


def test_a_nan_in_a_stack_names_its_model(tmp_path):
    def diverged(model):
        return utility(model) * (float("nan") if model.last else 1.0)

    def marked(seed):
        model = Attending()
        model.last = seed == seeds[2]
        return model

    seeds = run(tmp_path / "alone", subsets=3, stacked=1).seeds.ravel()
    with pytest.raises(UndeError, match=r"model 2: utility\['queries'\] has 24 NaN"):
        run(tmp_path / "bank", subsets=3, stacked=3, train=training(model=marked), utility=diverged)


def small(width=8, *layers):
    return lambda seed: nn.Sequential(
        nn.Flatten(), nn.Linear(108, width), *layers, nn.Linear(width, 3)
    ).double()


def test_small_models_are_stacked_by_default(tmp_path):
    assert default_stack(training(model=small()), 0) == 32
    assert default_stack(training(model=small(400)), 0) == 1  # 44,803 parameters
    assert default_stack(training(), 0) == 1  # a convolution
    banks = [run(tmp_path / str(n), train=training(model=small()), stacked=n) for n in (None, 1)]
    assert [b.provenance["environments"][0]["stacked"] for b in banks] == [7, 1]
    np.testing.assert_allclose(banks[0].utility["queries"], banks[1].utility["queries"], rtol=1e-8)


def test_a_small_model_that_cannot_be_stacked_is_trained_by_itself(tmp_path):
    spec = training(model=small(8, nn.Dropout(0.5)))
    bank = run(tmp_path / "bank", train=spec)
    assert [e["stacked"] for e in bank.provenance["environments"]] == [1]
    assert_utility(bank, spec(np.flatnonzero(bank.masks[1]), int(bank.seeds[1, 0])), 1)


def test_channels_last_gives_the_same_weights(tmp_path):
    last = training(channels_last=True)
    for indices, seed in WHICH:
        assert_alike(training()(indices, seed), last(indices, seed))
        assert last(indices, seed).conv.weight.is_contiguous()
    bank = run(tmp_path / "bank", train=last, name=None)
    assert bank.provenance["environments"][0]["channels_last"]
    run(tmp_path / "bank", name=None)  # the same training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stacked": 0}, "stacked is 0: expected at least 1"),
        (
            {"stacked": 4, "train": bank_jobs.train},
            r"a function of one model: expected an unde.evaluate.TrainingSpec",
        ),
        ({"train": lambda: training(epochs=0)}, "epochs is 0"),
        ({"train": lambda: training(clip=-1.0)}, "clip is -1.0"),
        ({"train": lambda: training(model=lambda seed: "resnet")}, r"model\(seed\) gave a str"),
        ({"train": lambda: training(model=lambda seed: nn.Flatten())}, "nothing to train"),
        ({"train": lambda: training(loss=lambda model, batch: 1.0)}, "gave a float: expected a scalar"),
        ({"train": lambda: training(loss=lambda m, b: m(b[0]))}, r"shape \(5, 3\): expected a scalar"),
        ({"train": lambda: training(schedule=lambda o, n: o)}, "gave a AdamW: expected a scheduler"),
    ],
)
def test_mistakes_are_told(tmp_path, change, message):
    def asked():
        if "stacked" in change:
            return run(tmp_path / "bank", **change)
        return run(tmp_path / "bank", train=change["train"](), stacked=2)

    refused(message, asked)


def test_the_name_of_a_described_training_tells_it_apart(tmp_path):
    bank = run(tmp_path / "b", name=None, subsets=2)
    name = bank.provenance["plan"]["name"]
    assert "model=test_bank_stacked.make" in name and "epochs=4" in name and "data" not in name
    with pytest.raises(UndeError, match=r"epochs=4.* there and .*epochs=5"):
        run(tmp_path / "b", name=None, subsets=2, train=training(epochs=5))


def test_data_may_be_any_data_set_or_a_function_that_makes_it():
    examples = list(zip(X, Y, strict=True))
    made = []
    for data in (examples, lambda: made.append(1) or (X, Y)):
        described = training(data=data)
        for _ in range(2):
            assert_alike(training()(*WHICH[0]), described(*WHICH[0]))
    assert made == [1]
    assert json.dumps(sorted(described.__getstate__())) == json.dumps(sorted(described.__dataclass_fields__))
