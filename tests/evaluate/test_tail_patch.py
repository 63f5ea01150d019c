import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
from refusals import refused
from unde import Index
from unde.errors import UndeError
from unde.evaluate import TailPatch, paired, tail_patch
from unde.tasks import CausalLM, Classification, Task

SHARED = torch.optim.SGD([nn.Parameter(torch.ones(1))])
TOP = [[3, 0, 7], [5, 2, 1], [4, 9, 6]]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)


def classifier():
    """Everything that differs between train and eval mode is in it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def points(n, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def near(x, y):
    """Queries beside training examples."""
    return x + 0.01, y


def patch(**changes):
    """Three steps of the classifier, with some arguments changed."""
    x, y = points(10)
    data = {"train_data": (x, y), "queries": near(x[:3], y[:3]), "top_indices": TOP}
    return tail_patch(
        **{"model": classifier(), "task": Classification(), "optimizer": sgd, **data, **changes}
    )


def sequences(n, seed=2, length=None):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (n,), generator=g).tolist()
    return [{"input_ids": torch.randint(23, (length or t,), generator=g)} for t in lengths]


def trained_state(model, factory, loss):
    """The optimizer state after some steps, which also change the model."""
    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    model.zero_grad()
    return optimizer.state_dict()


def by_hand(model, factory, state, lr, train_loss, query_loss, top=TOP, max_norm=None):
    """Δ(−loss) of each query: a copy of the model, one step of torch, nothing of unde."""
    change = []
    for q, row in enumerate(top):
        patched = copy.deepcopy(model).eval()
        optimizer = factory(list(patched.parameters()))
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        for group in optimizer.param_groups:
            group["lr"] = lr if lr is not None else group["lr"]
        before = query_loss(patched, q).item()
        optimizer.zero_grad()
        torch.stack([train_loss(patched, i) for i in row]).mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(patched.parameters(), max_norm)
        optimizer.step()
        change.append(before - query_loss(patched, q).item())
    return np.array(change)


@pytest.mark.parametrize("micro_batch", [1, 2, 32])
@pytest.mark.parametrize("lr", [None, 0.3])
def test_classifier_and_sgd_with_momentum(micro_batch, lr):
    model, (x, y) = classifier(), points(10)
    state = trained_state(model, sgd, lambda m: F.cross_entropy(m(x), y))
    result = patch(
        model=model, top_indices=torch.tensor(TOP), optimizer_state=state, lr=lr, micro_batch=micro_batch
    )

    def loss(m, i, by=0.0):
        return F.cross_entropy(m(x[[i]] + by), y[[i]])

    expected = by_hand(model, sgd, state, lr, loss, partial(loss, by=0.01))
    np.testing.assert_allclose(result.summed.per_query, expected, rtol=1e-10)
    np.testing.assert_allclose(result.per_token.per_query, 100 * expected, rtol=1e-10)


@pytest.mark.parametrize(("reduction", "max_norm"), [("mean", None), ("sum", 0.5)])
def test_gpt2_and_adamw_with_a_state(reduction, max_norm):
    """Sequence by sequence, without padding."""
    torch.manual_seed(0)
    model, train, queries = models.gpt2().double(), sequences(10), sequences(3, seed=4)

    def mean_loss(m, example):
        ids = example["input_ids"]
        return F.cross_entropy(m(ids[None]).logits[0, :-1], ids[1:])

    def loss(m, example):
        return mean_loss(m, example) * (len(example["input_ids"]) - 1 if reduction == "sum" else 1)

    state = trained_state(model, adamw, lambda m: torch.stack([loss(m, e) for e in train]).mean())
    result = tail_patch(
        model, CausalLM(reduction), train, queries, np.array(TOP), optimizer=adamw, optimizer_state=state,
        lr=0.01, micro_batch=2, max_grad_norm=max_norm,
    )  # fmt: skip
    expected = by_hand(
        model, adamw, state, 0.01,
        lambda m, i: loss(m, train[i]), lambda m, q: mean_loss(m, queries[q]), max_norm=max_norm,
    )  # fmt: skip
    tokens = np.array([len(e["input_ids"]) - 1 for e in queries])
    assert len(set(tokens)) > 1
    np.testing.assert_allclose(result.per_token.per_query, 100 * expected, rtol=1e-8)
    np.testing.assert_allclose(result.summed.per_query, expected * tokens, rtol=1e-8)


def test_only_targets_count_as_tokens():
    """Labels of −100 carry no loss; the target tokens are those of the answer."""
    torch.manual_seed(0)
    model, (query,) = models.gpt2().double(), sequences(1, length=8)
    labels = query["input_ids"].clone()
    labels[:5] = -100
    train = [{**e, "labels": e["input_ids"]} for e in sequences(4)]
    result = tail_patch(model, CausalLM(), train, [{**query, "labels": labels}], [[2]], optimizer=sgd)
    assert result.summed.mean / result.per_token.mean == pytest.approx(3 / 100)


def test_same_class_helps_more_than_others():
    x, y = points(30)
    same = np.array([np.flatnonzero((y == c).numpy())[:5] for c in y[:4]])
    other = np.array([np.flatnonzero((y != c).numpy())[:5] for c in y[:4]])
    data = {"train_data": (x, y), "queries": near(x[:4], y[:4])}
    a, b = (patch(**data, top_indices=top) for top in (other, same))
    difference = paired(a.per_token, b.per_token)
    assert difference.mean > 0 and isinstance(a, TailPatch)
    assert a.as_dict() == {"per_token": a.per_token.as_dict(), "summed": a.summed.as_dict()}
    np.testing.assert_allclose(difference.per_query, b.per_token.per_query - a.per_token.per_query)


def test_every_shape_of_data_gives_the_same():
    datasets = pytest.importorskip("datasets")
    torch.manual_seed(0)
    model, train, queries = models.gpt2(), sequences(10), sequences(3, seed=4)
    lists = [[{"input_ids": e["input_ids"].tolist()} for e in data] for data in (train, queries)]
    loaders = [torch.utils.data.DataLoader(d, collate_fn=CausalLM().collate) for d in (train, queries)]
    plain = [torch.utils.data.DataLoader(d) for d in (train, queries)]
    shapes = [
        (train, queries),
        plain,
        [datasets.Dataset.from_list(d).with_format("torch") for d in lists],
        loaders,
    ]
    results = [tail_patch(model, CausalLM(), *data, TOP, optimizer=sgd).summed.per_query for data in shapes]
    assert len({r.tobytes() for r in results}) == 1


def test_a_collate_function_of_ones_own():
    rows, asked = (
        [{"point": a, "class": b} for a, b in zip(x, y)] for x, y in (points(10), near(*points(10)))
    )

    def collate(examples):
        return torch.stack([e["point"] for e in examples]), torch.stack([e["class"] for e in examples])

    ours, plain = patch(train_data=rows, queries=asked[:3], collate=collate), patch()
    assert np.array_equal(ours.summed.per_query, plain.summed.per_query)


def test_half_precision_losses_are_added_up_in_float32():
    torch.manual_seed(0)
    model, train, queries = models.gpt2().bfloat16(), sequences(4), sequences(1, seed=4, length=16)
    ids = queries[0]["input_ids"][None]

    def log_p(m):
        return m(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum()

    result = tail_patch(model, CausalLM(), train, queries, [[0]], optimizer=torch.optim.SGD, lr=0.5)
    expected = by_hand(
        model.eval(), torch.optim.SGD, None, 0.5,
        lambda m, i: CausalLM().loss(m, {"input_ids": train[i]["input_ids"][None]})[0],
        lambda m, q: -log_p(m), top=[[0]],
    )  # fmt: skip
    np.testing.assert_allclose(result.summed.per_query, expected, rtol=1e-4)
    np.testing.assert_allclose(result.per_token.per_query, 100 * expected / 15, rtol=1e-4)


def test_a_loss_with_noise_is_measured_on_the_same_noise():
    class Noisy(Classification):
        def loss(self, model, batch):
            return super().loss(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    assert np.abs(patch(task=Noisy(), lr=1e-9).summed.per_query).max() < 1e-6


def everything(model, state):
    """Bits of all that must not change, and which tensors they are in."""
    grads = [torch.empty(0) if p.grad is None else p.grad for p in model.parameters()]
    return {
        "parameters": [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()],
        "buffers": [id(b) for b in model.buffers()],
        "values": [
            t.detach().clone().view(torch.int64) for t in (*model.parameters(), *grads, *model.buffers())
        ],
        "grads": [id(p.grad) for p in model.parameters()],
        "modules": [(m.training, len(m._forward_hooks)) for m in model.modules()],
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy()),
        "state": copy.deepcopy(state),
    }


class Failing(Classification):
    """Raises at the given call, after it has drawn random numbers."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def loss(self, model, batch):
        torch.rand(3)
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("on purpose")
        return super().loss(model, batch)


class Augmented(torch.utils.data.TensorDataset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.randn(5), y


# Before, in the step and after it; for the first and the second query.
@pytest.mark.parametrize("fail_at", [None, 1, 3, 4, 5, 8])
def test_model_generators_and_state_are_restored_bit_for_bit(fail_at):
    model, (x, y) = classifier(), points(10)
    model[0].bias.requires_grad_(False)
    state = trained_state(model, adamw, lambda m: F.cross_entropy(m(x), y))
    F.cross_entropy(model(x), y).backward()  # gradients of the caller's
    model[1].eval()
    before = everything(model, state)
    options = {"model": model, "optimizer": adamw, "optimizer_state": state, "lr": 0.1, "micro_batch": 2}
    options |= {"train_data": Augmented(x, y), "queries": Augmented(x[:3], y[:3])}
    if fail_at is None:
        assert np.abs(patch(**options, task=Failing(None)).summed.per_query).min() > 0
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            patch(**options, task=Failing(fail_at))
    torch.testing.assert_close(everything(model, state), before, rtol=0, atol=0)


def test_restored_when_the_optimizer_fails():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise RuntimeError("half way")

    model = classifier()
    before = everything(model, None)
    with pytest.raises(UndeError, match=r"Broken cannot take a step \(RuntimeError: half way\)"):
        patch(model=model, optimizer=Broken, lr=1.0)
    torch.testing.assert_close(everything(model, None), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_indices": [[0, 1]]}, "1 rows for 3 queries"),  # test_recall.py has the other mistakes
        ({"top_indices": [[0, 1], [2, 3], [-1, 4]]}, r"top_indices\[2, 0\] is -1: .* smaller k"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"lr": 0.0}, "lr is 0.0: expected a positive"),
        ({"lr": float("nan")}, "lr is nan"),
        (
            {"model": nn.Linear(5, 3).double().requires_grad_(False)},
            "no parameter of the model requires grad",
        ),
        ({"optimizer": "adamw"}, "optimizer is a str: expected a function"),
        ({"optimizer": sgd(classifier().parameters())}, "optimizer is a SGD: .* optimizer_state="),
        ({"optimizer": lambda params: None}, "gave a NoneType"),
        ({"optimizer": lambda params: SHARED}, "the same optimizer twice"),
        ({"optimizer": lambda params: sgd(classifier().parameters())}, r"shape \(8, 5\) that is not one of"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS cannot take a step .* needs no argument"),
        (
            {"optimizer_state": {"model": 1}},
            r"optimizer_state is \['model'\]: expected what optimizer.state_dict",
        ),
        (
            {"optimizer": adamw, "optimizer_state": sgd(classifier().parameters()).state_dict()},
            "KeyError: 'betas'",
        ),
        ({"lr": 1e200}, "query 0 is (nan|inf) after the step"),
    ],
)
def test_bad_arguments(changes, message):
    refused(message, patch, **changes)


@pytest.mark.parametrize("where", ["factory", "state"])
def test_the_learning_rate_that_a_schedule_leaves(where):
    model, (x, y) = classifier(), points(10)
    state = trained_state(model, sgd, lambda m: F.cross_entropy(m(x), y))
    state["param_groups"][0]["lr"] = 0.0
    options = {
        "factory": {"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)},
        "state": {"optimizer_state": state},
    }[where]
    refused(r"learning rate in .* is 0, as a schedule leaves it .* Pass lr=", patch, **options)
    assert np.abs(patch(**options, lr=0.1).summed.per_query).min() > 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)],
            r"Its exp_avg of '4.weight' has shape \(4, 8\), expected \(3, 8\). It was saved for another",
        ),
        (
            [nn.Linear(5, 8)],
            r"2 parameters in groups of \[2\], the optimizer 6 in groups of \[6\]. It was saved",
        ),
        (
            [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Linear(3, 3)],
            r"8 parameters in groups of \[8\], the optimizer 6 in groups of \[6\]. It was saved for another",
        ),
        (
            [nn.Linear(5, 6), nn.Linear(6, 3)],
            r"it holds 4 parameters .* Its exp_avg of '0.weight' has shape \(6, 5\), expected \(8, 5\)",
        ),
    ],
)
def test_the_optimizer_state_of_another_model(other, message):
    state = trained_state(nn.Sequential(*other), adamw, lambda m: m(torch.ones(2, 5)).square().sum())
    refused(message, patch, optimizer=adamw, optimizer_state=state)


def test_the_state_of_another_kind_of_optimizer():
    x, y = points(10)
    state = trained_state(classifier(), sgd, lambda m: F.cross_entropy(m(x), y))
    with pytest.raises(UndeError, match=r"AdamW cannot take a step .* this kind of optimizer has saved"):
        patch(optimizer=adamw, optimizer_state=state)


def test_bad_queries_and_losses():
    class Averaged(Task):
        def loss(self, model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

    refused(r"query 0: task.loss gave .* shape \(\) for 1 examples: expected \(1,\)", patch, task=Averaged())

    class Zero(CausalLM):
        def loss(self, model, batch):
            return 0 * super().loss(model, batch)

    train = [*sequences(2), {"input_ids": torch.tensor([1])}]
    options = {
        "model": models.gpt2(),
        "task": CausalLM(),
        "train_data": train,
        "queries": sequences(1, seed=4),
    }
    refused(r"training examples \[1, 2\]: example 1 .* no target", patch, **options, top_indices=[[1, 2]])
    refused("query 0: the loss is exactly 0", patch, **{**options, "task": Zero(), "top_indices": [[0]]})
    x, y = points(3, seed=9)
    x[1] = float("nan")
    refused("query 1: the loss is nan under the model as it is", patch, queries=(x, y))


def test_queries_that_are_training_examples_are_refused(tmp_path):
    """By what the index knows of all of them, and without one by the content of proponents."""
    x, y = points(10)
    said = "1 of the queries are also in the training data: .* need disjoint data"
    with pytest.raises(UndeError, match=said):
        patch(queries=(torch.cat([x[:2] + 0.01, x[TOP[2][:1]]]), torch.cat([y[:2], y[TOP[2][:1]]])))
    model = classifier()
    index = Index.build(model, Classification(), (x, y), tmp_path / "idx", method="tracin", progress=False)
    mixed = (torch.cat([x[:2] + 0.01, x[9:]]), torch.cat([y[:2], y[9:]]))
    scores, fine = index.score(mixed), index.score(near(x[:3], y[:3]))
    others = replace(scores.top(2), indices=torch.tensor([[3, 4]] * 3))  # the query itself is not among them
    refused(said, patch, model=model, queries=mixed, top_indices=others)
    top = fine.top(3)
    result = patch(model=model, top_indices=top)
    assert np.array_equal(
        result.summed.per_query, patch(model=model, top_indices=top.indices).summed.per_query
    )


def test_shared_out_to_other_processes(tmp_path):
    """The same numbers, to the last bit; through a folder of one's own, which is left empty."""
    import patches

    setup = patches.make()
    data = {"train_data": setup.train_data, "queries": points(4, seed=7), "top_indices": [*TOP, [8, 1, 0]]}
    here, there = (
        tail_patch(setup.model, setup.task, **data, optimizer=sgd, **how)
        for how in ({}, {"executor": "processes:2", "recipe": "patches:make", "scratch": tmp_path})
    )
    assert list(tmp_path.iterdir()) == []
    assert there.summed.per_query.tolist() == here.summed.per_query.tolist()
    assert there.per_token.per_query.tolist() == here.per_token.per_query.tolist()


def test_a_model_that_cannot_be_sent():
    refused(r"this Sequential cannot be sent to another process", patch, executor="processes:2")
