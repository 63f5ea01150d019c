"""Sequences without a loss, or that the model cannot read, are refused by name before the model runs."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import models
from refusals import refused
from unde import Index, UndeError
from unde.tasks import CausalLM

GOOD = {"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 1, 1], "labels": [1, 2, 3, 4]}
CONTEXT, VOCABULARY = 16, 23  # of the small models


def bad(**columns):
    return {k: columns.get(k, v) for k, v in GOOD.items()}


def of_length(n, **columns):
    return bad(input_ids=[1] * n, attention_mask=[1] * n, labels=[1] * n) | columns


CASES = {
    "too-long": (
        of_length(CONTEXT + 1),
        r"is 17 tokens long, but the model reads 16 at most .*max_position_embeddings.*truncate",
    ),
    "padded-too-long": (
        of_length(CONTEXT + 2, attention_mask=[1] * 5 + [0] * 13),
        "is padded to 18 tokens, but the model reads 16 at most",
    ),
    "token": (bad(input_ids=[1, 2, 23, 4]), "holds token 23, but the model knows 23: the tokenizer does not"),
    "padding-token": (
        bad(input_ids=[1, 2, 3, 50], attention_mask=[1, 1, 1, 0], labels=[1, 2, 3, -100]),
        "holds token 50, .*model.resize_token_embeddings",
    ),
    "negative-token": (bad(input_ids=[1, -100, 3, 4]), "holds token -100"),
    "label": (bad(labels=[1, 2, 30, 4]), "holds token 30"),
    "negative-label": (bad(labels=[1, 2, -1, 4]), "holds token -1,"),
    "empty": (bad(input_ids=[], attention_mask=[], labels=[]), r"has no token.*[Ll]eave it out"),
    "masked": (bad(attention_mask=[0, 0, 0, 0]), "has no token: its attention mask is 0 everywhere"),
    "no-label": (bad(labels=[-100] * 4), "has no target, so no loss: every label is -100.*Leave it out"),
    "first-label-only": (bad(labels=[1, -100, -100, -100]), "has no target"),
    "one-token": (of_length(1), "has no target.* single token"),
}


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    torch.manual_seed(0)
    return getattr(models, request.param)()


@pytest.mark.parametrize("name", CASES)
def test_refused_by_place_and_by_id(model, name):
    example, message = CASES[name]
    task, runs = CausalLM(), []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    batch = task.collate([GOOD, GOOD, example])
    if name == "padded-too-long":  # then all of them are, and the first is named
        batch = task.collate([example])
    row = len(batch["input_ids"]) - 1
    ids = [40, 50, 60][: row + 1]
    for run in (task.loss, task.token_losses):
        refused(f"example {row} of the batch {message}", run, model, batch)
    for measure in ("loss", "sampled"):
        with pytest.raises(UndeError, match=rf"example {ids[row]} \(row {row} of its batch\) {message}"):
            task.measure(model, batch, name=measure, ids=ids)
    assert not runs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", [0, 3], ids=["tried-first", "later"])
def test_refused_by_a_build(tmp_path, name, place):
    """Whether or not the example is one of those tried at the start."""
    torch.manual_seed(0)
    data = [GOOD | {"input_ids": [1, 2, 3, i]} for i in range(9)]
    example, message = CASES[name]
    data[place] = example
    with pytest.raises(UndeError, match=rf"^example {place} {message}"):
        Index.build(
            models.gpt2(), CausalLM(), data, tmp_path / "i", method="tracin", batch_size=4, progress=False
        )


def test_a_whole_batch_without_a_token():
    batch = {"input_ids": torch.zeros(2, 0, dtype=torch.long)}
    refused("example 0 of the batch has no token", CausalLM().loss, models.gpt2(), batch)


def test_the_longest_sequences_that_fit(model):
    with torch.no_grad():
        for batch in (
            {"input_ids": torch.full((2, CONTEXT), VOCABULARY - 1)},
            {"input_ids": torch.ones(1, CONTEXT + 4).long(), "position_ids": torch.arange(10).repeat(1, 2)},
        ):
            assert CausalLM().loss(model, batch).isfinite().all()


def test_packed_rows_are_as_long_as_their_longest_document(model):
    batch = {"input_ids": torch.ones(1, 20).long(), "position_ids": torch.arange(20).unsqueeze(0)}
    with pytest.raises(
        UndeError, match=r"example 0 of the batch holds position 19, counted from 0, but .* 16 at"
    ):
        CausalLM().loss(model, batch)


def test_models_that_name_no_limits_are_left_alone():
    model = torch.nn.Embedding(50, 50)
    model.forward = lambda input_ids, f=model.forward: f(input_ids)
    assert CausalLM().loss(model, {"input_ids": torch.full((1, 400), 49)}).shape == (1,)


class Questions(TorchFunctionMode):
    """Notes what makes a GPU wait."""

    WAITS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.WAITS:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_is_asked_one_question(padded):
    task = CausalLM()
    table = torch.nn.Embedding(30, 30)
    table.forward = lambda input_ids, attention_mask=None, f=table.forward: f(input_ids)
    table.config = models.gpt2().config
    batch = task.collate([GOOD, of_length(6) if padded else GOOD])
    if padded:
        batch = {k: v.flip(1) for k, v in batch.items()}
    with Questions() as questions:
        task.loss(table, batch)
    assert questions.asked == ["tolist"]
