import pytest
import torch
from torch import nn

from cases import BY_NAME
from whence.errors import WhenceError
from whence.tasks import CausalLM


class Lookup(nn.Module):
    """Logits for the next token that depend on the present one only: losses can be written down."""

    def __init__(self, vocabulary=7):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, vocabulary).double()

    def forward(self, input_ids, attention_mask=None):
        return self.table(input_ids)


def by_hand(model, tokens, targets):
    """The −log p of each target (None: none) given the token before it."""
    logp = model.table.weight.log_softmax(1)
    return [-logp[a, b] for a, b in zip(tokens, targets[1:]) if b is not None]


TOKENS = [[1, 2, 3, 4], [5, 6], [0, 3, 3]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padded_batches(reduction):
    model, task = Lookup(), CausalLM(reduction)
    batch = task.collate([{"input_ids": torch.tensor(t)} for t in TOKENS])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [0, 3, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    found = task.loss(model, batch)
    for value, tokens in zip(found, TOKENS):
        losses = torch.stack(by_hand(model, tokens, tokens))
        torch.testing.assert_close(value, losses.mean() if reduction == "mean" else losses.sum())


def test_without_padding_there_is_no_mask():
    batch = CausalLM().collate([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
    assert list(batch) == ["input_ids"]
    model = Lookup()
    found = CausalLM().loss(model, batch)
    torch.testing.assert_close(
        found, torch.stack([*by_hand(model, [1, 2], [1, 2]), *by_hand(model, [3, 4], [3, 4])])
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_say_what_counts(reduction):
    model, task = Lookup(), CausalLM(reduction)
    batch = task.collate(
        [
            {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
            {"input_ids": [5, 6, 1], "labels": [5, 6, -100]},
        ]
    )
    assert batch["labels"].tolist() == [[-100, -100, 3, 4], [5, 6, -100, -100]]
    found = task.loss(model, batch)
    first = torch.stack(by_hand(model, [1, 2, 3, 4], [None, None, 3, 4]))
    torch.testing.assert_close(found[0], first.mean() if reduction == "mean" else first.sum())
    torch.testing.assert_close(found[1], by_hand(model, [5, 6, 1], [5, 6, None])[0])


def test_the_first_label_never_counts():
    """Nothing comes before it."""
    model = Lookup()
    ids = torch.tensor([[1, 2, 3]])
    found = [
        CausalLM().loss(model, {"input_ids": ids, "labels": torch.tensor([[a, 2, 3]])}) for a in (1, 5, -100)
    ]
    assert found[0] == found[1] == found[2]


def test_a_mask_of_the_data_is_kept():
    """Tokens that the mask hides are no targets, unless labels say so."""
    model, task = Lookup(), CausalLM("sum")
    examples = [
        {"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 0, 1]},
        {"input_ids": [1, 2], "attention_mask": [1, 1]},
    ]
    batch = task.collate(examples)
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 1], [1, 1, 0, 0]]
    losses = by_hand(model, [1, 2, 3, 4], [1, 2, None, 4])
    torch.testing.assert_close(task.loss(model, batch)[0], torch.stack(losses).sum())


def test_other_columns_are_stacked_or_padded():
    batch = CausalLM().collate(
        [
            {"input_ids": [1, 2, 3], "kind": 4, "segments": [1, 1, 1]},
            {"input_ids": [1], "kind": 5, "segments": [2]},
        ]
    )
    assert batch["kind"].tolist() == [4, 5]
    assert batch["segments"].tolist() == [[1, 1, 1], [2, 0, 0]]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_equal_to_the_loss_of_hugging_face(name):
    """Single sequences one by one, against all of them padded; with and without labels.

    Hugging Face's loss is taken in float32 whatever the model is in, hence 1e-6.
    """
    model, task, rows = BY_NAME[name].make(torch.float64, examples=6)
    with torch.no_grad():
        ours = task.loss(model, rows.batch(range(6)))
        theirs = []
        for i in range(6):
            ids = rows[i]["input_ids"].unsqueeze(0)
            theirs.append(model(input_ids=ids, labels=ids).loss)
        torch.testing.assert_close(ours, torch.stack(theirs).to(ours), rtol=1e-6, atol=0)
        ids = rows[1]["input_ids"].unsqueeze(0)
        labels = ids.clone()
        labels[:, :3] = -100
        half = task.loss(model, {"input_ids": ids, "labels": labels})
        torch.testing.assert_close(
            half[0], model(input_ids=ids, labels=labels).loss.to(half), rtol=1e-6, atol=0
        )


def test_the_model_gets_no_labels():
    class Strict(Lookup):
        def forward(self, input_ids):
            return super().forward(input_ids)

    ids = torch.tensor([[1, 2, 3]])
    assert CausalLM().loss(Strict(), {"input_ids": ids, "labels": ids}).shape == (1,)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.tensor([[1, 2]]), "is a dict with 'input_ids'"),
        ({"ids": torch.tensor([[1, 2]])}, "is a dict with 'input_ids'"),
        ((torch.tensor([[1, 2]]), torch.tensor([[1, 2]])), "is a dict with 'input_ids'"),
    ],
    ids=["tensor", "other-name", "tuple"],
)
def test_refused(batch, message):
    with pytest.raises(WhenceError, match=message):
        CausalLM().loss(Lookup(), batch)


def test_examples_with_other_columns_are_refused():
    with pytest.raises(WhenceError, match=r"example 1 .*\['input_ids'\].*\['input_ids', 'labels'\]"):
        CausalLM().collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [2]}])


def test_unknown_reduction():
    with pytest.raises(WhenceError, match=r"unknown reduction 'mena'.*Did you mean 'mean'\?"):
        CausalLM("mena")
