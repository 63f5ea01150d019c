import sys

import pytest
import torch
from torch import nn

import models
import zoo
from unde import Index
from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate import baseline_scores, bm25
from unde.evaluate.hidden_states import HiddenStates
from unde.tasks import CausalLM, Classification, MaskedLM, Seq2SeqLM, Task

TEXTS = ["the red fox", "a blue sky", "red sky at night", "nothing in common", "the fox at night"]
HIDDEN = "hidden-state similarity"


def cosines(queries, train):
    a, b = (torch.stack(list(some)).double() for some in (queries, train))
    return nn.functional.normalize(a, dim=1) @ nn.functional.normalize(b, dim=1).T


def tokens(lengths, vocabulary=23):
    return [{"input_ids": torch.randint(1, vocabulary, (n,))} for n in lengths]


def test_language_model_against_one_sequence_at_a_time():
    torch.manual_seed(0)
    model = models.gpt2().eval()
    data = tokens((3, 9, 5, 4, 7))
    scores = baseline_scores(model, CausalLM(), data, data[3:], texts=(TEXTS, TEXTS[3:]))
    assert list(scores) == ["BM25", HIDDEN, "loss"]
    assert torch.equal(scores["BM25"], bm25(TEXTS, TEXTS[3:]))
    with torch.no_grad():
        runs = [
            model(e["input_ids"][None], labels=e["input_ids"][None], output_hidden_states=True) for e in data
        ]
    states = [run.hidden_states[-1][0].mean(0) for run in runs]  # what the head gets
    torch.testing.assert_close(scores[HIDDEN].double(), cosines(states[3:], states), rtol=0, atol=2e-6)
    expected = torch.stack([run.loss for run in runs])
    torch.testing.assert_close(scores["loss"], expected.expand(2, -1), rtol=1e-5, atol=0)


def test_padding_on_the_left_does_not_count():
    torch.manual_seed(0)
    model = models.gpt2().eval()
    data = tokens((3, 9, 5))
    padded = []
    for ids in (e["input_ids"] for e in data):
        ids, mask = (nn.functional.pad(row, (9 - len(ids), 0)) for row in (ids, torch.ones(len(ids))))
        padded.append({"input_ids": ids, "attention_mask": mask})
    plain, left = (baseline_scores(model, CausalLM(), some, some) for some in (data, padded))
    for name in (HIDDEN, "loss"):
        torch.testing.assert_close(plain[name], left[name], rtol=1e-5, atol=2e-6)


def test_head_of_each_kind_of_model():
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    scores = baseline_scores(convolution, Classification(), (x, y), (x[:2], y[:2]))
    states = convolution[:3](x).detach()
    torch.testing.assert_close(scores[HIDDEN].double(), cosines(states[:2], states), rtol=0, atol=2e-6)
    losses = nn.functional.cross_entropy(convolution(x), y, reduction="none").detach()
    torch.testing.assert_close(scores["loss"][1], losses)
    assert not losses.eq(losses[0]).all()

    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), Mean())
    scores = baseline_scores(pooled, Classification(), (x, y), (x[:2], y[:2]))
    states = pooled[:2](x).detach().mean((2, 3))
    torch.testing.assert_close(scores[HIDDEN].double(), cosines(states[:2], states), rtol=0, atol=2e-6)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def test_heads_of_transformers():
    ids = tokens((4, 6))
    cases = {
        "lm_head": (models.gpt2(), CausalLM(), ids),
        "cls.predictions.decoder": (zoo.encoder("Bert", "MaskedLM")(), MaskedLM(mask_token_id=3), ids),
        "classifier": (zoo.bert(), Classification(), zoo.texts(4)),
    }
    for layer, (model, task, data) in cases.items():
        rows = Rows(data, zoo.padded if layer == "classifier" else task.collate)
        assert HiddenStates(model, task, rows).layer == layer


def test_decoder_states_are_averaged_over_the_target():
    torch.manual_seed(0)
    model = zoo.t5()().eval()
    data = [
        {"input_ids": torch.randint(2, 23, (s,)), "labels": torch.randint(2, 23, (t,))}
        for s, t in ((4, 6), (7, 2), (5, 5))
    ]
    found = baseline_scores(model, Seq2SeqLM(), data, data)
    states = []
    for e in data:
        rows = Rows([e], Seq2SeqLM().collate)
        states.append(HiddenStates(model, Seq2SeqLM(), rows).read(rows, range(1)).hidden[0])
    torch.testing.assert_close(found[HIDDEN].double(), cosines(states, states), rtol=0, atol=2e-6)


def test_batches_are_small_where_outputs_are_many(monkeypatch):
    monkeypatch.setattr("unde.evaluate.hidden_states._MAX_OUTPUTS", 3 * 6 * 23)
    model, rows = models.gpt2(), Rows(tokens([6] * 10), CausalLM().collate)
    assert HiddenStates(model, CausalLM(), rows).batch_size == 3
    few = baseline_scores(model, CausalLM(), rows, rows)
    monkeypatch.undo()
    assert HiddenStates(model, CausalLM(), rows).batch_size == 32
    torch.testing.assert_close(few[HIDDEN], baseline_scores(model, CausalLM(), rows, rows)[HIDDEN])


class Twice(Task):
    """Runs the model on two copies of each example."""

    def loss(self, model, batch):
        x, y = batch
        losses = nn.functional.cross_entropy(model(torch.cat([x, -x])), torch.cat([y, y]), reduction="none")
        return losses.view(2, -1).sum(0)


def test_what_cannot_be_computed_is_said_in_a_line(capfd, monkeypatch):
    x, y = torch.randn(5, 2), torch.zeros(5, dtype=torch.long)
    scores = baseline_scores(nn.Linear(2, 2), Twice(), (x, y), (x[:1], y[:1]))
    assert list(scores) == ["loss"] and scores["loss"].shape == (1, 5)
    assert "no hidden-state similarity baseline: the head '' gets shape (8, 2)" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "bm25s", None)
    scores = baseline_scores(nn.Linear(2, 2), Classification(), (x, y), (x[:1], y[:1]), texts=(TEXTS, ["a"]))
    assert list(scores) == [HIDDEN, "loss"]
    assert "no BM25 baseline: BM25 comes from the package bm25s" in capfd.readouterr().err


class Labels(Task):
    """Of examples with a text beside what the model sees."""

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def test_texts_of_fields_and_an_open_index(tmp_path):
    torch.manual_seed(0)
    data = [{"x": torch.randn(3), "y": torch.tensor(i % 2), "text": text} for i, text in enumerate(TEXTS)]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    index = Index.build(model, Labels(), data, tmp_path / "idx", progress=False)
    scores = baseline_scores(index.model, index.task, index.train_data, data[:2])
    assert torch.equal(scores["BM25"], bm25(TEXTS, TEXTS[:2]))
    assert torch.equal(scores[HIDDEN].argmax(1), torch.tensor([0, 1]))
    closed = Index.open(tmp_path / "idx")
    with pytest.raises(UndeError, match=r"Index.open\(..., model=, task=, train_data=\)"):
        baseline_scores(closed.model, closed.task, closed.train_data, data[:2])
    with pytest.raises(UndeError, match="5 and 1 texts for 5 training examples and 2 queries"):
        baseline_scores(model, Labels(), data, data[:2], texts=(TEXTS, ["one"]))


def test_model_and_generators_are_left_alone():
    x, y = torch.randn(5, 2), torch.zeros(5, dtype=torch.long)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 2)).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    baseline_scores(model, Classification(), (x, y), (x[:1], y[:1]))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
