"""Labels drawn from a model's own predictions: right on average, and a matter of the example alone."""

from unittest import mock

import pytest
import torch
from scipy.stats import chisquare, kstest
from test_causal_lm import Lookup, left
from torch import nn

import models
from cases import BY_NAME, Case, ragged
from oracles import assert_features
from unde.errors import UndeError
from unde.gradients import Collector, make_units, plan_coverage
from unde.tasks import CausalLM, Classification, sampling


def fits(drawn, probabilities):
    """The p-value of the draws under these probabilities."""
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    return chisquare(counts, probabilities / probabilities.sum() * len(drawn)).pvalue


def test_numbers_are_uniform_and_belong_to_the_example():
    u = sampling.uniforms(range(2000), 5)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert kstest(u[:, 0], "uniform").pvalue > 0.01  # over the examples
    assert kstest(u.flatten(), "uniform").pvalue > 0.01
    assert u.T.corrcoef().fill_diagonal_(0).abs().max() < 4 / 2000**0.5
    assert torch.equal(sampling.uniforms([7, 1999, 7], 3), u[[7, 1999, 7], :3])


def test_draws_follow_the_softmax():
    torch.manual_seed(0)
    logits = torch.randn(6) * 1.5
    drawn = sampling.draw(logits.expand(20_000, 6), sampling.uniforms(range(20_000), 1)[:, 0])
    assert fits(drawn, logits.double().softmax(0)) > 0.01
    assert fits(drawn, (logits.double() * 1.1).softmax(0)) < 1e-6  # a test that cannot fail is none


def test_classes_that_cannot_be_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert sampling.draw(logits.expand(5, 5), u).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("chunk", [1, 8 * 11 * 3, 2**26])
def test_rows_are_drawn_for_in_chunks(chunk):
    torch.manual_seed(0)
    logits, where = torch.randn(9, 11), torch.tensor([8, 0, 3, 3, 5, 1, 2])
    u = torch.rand(7).double()
    edges = logits.double().softmax(1).cumsum(1)
    with mock.patch.object(sampling, "CHUNK", chunk):
        found = sampling.draw(logits, u, where)
    assert found.tolist() == [int((edges[r] <= x).sum()) for r, x in zip(where, u)]
    assert sampling.draw(logits, u[:0], where[:0]).shape == (0,)


def drawn_labels(values, logits):
    """Which label each loss is that of."""
    losses = -logits.log_softmax(-1)
    gap, label = (losses - values.unsqueeze(-1)).abs().min(-1)
    assert gap.max() < 1e-9
    return label


def test_labels_of_a_classifier():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), torch.randn(1, 3).double()
    batch = x.expand(5000, 3), torch.zeros(5000, dtype=torch.long)
    values = Classification().measure(model, batch, name="sampled", ids=range(5000))
    label = drawn_labels(values, model(x).expand(5000, 4))
    assert fits(label, model(x)[0].detach().softmax(0)) > 0.01
    some = [4999, 17, 3]
    again = Classification().measure(model, (batch[0][:3], batch[1][:3]), name="sampled", ids=some)
    torch.testing.assert_close(again, values[some], rtol=1e-12, atol=0)


def test_labels_of_a_language_model():
    """In a model that looks at one token only, what follows a token follows its row of the table."""
    model, task = Lookup(), CausalLM("sum")
    ids = torch.tensor([[3, 3]]).expand(5000, 2)
    values = task.measure(model, {"input_ids": ids}, name="sampled", ids=range(5000))
    logits = model.table.weight[3]
    assert fits(drawn_labels(values, logits.expand(5000, 7)), logits.detach().softmax(0)) > 0.01


def test_tokens_of_a_sequence_are_drawn_apart():
    """The numbers of one sequence differ: 40 equal predictions do not all give one token."""
    model = Lookup()
    ids = torch.full((1, 41), 3)
    values = CausalLM("sum").measure(model, {"input_ids": ids}, name="sampled", ids=[5])
    u = sampling.uniforms([5], 40)[0]
    drawn = sampling.draw(model.table.weight[3].expand(40, 7), u)
    assert len(set(drawn.tolist())) > 3
    torch.testing.assert_close(values[0], -model.table.weight[3].log_softmax(0)[drawn].sum())


SEQUENCES = [[1, 2, 3, 4, 1], [5, 6], [0, 3, 3]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make", [Lookup, lambda: models.gpt2().double(), lambda: models.llama().double()])
def test_draws_depend_on_the_example_alone(make, reduction):
    torch.manual_seed(0)
    model, task = make().eval(), CausalLM(reduction)

    def sampled(batch, ids):
        with torch.no_grad():
            return task.measure(model, batch, name="sampled", ids=ids)

    def right(rows):
        return task.collate([{"input_ids": r} for r in rows])

    alone = torch.cat([sampled(right([r]), [10 + i]) for i, r in enumerate(SEQUENCES)])
    for found in (
        sampled(right(SEQUENCES), [10, 11, 12]),
        sampled(right(SEQUENCES[::-1]), [12, 11, 10]).flip(0),
        sampled(left(SEQUENCES), [10, 11, 12]),
        sampled(left(SEQUENCES, 9), [10, 11, 12]),
        sampled(right([*SEQUENCES, [1] * 9]), [10, 11, 12, 0])[:3],
    ):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=0)
    other = sampled(right(SEQUENCES), [20, 21, 22])
    assert not torch.isclose(other, alone).any()


def test_labels_say_which_tokens_count_but_not_what_they_are():
    model, task = Lookup(), CausalLM("sum")
    ids = torch.tensor([[1, 2, 3, 4, 5]])

    def sampled(labels):
        return task.measure(
            model, {"input_ids": ids, "labels": torch.tensor([labels])}, name="sampled", ids=[3]
        )

    half = sampled([-100, -100, 3, 4, -100])
    assert half == sampled([1, -100, 6, 0, -100])
    drawn = sampling.draw(model.table.weight[[2, 3]], sampling.uniforms([3], 2)[0])
    logp = model.table.weight.log_softmax(1)
    torch.testing.assert_close(half[0], -logp[2, drawn[0]] - logp[3, drawn[1]])


def test_the_loss_stays_the_default():
    model, rows = Lookup(), CausalLM().collate([{"input_ids": r} for r in SEQUENCES])
    assert torch.equal(CausalLM().measure(model, rows, ids=[1, 2, 3]), CausalLM().loss(model, rows))
    linear, batch = nn.Linear(3, 4), (torch.randn(5, 3), torch.zeros(5, dtype=torch.long))
    assert torch.equal(Classification().measure(linear, batch), Classification().loss(linear, batch))


def test_draws_are_constants_of_the_gradient():
    """The gradient is that of the loss of fixed labels, not of how they were drawn."""
    model, task = Lookup(), CausalLM()
    value = task.measure(model, {"input_ids": torch.tensor([[3, 3]])}, name="sampled", ids=[0])
    (found,) = torch.autograd.grad(value.sum(), model.table.weight)
    label = sampling.draw(model.table.weight[3:4], sampling.uniforms([0], 1)[0])
    expected = torch.zeros(7, 7, dtype=torch.float64)
    expected[3] = model.table.weight[3].detach().softmax(0) - torch.eye(7)[label[0]]
    torch.testing.assert_close(found, expected)


TEXT = Case("gpt2", models.gpt2, ragged, CausalLM)


@pytest.mark.parametrize("case", [TEXT, BY_NAME["vit"], BY_NAME["lstm"]], ids=str)
def test_features_of_sampled_labels(case):
    """Through the collector: equal to single backward passes, though an LSTM goes the way of a loop."""
    model, task, rows = case.make(torch.float64, examples=6)
    names = [n for n, _ in model.named_parameters()]
    units = make_units(model, names, "none", 0)
    coverage = plan_coverage(model, task, rows, units, "sampled")
    with Collector(model, task, units, coverage, "sampled") as collector:
        found, _ = collector(rows.batch([1, 3, 4]), [1, 3, 4])
    truth = {n: [] for n in names}
    for i in (1, 3, 4):
        value = task.measure(model, rows.batch([i]), name="sampled", ids=[i])
        for n, g in zip(names, torch.autograd.grad(value.sum(), list(model.parameters()))):
            truth[n].append(g)
    assert_features(found, {n: torch.stack(g) for n, g in truth.items()}, units, 1e-10)


@pytest.mark.parametrize("task", [CausalLM(), Classification()], ids=lambda t: type(t).__name__)
def test_refused(task):
    model = Lookup() if isinstance(task, CausalLM) else nn.Linear(3, 4)
    ids = torch.tensor([[1, 2]])
    batch = {"input_ids": ids} if isinstance(task, CausalLM) else (torch.ones(1, 3), ids[:, 0])
    for missing in (None, [-1]):
        with pytest.raises(UndeError, match=r"by its number, got ids=.*ids=\[0, 1, 2\]"):
            task.measure(model, batch, name="sampled", ids=missing)
    with pytest.raises(
        UndeError, match=r"'sample': expected one of 'loss', 'sampled'. Did you mean 'sampled'"
    ):
        task.measure(model, batch, name="sample", ids=[0])
