"""Several documents in one row: a row is one example, with the loss that transformers trains on."""

import pytest
import torch

from cases import BY_NAME, Case
from oracles import assert_features, collect, plan, slow_gradients
from unde.data import Rows
from unde.tasks import CausalLM

LENGTHS = [[3, 2, 4], [5, 4], [9], [2, 3], [4, 4, 4]]


def packed(n, starts_count=True, same_length=False):
    """Rows of documents, told apart by position_ids that restart at 0."""
    rows = []
    for i in range(n):
        lengths = [3, 4, 2][i % 3 :] + [3, 4, 2][: i % 3] if same_length else LENGTHS[i % len(LENGTHS)]
        positions = torch.cat([torch.arange(k) for k in lengths])
        row = {"input_ids": torch.randint(1, 23, (len(positions),)), "position_ids": positions}
        if not starts_count:
            row["labels"] = row["input_ids"].masked_fill(positions == 0, -100)
        rows.append(row)
    return rows


def apart(row):
    """(1, T, T) additive mask: causal, and no token sees another document."""
    document = (row["position_ids"] == 0).cumsum(0)
    seen = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)[
        None
    ]


@pytest.fixture(params=["gpt2-sdpa", "gpt2-eager", "llama-sdpa", "llama-eager"])
def model(request):
    name, attention = request.param.split("-")
    model, _, _ = BY_NAME[name].make(torch.float64)
    model.set_attn_implementation(attention)
    return model


def theirs(model, row):
    """As in training: without a cache, which would make transformers overlook the documents."""
    batch = {k: v.unsqueeze(0) for k, v in row.items()}
    labels = batch.pop("labels", batch["input_ids"])
    return model(**batch, labels=labels, use_cache=False).loss.double()


@pytest.mark.parametrize("starts_count", [True, False])
def test_equal_to_the_loss_of_hugging_face(model, starts_count):
    """Row by row and as one padded batch. Theirs is taken in float32, hence 1e-6."""
    rows, task = packed(5, starts_count), CausalLM()
    with torch.no_grad():
        expected = torch.stack([theirs(model, row) for row in rows])
        alone = torch.cat([task.loss(model, task.collate([row])) for row in rows])
        together = task.loss(model, task.collate(rows))
    torch.testing.assert_close(alone, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


def test_equal_with_a_mask_for_each_row(model):
    """A 4-d mask says the same as position_ids alone."""
    rows, task = packed(3, starts_count=False, same_length=True), CausalLM()
    masked = [row | {"attention_mask": apart(row)} for row in rows]
    with torch.no_grad():
        found = task.loss(model, task.collate(masked))
        torch.testing.assert_close(found, task.loss(model, task.collate(rows)), rtol=1e-12, atol=0)
        torch.testing.assert_close(
            found, torch.stack([theirs(model, row) for row in masked]), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("mask", [False, True])
def test_which_documents_see_each_other(model, mask):
    """None without a mask; all with one that hides padding only, as transformers has it."""
    (row,), task = packed(1, starts_count=False), CausalLM("sum")
    other = row | {"input_ids": row["input_ids"].clone()}
    other["input_ids"][:3] = row["input_ids"][:3] % 22 + 1  # another one in each place
    extra = {"attention_mask": torch.ones(9, dtype=torch.long)} if mask else {}
    with torch.no_grad():
        a, b = (task.token_losses(model, task.collate([r | extra]))[0] for r in (row, other))
    assert not torch.isclose(a[1:3], b[1:3]).any()
    assert a[3] == b[3] == a[5] == b[5] == 0  # the starts of the others: their labels are -100
    same = torch.isclose(a[[4, 6, 7, 8]], b[[4, 6, 7, 8]], rtol=1e-12, atol=0)
    assert not same.any() if mask else same.all()


def test_rows_of_one_document_are_unpacked_rows(model):
    task = CausalLM()
    ids = torch.randint(1, 23, (7,))
    with torch.no_grad():
        plain = task.loss(model, task.collate([{"input_ids": ids}]))
        packed_one = task.loss(model, task.collate([{"input_ids": ids, "position_ids": torch.arange(7)}]))
    torch.testing.assert_close(plain, packed_one, rtol=1e-12, atol=0)


def test_collate_marks_padding_by_labels():
    batch = CausalLM().collate(
        [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, {"input_ids": [4, 5], "position_ids": [0, 1]}]
    )
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert batch["labels"].tolist() == [[1, 2, 3], [4, 5, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_features(name):
    """Equal to a loop of backward passes over single rows, whatever else is in the batch."""
    case = Case(name, BY_NAME[name].model, packed, CausalLM)
    model, task, rows = case.make(torch.float64, examples=7)
    units, coverage = plan(model, task, rows)
    assert not coverage.vmapped and not coverage.looped
    truth = slow_gradients(model, task, Rows(rows.data, task.collate))
    for batch_size in (1, 5):
        assert_features(collect(model, task, rows, units, coverage, batch_size), truth, units, 1e-10)
