import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import BY_NAME, randomized
from refusals import refused
from unde.errors import UndeError
from unde.gradients.fallback import MeasureModule, by_loop, by_vmap
from unde.tasks import CausalLM


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


def left(rows, length=None, labels=None):
    """The rows padded on the left, with token 5 to be easy to see."""
    length = length or max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([[5] * (length - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows]),
    }
    if labels is not None:
        batch["labels"] = torch.tensor([[-100] * (length - len(r)) + r for r in labels])
    return batch


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_losses_belong_to_the_predicted_tokens(reduction):
    model, task = Lookup(), CausalLM(reduction)
    targets = [[1, 2, None, 4], [5, 6], [0, 3, 3]]  # what counts, but for the first of each
    batch = task.collate(
        [
            {"input_ids": t, "labels": [-100 if y is None else y for y in want]}
            for t, want in zip(TOKENS, targets)
        ]
    )
    found = task.token_losses(model, batch)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    logp = model.table.weight.log_softmax(1)
    for b, (tokens, want) in enumerate(zip(TOKENS, targets)):
        count = 1 if reduction == "sum" else sum(y is not None for y in want[1:])
        for t in range(1, len(tokens)):
            if want[t] is not None:
                expected[b, t] = -logp[tokens[t - 1], want[t]] / count
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert torch.equal(found.sum(1), task.loss(model, batch))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padding_on_the_left_changes_nothing(reduction):
    """The first real token does not count: it would be predicted from padding."""
    model, task = Lookup(), CausalLM(reduction)
    right = task.collate([{"input_ids": torch.tensor(t)} for t in TOKENS])
    for batch in (left(TOKENS), left(TOKENS, 6), left(TOKENS, labels=TOKENS)):
        torch.testing.assert_close(task.loss(model, batch), task.loss(model, right), rtol=1e-12, atol=0)
        there, here = task.token_losses(model, batch), task.token_losses(model, right)
        for row, other, tokens in zip(there, here, TOKENS):  # at the places they have in the batch given
            torch.testing.assert_close(row[-len(tokens) :], other[: len(tokens)], rtol=1e-12, atol=0)
            assert not row[: -len(tokens)].any()


def test_the_model_sees_padding_on_the_right_only():
    seen = {}

    class Watched(Lookup):
        def forward(self, **inputs):
            seen.update(inputs)
            return super().forward(inputs["input_ids"])

    batch = left(TOKENS) | {"segments": torch.arange(12).view(3, 4), "kind": torch.tensor([7, 8, 9])}
    before = {k: v.clone() for k, v in batch.items()}
    CausalLM().loss(Watched(), batch)
    assert seen["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 5, 5], [0, 3, 3, 5]]
    assert seen["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert seen["segments"].tolist() == [[0, 1, 2, 3], [6, 7, 4, 5], [9, 10, 11, 8]]
    assert seen["kind"].tolist() == [7, 8, 9]
    assert CausalLM().mask(batch).tolist() == seen["attention_mask"].bool().tolist()
    assert all(torch.equal(batch[k], before[k]) for k in before)


def test_mask():
    ids = torch.ones(2, 3, dtype=torch.long)
    assert CausalLM().mask({"input_ids": ids}) is None
    assert CausalLM().mask({"input_ids": ids, "attention_mask": torch.ones(2, 1, 3, 3)}) is None
    found = CausalLM().mask({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 1]])})
    assert found.tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_under_vmap(side):
    """What no rule covers is mapped over: nothing in the task may look at a value there."""

    class Mixed(Lookup):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(7, 7).double())

        def forward(self, input_ids, attention_mask=None):
            return (super().forward(input_ids) @ self.mix).cumsum(1)

    model, task = Mixed(), CausalLM()
    batch = left(TOKENS) if side == "left" else task.collate([{"input_ids": t} for t in TOKENS])
    measured = MeasureModule(model, task, "loss")
    mapped = by_vmap(measured, ["mix"], batch, range(3))["mix"]
    torch.testing.assert_close(mapped, by_loop(measured, ["mix"], batch, range(3))["mix"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_models_are_single_precision(dtype):
    """As in transformers: the mean of 100 tokens would lose half its digits."""
    model = randomized(Lookup()).to(dtype)
    ids = torch.randint(7, (2, 100))
    found = CausalLM().loss(model, {"input_ids": ids})
    expected = F.cross_entropy(model(ids)[:, :-1].float().mT, ids[:, 1:], reduction="none").mean(1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


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
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids of shape \(2,\).*expected token numbers, \(B, T\)"),
        ({"input_ids": torch.ones(1, 2)}, r"torch\.float32: expected token numbers"),
        (
            {"input_ids": torch.ones(1, 2).long(), "labels": torch.ones(1, 3).long()},
            r"labels of shape \(1, 3\) for input_ids of shape \(1, 2\)",
        ),
        (
            {"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.ones(1, 3)},
            r"attention_mask of shape \(1, 3\) for input_ids",
        ),
    ],
    ids=["tensor", "other-name", "tuple", "one-row", "float", "labels", "mask"],
)
def test_refused(batch, message):
    refused(message, CausalLM().loss, Lookup(), batch)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: (x,), "the model returned a tuple for tokens"),
        (lambda x: x[:, 0], r"returned \(2, 7\) for tokens of shape \(2, 3\): expected logits"),
        (lambda x: torch.cat([x, x], 1), r"returned \(2, 6, 7\) for tokens of shape \(2, 3\)"),
    ],
    ids=["tuple", "last-token", "prompt-tuning"],
)
def test_models_that_return_something_else(answer, message):
    class Other(Lookup):
        def forward(self, input_ids):
            return answer(super().forward(input_ids))

    refused(message, CausalLM().loss, Other(), {"input_ids": torch.tensor([[1, 2, 3], [3, 4, 5]])})


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"input_ids": [1, 2], "meta": None}], r"column 'meta'.*\(NoneType\)"),
        ([torch.tensor([1, 2])], "example is a dict with 'input_ids'"),
        ([{"tokens": [1, 2]}], "example is a dict with 'input_ids'"),
    ],
    ids=["none", "tensor", "other-name"],
)
def test_examples_that_cannot_be_collated(examples, message):
    refused(f"(?i){message}", CausalLM().collate, examples)


def test_examples_with_other_columns_are_refused():
    with pytest.raises(UndeError, match=r"example 1 .*\['input_ids'\].*\['input_ids', 'labels'\]"):
        CausalLM().collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [2]}])


def test_unknown_reduction():
    refused(r"unknown reduction 'mena'.*Did you mean 'mean'\?", CausalLM, "mena")


def test_columns_of_texts_are_left_out():
    """As Trainer does with what no model reads."""
    examples = [{"input_ids": [1, 2], "text": "a b", "words": ["a", "b"]} for _ in range(2)]
    assert list(CausalLM().collate(examples)) == ["input_ids"]
