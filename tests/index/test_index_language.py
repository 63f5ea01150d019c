"""An index of texts: the same whatever the batch size, the side of padding, or the shape of the data."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import toy
from oracles import TOLERANCE, assert_features, slow_gradients
from unde import Index, methods
from unde.gradients import make_units
from unde.tasks import CausalLM
from zoo import BY_NAME, left_padded, make


def build(model, data, folder, task=None, **options):
    defaults = {"batch_size": 4, "progress": False, "method": methods.TracIn(projection="none")}
    return Index.build(model, task or CausalLM(), data, folder, **(defaults | options))


def features(index):
    return toy.stored(index).rows(torch.arange(len(index)))[0]


def assert_right(index, model, task, rows, tolerance=TOLERANCE[torch.float32]):
    """Equal to single backward passes over the examples, with no padding at all."""
    units = make_units(model, index.manifest.unit_names, "none", 0)
    assert_features(features(index), slow_gradients(model, task, rows), units, tolerance)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2-tied", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_batch_mates_change_nothing(tmp_path, name, attention, side):
    model, task, rows = make(BY_NAME[name], torch.float32, examples=12)
    model.set_attn_implementation(attention)
    collate = left_padded if side == "left" else None
    assert len({len(row["input_ids"]) for row in rows.data}) > 1
    alone = build(model, rows.data, tmp_path / "1", collate=collate, batch_size=1)
    together = build(model, rows.data, tmp_path / "8", collate=collate, batch_size=8)
    for index in (alone, together):
        assert_right(index, model, task, rows, 2e-5)  # of qwen3's norms over 4 entries float32 keeps less
    losses = [toy.stored(index).values("loss") for index in (together, alone)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_fine_tuning_data_with_masked_prompts(tmp_path, side, reduction):
    """Only the answers count, and only they are divided by."""
    model, _, rows = make(BY_NAME["llama"], torch.float32, examples=10)
    task, data = CausalLM(reduction), []
    for i, row in enumerate(rows.data):
        prompt = 1 + i % (len(row["input_ids"]) - 1)
        data.append(row | {"labels": torch.cat([torch.full((prompt,), -100), row["input_ids"][prompt:]])})

    def left(examples):
        lengths = [len(e["input_ids"]) for e in examples]
        labels = [[-100] * (max(lengths) - n) + e["labels"].tolist() for n, e in zip(lengths, examples)]
        return left_padded(examples) | {"labels": torch.tensor(labels)}

    index = build(model, data, tmp_path / "i", task, collate=left if side == "left" else None, batch_size=8)
    parameters = list(model.parameters())
    for i in (0, 4, 9):
        batch = {k: v.unsqueeze(0) for k, v in data[i].items()}
        answers = int((batch["labels"][:, 1:] != -100).sum())
        loss = model(**batch).loss * (answers if reduction == "sum" else 1)  # theirs is the mean
        truth = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        found = features(index)[i]
        assert (found - truth).norm() <= 1e-5 * truth.norm()
        assert toy.stored(index).values("loss")[i].item() == pytest.approx(loss.item(), rel=1e-5)


class Texts(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def lists(rows):
    return [{k: v.tolist() for k, v in row.items()} for row in rows]


def columns(rows):
    return {k: [row[k].tolist() for row in rows] for k in rows[0]}


def hugging_face(rows, kind=None):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(columns(rows))
    if kind is not None:
        data.set_format(kind)
    return data


SHAPES = {
    "list of dicts of tensors": lambda rows: rows,
    "list of dicts of lists": lists,
    "dict of columns": columns,
    "data set": Texts,
    "datasets": hugging_face,
    "datasets, torch": lambda rows: hugging_face(rows, "torch"),
    "datasets, numpy": lambda rows: hugging_face(rows, "numpy"),
    "loader": lambda rows: DataLoader(Texts(rows), batch_size=5, collate_fn=CausalLM().collate),
    "loader without a collate function": lambda rows: DataLoader(hugging_face(rows), batch_size=5),
    "loader of datasets": lambda rows: DataLoader(
        hugging_face(rows, "torch"), batch_size=5, collate_fn=CausalLM().collate
    ),
    "loader of datasets, padded on the left": lambda rows: DataLoader(
        hugging_face(rows), batch_size=5, collate_fn=left_padded
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_data_of_every_shape(tmp_path, shape):
    model, task, rows = make(BY_NAME["gpt2-tied"], torch.float32, examples=9)
    index = build(model, SHAPES[shape](rows.data), tmp_path / "i")
    assert_right(index, model, task, rows)
    queries = index.features(SHAPES[shape](rows.data[3:6]))
    torch.testing.assert_close(queries.features[0], features(index)[3:6], rtol=1e-4, atol=1e-6)


def test_a_column_of_text_is_left_out(tmp_path):
    """Left over from tokenizing: the model could not take it, and a trainer leaves it out too."""
    datasets = pytest.importorskip("datasets")
    model, _, rows = make(BY_NAME["gpt2-tied"], torch.float32, examples=5)
    data = datasets.Dataset.from_dict({"text": list("abcde"), **columns(rows.data)})
    one, two = build(model, data, tmp_path / "i"), build(model, data.remove_columns("text"), tmp_path / "j")
    assert torch.equal(toy.stored(one).block(0, 0), toy.stored(two).block(0, 0))
