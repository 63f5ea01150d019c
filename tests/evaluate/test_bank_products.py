"""Products by oneDNN against those of torch, and the choice between them."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unde.evaluate import Bank, Training
from unde.evaluate.bank import products, training, ways
from unde.evaluate.bank.activations import gelu_tanh
from unde.evaluate.bank.products import Products
from unde.evaluate.bank.ways import Way, recorded, settled
from unde.onednn import available

needs_onednn = pytest.mark.skipif(not available(), reason="torch was built without oneDNN")
ROWS, WIDE = 24, 12
X, Y = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS) % 3


@pytest.fixture
def counted(monkeypatch):
    """All products go to oneDNN, however small; how many did."""
    calls, real = [], products.by_onednn
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "by_onednn", lambda *given: calls.append(1) or real(*given))
    return calls


def drawn(*shape):
    return torch.randn(*shape, requires_grad=True)


CASES = {
    "linear": lambda: (F.linear, drawn(7, 5), drawn(4, 5), drawn(4)),
    "linear without bias": lambda: (F.linear, drawn(2, 3, 5), drawn(4, 5)),
    "few inputs of many outputs": lambda: (F.linear, drawn(60, 3), drawn(20, 3), drawn(20)),
    "many inputs of few outputs": lambda: (F.linear, drawn(60, 20), drawn(3, 20)),
    "addmm": lambda: (torch.addmm, drawn(4), drawn(7, 5), drawn(5, 4)),
    "addmm of few inputs": lambda: (torch.addmm, drawn(20), drawn(60, 3), drawn(3, 20)),
    "matmul": lambda: (torch.matmul, drawn(2, 7, 5), drawn(5, 4)),
    "@": lambda: (lambda a, b: a @ b, drawn(7, 5), drawn(5, 4)),
    "mm of a transpose": lambda: (lambda a, b: a.t().mm(b.t()), drawn(5, 7), drawn(4, 5)),
    "input in another layout": lambda: (lambda a, b: F.linear(a.transpose(0, 1), b), drawn(3, 2, 5), drawn(4, 5)),
}  # fmt: skip


@needs_onednn
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", ["mixed", "sum"])
def test_values_and_gradients_are_those_of_torch(counted, case, last):
    torch.manual_seed(1)
    func, *given = CASES[case]()
    expected = func(*given)
    weights = torch.randn(expected.shape) if last == "mixed" else torch.ones(()).expand(expected.shape)
    with Products():
        found = func(*given)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(out, given, weights) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)
    assert len(counted) == 3


@needs_onednn
def test_gradients_that_nobody_asks_for_are_not_computed(counted):
    x, w = torch.randn(7, 5), drawn(4, 5)
    with Products():
        F.linear(x, w).sum().backward()
    assert len(counted) == 2 and w.grad is not None


OTHERS = {
    "float64": lambda: (F.linear, drawn(7, 5).double(), drawn(4, 5).double()),
    "a vector": lambda: (F.linear, drawn(5), drawn(4, 5)),
    "columns of a matrix": lambda: (F.linear, drawn(7, 5), drawn(4, 9)[:, :5]),
    "a bias for each row": lambda: (torch.addmm, drawn(7, 4), drawn(7, 5), drawn(5, 4)),
    "one bias": lambda: (torch.addmm, drawn(1), drawn(7, 5), drawn(5, 4)),
    "scaled": lambda: (partial(torch.addmm, beta=0.5), drawn(4), drawn(7, 5), drawn(5, 4)),
    "products of batches": lambda: (torch.matmul, drawn(2, 7, 5), drawn(2, 5, 4)),
    "matrix times vector": lambda: (torch.matmul, drawn(7, 5), drawn(5)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not_for_onednn_goes_as_ever(counted, case):
    func, *given = OTHERS[case]()
    with Products():
        found = func(*given)
    assert torch.equal(found, func(*given)) and not counted


def test_small_products_and_those_of_autocast_go_as_ever(counted, monkeypatch):
    x, w = drawn(7, 5), drawn(4, 5)
    with Products(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, w).dtype == torch.bfloat16
    monkeypatch.setattr(products, "LEAST", 7 * 5 * 4 + 1)
    with Products():
        F.linear(x, w)
    assert not counted


def test_attention_over_few_tokens_is_in_single_steps(monkeypatch):
    seen, real = [], products.attention
    monkeypatch.setattr(
        products, "attention", lambda *given, **named: seen.append(1) or real(*given, **named)
    )
    for tokens, count in ((5, 2), (products.SHORT + 1, 2), (products.SHORT, 4)):
        q, k, v = torch.randn(3, 2, 2, tokens, 4)
        with Products():
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            named = F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(named, expected)
        assert len(seen) == count
        blind = torch.zeros(tokens, tokens, dtype=torch.bool)  # tokens that attend to none
        with Products():
            assert not F.scaled_dot_product_attention(q, k, v, blind).isnan().any()
        assert len(seen) == count


def test_gelu_is_that_of_torch():
    x = torch.linspace(-9, 9, 97, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(gelu_tanh, x) and torch.autograd.gradgradcheck(gelu_tanh, x)
    expected = F.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu_tanh(x), expected)
    y = x.detach().float().requires_grad_()
    with Products():
        found = F.gelu(y, approximate="tanh")
        assert torch.equal(F.gelu(y), F.gelu(x.float()))  # that by erf is as ever
    assert found.grad_fn.name() == "_GeluTanhBackward"
    torch.testing.assert_close(found, expected.float())
    slopes = (torch.autograd.grad(out.sum(), given)[0] for out, given in ((found, y), (expected, x)))
    torch.testing.assert_close(next(slopes), next(slopes).float(), rtol=1e-5, atol=1e-5)


# --- trainings --------------------------------------------------------------------------------------------


def make(seed):
    return nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def penalised(model, batch):
    x = batch[0].clone().requires_grad_()
    out = F.cross_entropy(model(x), batch[1])
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def described(**changes):
    settings = {"model": make, "data": (X, Y), "loss": loss, "epochs": 400, "batch_size": 5, "clip": 1.0}
    return Training(optimizer=partial(torch.optim.AdamW, lr=0.01), **{**settings, **changes})


def which(count):
    return [(np.arange(i, i + 12), i) for i in range(count)]


@needs_onednn
def test_a_language_model_is_that_of_the_plain_loop(counted):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=6, n_embd=8, n_layer=2, n_head=2)

    def next_token(model, ids):
        return model(input_ids=ids, labels=ids).loss  # dropout draws the same

    ids = torch.randint(0, 20, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    given = described(
        model=lambda seed: transformers.GPT2LMHeadModel(config), data=ids, loss=next_token, epochs=2
    )
    plain, quick = (given.one(*which(1)[0], onednn=way) for way in (False, True))
    assert counted
    for a, b in zip(plain.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("loss", [loss, penalised])  # with a gradient of the gradient
def test_a_model_is_that_of_the_plain_loop(counted, loss):
    plain, quick = (described(epochs=4, loss=loss).one(*which(1)[0], onednn=way) for way in (False, True))
    assert counted
    for a, b in zip(plain.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def timed(monkeypatch):
    """What trials say that steps take."""
    seconds, real = {"onednn": 0.5, "own": 1.0}, ways._tried

    def tried(learner):
        losses, gradient, _ = real(learner)
        return losses, gradient, seconds["onednn" if learner.onednn else "own"]

    monkeypatch.setattr(ways, "_tried", tried)
    monkeypatch.setattr(ways._Own, "compare_stack", lambda own, which: None)
    return seconds


@needs_onednn
def test_it_is_taken_where_it_is_quicker_and_gives_the_same(counted, timed, monkeypatch):
    assert settled(described(), which(8), 8) == Way(onednn=True)
    timed["onednn"] = 0.95
    assert settled(described(), which(8), 8) == Way()
    timed["onednn"] = 0.5
    assert (
        settled(described(model=lambda seed: make(seed).double(), data=(X.double(), Y)), which(8), 8) == Way()
    )
    monkeypatch.setattr(products, "_weight_gradient", lambda g, x, *others: 1.01 * (g.t() @ x))
    assert settled(described(), which(8), 8) == Way()


def test_without_onednn_it_is_not_tried(timed, monkeypatch):
    monkeypatch.setattr(ways, "available", lambda: False)
    assert settled(described(), which(8), 8) == Way()


def utility(model):
    with torch.no_grad():
        return -F.cross_entropy(model(X), Y, reduction="none")


@needs_onednn
def test_a_bank_goes_on_in_the_way_it_was_begun(tmp_path, counted, timed, monkeypatch):
    left = iter(range(2))

    def fail_later(model):
        next(left)
        return utility(model)

    given = {"train": described(epochs=80), "n_train": ROWS, "subsets": 8, "name": "n"}
    with pytest.raises(Exception, match="StopIteration"):
        Bank.run(tmp_path / "bank", utility=fail_later, **given)
    timed["onednn"] = 2.0
    monkeypatch.setattr(training, "settled", lambda *given: pytest.fail("a second trial"))
    counted.clear()
    bank = Bank.run(tmp_path / "bank", utility=utility, **given)
    (environment,) = bank.provenance["environments"]
    assert environment["onednn"] is True and environment["models"] == 8 and counted
    alone = Bank.run(tmp_path / "alone", utility=utility, stacked=1, **given)
    np.testing.assert_allclose(bank.utility["queries"], alone.utility["queries"], rtol=1e-2, atol=1e-3)


def test_ways_of_earlier_releases_are_read():
    assert recorded(json.dumps({"stacked": 1, "channels_last": True})) == Way(1, True)
    assert recorded(json.dumps({"stacked": 1, "channels_last": True, "onednn": 3})) is None
    assert str(Way(1, True, True)) == "one by one, channels last, products by oneDNN"
