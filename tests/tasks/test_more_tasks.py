"""Masked, sequence-to-sequence and token tasks, several labels and real numbers: against transformers' own losses."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import models
from cases import randomized
from refusals import refused
from unde import Index, UndeError
from unde.methods import TracIn
from unde.tasks import (
    CausalLM,
    Classification,
    MaskedLM,
    MultiLabel,
    Regression,
    Seq2SeqLM,
    TokenClassification,
)
from unde.tasks.replace import Replace
from zoo import BY_NAME, encoder, hidden, pairs, t5, tagged, texts

MASK, SPECIAL = 4, (0, 1, 2)


def made(build, seed=0):
    torch.manual_seed(seed)
    return randomized(build()).eval()


def example(length, seed=0):
    ids = torch.randint(5, 23, (length,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": torch.cat([torch.tensor([1]), ids, torch.tensor([2])])}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("build", "data", "task"),
    [
        (encoder("Bert", "MaskedLM"), hidden, MaskedLM),
        (encoder("Roberta", "MaskedLM"), hidden, MaskedLM),
        (encoder("Bert", "TokenClassification"), tagged, TokenClassification),
        (t5(), pairs, Seq2SeqLM),
        (BY_NAME["bart"].model, pairs, Seq2SeqLM),
    ],
    ids=["bert", "roberta", "tokens", "t5", "bart"],
)
def test_equal_to_the_losses_of_transformers(build, data, task, reduction):
    """One example at a time through model(labels=...), against one padded batch of ours."""
    model, examples = made(build), data(6)
    task = task(reduction=reduction)
    with torch.no_grad():
        losses = task.loss(model, task.collate(examples))
        tokens = task.token_losses(model, task.collate(examples))
        for e, ours, each in zip(examples, losses, tokens):
            theirs = model(**{k: v[None] for k, v in e.items()}).loss
            count = (e["labels"] != -100).sum() if reduction == "sum" else 1
            torch.testing.assert_close(ours, theirs * count, rtol=1e-4, atol=1e-5)
            where = torch.nn.functional.pad(e["labels"] != -100, (0, len(each) - len(e["labels"])))
            assert torch.equal(each != 0, where)
    torch.testing.assert_close(tokens.sum(1), losses)


@pytest.mark.parametrize(
    "task", [MaskedLM(), TokenClassification(), Seq2SeqLM()], ids=lambda t: type(t).__name__
)
def test_padding_on_the_left(task):
    """Sources are moved to the right, so that positions are counted from the first token."""
    build, data = {
        "MaskedLM": (encoder("Bert", "MaskedLM"), hidden),
        "TokenClassification": (encoder("Bert", "TokenClassification"), tagged),
        "Seq2SeqLM": (BY_NAME["bart"].model, pairs),
    }[type(task).__name__]
    model, batch = made(build), task.collate(data(5))
    ahead = (batch["attention_mask"] == 0).sum(1)
    rolled = dict(batch)
    for name in ("input_ids", "attention_mask", *(["labels"] if data is not pairs else [])):
        rolled[name] = torch.stack([row.roll(int(n)) for row, n in zip(batch[name], ahead)])
    with torch.no_grad():
        torch.testing.assert_close(task.loss(model, rolled), task.loss(model, batch), rtol=1e-5, atol=1e-6)
        if data is not pairs:  # tokens are where they are in the batch
            expected = task.token_losses(model, batch)
            expected = torch.stack([row.roll(int(n)) for row, n in zip(expected, ahead)])
            torch.testing.assert_close(task.token_losses(model, rolled), expected, rtol=1e-5, atol=1e-6)


def test_what_is_hidden_depends_on_the_text_and_the_seed_alone():
    task = MaskedLM(mask_token_id=MASK, special_tokens=SPECIAL)
    some = [example(n, n) for n in (3, 9, 14)]
    together = task.hide_tokens(task.collate(some), 23)
    for row, e in enumerate(some):
        alone = task.hide_tokens(task.collate([e]), 23)
        n = len(e["input_ids"])
        for name in ("input_ids", "labels"):
            assert torch.equal(together[name][row, :n], alone[name][0])
        assert (together["labels"][row, n:] == -100).all()
    other = MaskedLM(mask_token_id=MASK, special_tokens=SPECIAL, seed=1).hide_tokens(task.collate(some), 23)
    assert not torch.equal(other["labels"], together["labels"])
    assert task.identity()["settings"] != MaskedLM(mask_token_id=MASK, seed=1).identity()["settings"]


def test_how_much_is_hidden_and_how():
    """15 % of the tokens, of which 80 % are the mask and 10 % any token; special tokens and padding never."""
    task = MaskedLM(mask_token_id=MASK, special_tokens=SPECIAL)
    ids = torch.randint(5, 1000, (400, 100), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, 50] = 1, 2
    real = torch.ones_like(ids)
    real[:, 90:] = 0
    found = task.hide_tokens({"input_ids": ids, "attention_mask": real}, 1000)
    asked = found["labels"] != -100
    assert not asked[:, [0, 50]].any() and not asked[:, 90:].any() and asked.any(1).all()
    n = 400 * 88
    assert abs(int(asked.sum()) - 0.15 * n) < 5 * (0.15 * 0.85 * n) ** 0.5
    shown, was = found["input_ids"][asked], ids[asked]
    assert torch.equal(found["labels"][asked], was) and torch.equal(found["input_ids"][~asked], ids[~asked])
    for share, expected in (((shown == MASK), 0.8), ((shown == was), 0.1)):
        assert abs(float(share.float().mean()) - expected) < 5 * (expected * (1 - expected) / len(was)) ** 0.5
    columns = asked[:, [*range(1, 50), *range(51, 90)]].float().mean(0)  # no place is preferred
    assert columns.std() < 1.5 * (0.15 * 0.85 / 400) ** 0.5
    short = task.hide_tokens({"input_ids": torch.tensor([[1, 9, 2]] * 3)}, 23)
    assert (short["labels"] == torch.tensor([[-100, 9, -100]] * 3)).all()  # at least one


def test_tokenizers_say_what_is_special():
    class Tokenizer:
        mask_token_id, all_special_ids = 4, [0, 1, 2, 4]

    task = MaskedLM(Tokenizer())
    assert (task.mask_token_id, task.special_tokens) == (4, [0, 1, 2, 4])
    Tokenizer.mask_token_id = None
    refused(r"has no mask token.*CausalLM", MaskedLM, Tokenizer())


def test_an_index_of_texts_that_are_hidden_here(tmp_path):
    """Queries that are training examples find themselves: they are hidden in the same way."""
    model, task = made(encoder("Bert", "MaskedLM")), MaskedLM(mask_token_id=MASK, special_tokens=SPECIAL)
    data = [example(8 + i % 4, i) for i in range(8)]
    index = Index.build(model, task, data, tmp_path / "i", method=TracIn(projection="none"), progress=False)

    def gradient(e):
        loss = model(**task.hide_tokens(task.collate([e]), 23)).loss
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    expected = torch.stack([gradient(data[6]) @ gradient(e) for e in data])
    torch.testing.assert_close(index.score([data[6]]).total()[0], expected, rtol=1e-3, atol=1e-5)


def test_label_free_of_texts_that_are_hidden_here(tmp_path):
    """Copies bring the labels that their originals get when they are measured."""
    model, task = made(encoder("Bert", "MaskedLM")), MaskedLM(mask_token_id=MASK, special_tokens=SPECIAL)
    data = [example(8 + i % 4, i) for i in range(130)]
    method = TracIn(projection="kron(2)")
    index = Index.build(model, task, data, tmp_path / "i", method=method, progress=False)
    found = index.learn_weights()
    assert len(found.values) == len(index.groups)


def test_copies_of_masked_texts_keep_what_is_hidden():
    task, model = MaskedLM(mask_token_id=MASK, special_tokens=SPECIAL), made(encoder("Bert", "MaskedLM"))
    e = example(16)
    (replace,) = task.perturbations(model, [e, example(12, 1)])
    assert isinstance(replace, Replace)
    was = task.hide_tokens(task.collate([e]), 23)
    copy_ = replace(e, 1.0, np.random.default_rng(0))
    asked = was["labels"][0] != -100
    assert torch.equal(copy_["labels"], was["labels"][0])
    assert torch.equal(copy_["input_ids"][asked], was["input_ids"][0][asked])
    assert copy_["input_ids"][0] == 1 and copy_["input_ids"][-1] == 2
    assert (copy_["input_ids"][1:-1][~asked[1:-1]] != e["input_ids"][1:-1][~asked[1:-1]]).any()


def test_copies_of_pairs_change_on_both_sides():
    e = {"input_ids": [9, 8, 7, 1], "labels": [5, 6, -100, 1], "decoder_input_ids": [0, 5, 6, 0]}
    made_ = Replace(np.array([11]), frozenset({0, 1}), "target", targets=np.array([12]))(
        e, 1.0, np.random.default_rng(0)
    )
    assert made_ == {
        "input_ids": [11, 11, 11, 1],
        "labels": [12, 12, -100, 1],
        "decoder_input_ids": [0, 12, 12, 0],
    }


def test_copies_of_tagged_texts_keep_their_classes():
    """A class whose number is that of a token is no token."""
    e = {"input_ids": [2, 9, 8], "labels": [2, -100, 1]}
    made_ = Replace(np.array([11]), labels="classes")(e, 1.0, np.random.default_rng(0))
    assert made_ == {"input_ids": [11, 9, 11], "labels": [2, -100, 1]}


def classifier(problem, **options):
    return encoder("Bert", "SequenceClassification", problem_type=problem, **options)


@pytest.mark.parametrize(
    ("problem", "task", "label"),
    [
        ("single_label_classification", Classification(), lambda i: i % 3),
        ("multi_label_classification", MultiLabel(), lambda i: [float(i % 2), 1.0, float(i % 3 == 0)]),
        ("regression", Regression(), lambda i: [0.1 * i, -1.0, 2.0]),
    ],
)
def test_one_prediction_for_a_text(problem, task, label):
    """Lists of numbers as tokenizers give them, of different lengths."""
    model = made(classifier(problem))
    data = [{**{k: v.tolist() for k, v in e.items()}, "labels": label(i)} for i, e in enumerate(texts(5))]
    with torch.no_grad():
        losses = task.loss(model, task.collate(data))
        for e, ours in zip(data, losses):
            theirs = model(**{k: torch.tensor([v]) for k, v in e.items()}).loss
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_models_that_look_for_the_last_token():
    """Padding is what the config says, whatever the collator put there."""
    from transformers import GPT2ForSequenceClassification

    config = models.gpt2().config
    config.num_labels, config.pad_token_id = 3, 22
    model, task = made(lambda: GPT2ForSequenceClassification(config)), Classification()
    data = [{**e, "input_ids": e["input_ids"].clamp(max=21)} for e in texts(5)]
    batch = task.collate(data)
    with torch.no_grad():
        alone = torch.cat([task.loss(model, task.collate([e])) for e in data])
        torch.testing.assert_close(task.loss(model, batch), alone, rtol=1e-4, atol=1e-5)
    model.config.pad_token_id = None
    refused(r"names no padding token.*set model.config.pad_token_id", task.loss, model, batch)


@pytest.mark.parametrize("task", [MultiLabel(), Regression()], ids=["several", "real"])
def test_labels_drawn_from_predictions(task):
    """On average over draws, gradients of log p vanish: the labels are drawn from what the model predicts."""
    model = nn.Linear(3, 2)
    x, n = torch.randn(1, 3, generator=torch.Generator().manual_seed(1)), 4000
    batch = (x.expand(n, 3), torch.zeros(n, 2))
    loss = task.measure(model, batch, name="sampled", ids=range(n))
    g = torch.autograd.grad(loss.mean(), model.bias)[0]
    assert g.abs().max() < 5 * 0.75 / n**0.5
    again = task.measure(model, (x, torch.zeros(1, 2)), name="sampled", ids=[17])
    torch.testing.assert_close(again[0], loss[17])


MISFITS = {
    "bert as causal": (
        encoder("Bert", "MaskedLM"),
        CausalLM,
        texts,
        "sees the tokens that it is to predict.*MaskedLM",
    ),
    "gpt2 as masked": (models.gpt2, MaskedLM, hidden, "does not see the tokens after.*unde.tasks.CausalLM"),
    "llama as masked": (models.llama, MaskedLM, hidden, "does not see the tokens after.*unde.tasks.CausalLM"),
    "bart as causal": (BY_NAME["bart"].model, CausalLM, texts, "has an encoder and a decoder.*Seq2SeqLM"),
    "t5 as masked": (t5(), MaskedLM, hidden, "has an encoder and a decoder.*Seq2SeqLM"),
    "gpt2 as seq2seq": (models.gpt2, Seq2SeqLM, pairs, "takes no decoder_input_ids.*CausalLM"),
    "tagger as masked": (
        encoder("Bert", "TokenClassification"),
        MaskedLM,
        tagged,
        "no language model.*TokenClass",
    ),
    "gpt2 as tagger": (models.gpt2, TokenClassification, tagged, "it is a language model"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_models_that_do_not_fit_are_refused_before_a_build(tmp_path, name):
    build, task, data, message = MISFITS[name]
    examples = data(5) if data is not texts else [{"input_ids": e["input_ids"]} for e in texts(5)]
    with pytest.raises(UndeError, match=message):
        Index.build(made(build), task(), examples, tmp_path / "i", method="tracin", progress=False)
    assert not (tmp_path / "i" / "manifest.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_fit(dtype):
    for build, task, data in (
        (encoder("Bert", "MaskedLM"), MaskedLM(), hidden),
        (encoder("Roberta", "MaskedLM"), MaskedLM(), hidden),
        (models.gpt2, CausalLM(), hidden),
        (BY_NAME["mixtral"].model, CausalLM(), hidden),
    ):
        if dtype == torch.bfloat16 and build is BY_NAME["mixtral"].model:
            continue  # torch multiplies in groups only where rows are 16 bytes long
        with torch.no_grad():
            task.check(made(build).to(dtype), task.collate(data(3)))


BAD = {
    "nothing hidden": (
        MaskedLM(),
        [{"input_ids": [5, 6], "labels": [-100, -100]}],
        "example 0 .*no label says what",
    ),
    "all special": (
        MaskedLM(mask_token_id=4, special_tokens=[1, 2]),
        [{"input_ids": [1, 2]}],
        "example 0 .*special",
    ),
    "no mask token": (MaskedLM(), [{"input_ids": [5, 6]}], r"no mask token.*MaskedLM\(tokenizer\)"),
    "foreign mask": (
        MaskedLM(mask_token_id=99),
        [{"input_ids": [5, 6]}],
        "mask token is 99, but the model knows 23",
    ),
    "shape": (
        MaskedLM(),
        {"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 2).long()},
        "labels of shape",
    ),
    "type": (MaskedLM(), [{"input_ids": [5, 6], "labels": [0.5, 1.0]}], "labels of type torch.float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masked_texts(name):
    task, data, message = BAD[name]
    batch = data if isinstance(data, dict) else task.collate(data)
    refused(message, task.loss, made(encoder("Bert", "MaskedLM")), batch)


def test_bad_labels_of_texts():
    def ids(*shape):
        return {"input_ids": torch.ones(*shape).long()}

    tagged_loss = partial(TokenClassification().loss, made(encoder("Bert", "TokenClassification")))
    refused("needs 'labels': this one has", tagged_loss, ids(1, 3))
    labels = torch.tensor([[0, 1], [2, 3]])
    refused("example 1 .*label 3, but the model knows 3 classes", tagged_loss, ids(2, 2) | {"labels": labels})
    target_loss = partial(Seq2SeqLM().loss, made(t5()))
    refused("needs 'labels', tokens of the target", target_loss, ids(1, 3))
    labels = torch.tensor([[5, 6], [-100, -100]])
    refused("example 1 .*every label is -100", target_loss, ids(2, 3) | {"labels": labels})
    refused("labels of shape", target_loss, ids(2, 3) | {"labels": torch.ones(2).long()})


@pytest.mark.parametrize(
    ("task", "labels", "message"),
    [
        (Classification, torch.tensor([0, -1]), "example 1 .*label -1: expected a class number"),
        (Classification, torch.tensor([2, 0]), "example 0 .*label 2"),
        (MultiLabel, torch.tensor([0, 1]), "For one class of each example use unde.tasks.Classif"),
        (MultiLabel, torch.tensor([[0, 1], [3, 0]]), "example 1 .*numbers from 0 to 1"),
        (Regression, torch.zeros(2), "expected as many numbers"),
        (Regression, torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), "example 1 .*finite"),
        (Regression, ["a", "b"], "labels such as 'a'"),
    ],
)
def test_bad_labels_of_vectors(task, labels, message):
    refused(message, task().loss, nn.Linear(3, 2), (torch.randn(2, 3), labels))


def test_bad_labels_are_named_by_id():
    batch, says = (
        (torch.randn(2, 3), torch.tensor([0, -1])),
        r"example 31 \(row 1 of its batch\) has the label -1",
    )
    refused(says, Classification().measure, nn.Linear(3, 2), batch, ids=[30, 31])


def test_batches_of_collators_of_transformers():
    """Dicts of their own type go through, and stay as they are."""
    from transformers import BatchEncoding

    model, task = made(encoder("Bert", "MaskedLM")), MaskedLM()
    batch = task.collate(hidden(4))
    theirs = BatchEncoding(copy.deepcopy(batch))
    with torch.no_grad():
        assert torch.equal(task.loss(model, theirs), task.loss(model, batch))
    assert torch.equal(theirs["labels"], batch["labels"])
