"""Examples that cannot be indexed are named, whatever it is about them."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import toy
from unde import UndeError
from unde.data import Rows
from unde.tasks import Classification

X, Y = toy.data(22)


def labels(at, value):
    changed = Y.clone()
    changed[at] = value
    return X, changed


class Picky(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, i):
        if i == 13:
            raise FileNotFoundError(2, "No such file or directory", "13.png")
        return X[i], Y[i]


def ragged(i):
    return {"x": X[i][: 1 + i % 5], "labels": Y[i]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (labels(13, 7), "example 13 has the label 7: expected a class number, 0 to 2"),
        (labels(21, -5), "example 21 has the label -5: expected a class number"),
        (labels(0, 3), "example 0 has the label 3"),
        ((X[:, :3], Y), r"the model cannot run on example 0 \(RuntimeError: mat1 and mat2"),
        ([(x, "cat") for x in X], r"labels such as 'cat': expected class numbers, from 0 to 2"),
        ((X, ["cat"] * 22), "labels such as 'cat': expected class numbers"),
        ([ragged(i) for i in range(22)], "cannot be put into a batch .*equal size.*pass collate="),
        ([None] * 22, "examples 0 to 21 cannot be put into a batch .*NoneType.*pass collate="),
        (Picky(), r"example 13 cannot be read from the data \(FileNotFoundError: .*13\.png"),
    ],
    ids=["label 7", "label -5", "first", "width", "text", "texts", "ragged", "none", "unreadable"],
)
def test_the_example_is_named(tmp_path, given, says):
    with pytest.raises(UndeError, match=says):
        toy.build(tmp_path / "i", train_data=given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train_data": labels(13, 7), "ids": [f"row {i}" for i in range(22)]}, "'row 13' has the label 7"),
        ({"num_workers": -1}, "num_workers is -1: expected 0"),
        ({"ids": ["a\ud800", *map(str, range(21))]}, r"the id 'a\\ud800' holds half of a character"),
    ],
    ids=["by its name", "workers", "halves of characters"],
)
def test_options_that_are_refused(tmp_path, options, says):
    with pytest.raises(UndeError, match=says):
        toy.build(tmp_path / "i", **options)


def test_workers_tell_the_same_without_their_traceback(tmp_path):
    with pytest.raises(UndeError) as e:
        list(Rows(Picky()).batches([range(8), range(8, 16)], workers=1))
    assert str(e.value).startswith("example 13 cannot be read from the data (FileNotFoundError")
    assert "\n" not in str(e.value)


def test_the_model_is_as_it_was_and_the_build_goes_on(tmp_path):
    model = toy.net()
    with pytest.raises(UndeError, match="example 13"):
        toy.build(tmp_path / "i", model=model, train_data=labels(13, 7))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    toy.build(tmp_path / "j", model=model)


def test_errors_that_no_example_is_to_blame_for_stay_what_they_are(tmp_path):
    class Tired(Classification):
        runs = 0

        def loss(self, model, batch):
            Tired.runs += 1
            if len(batch[1]) > 2:
                raise RuntimeError("only in company")
            return super().loss(model, batch)

    model = toy.net().train()
    with pytest.raises(RuntimeError, match="only in company"):
        toy.build(tmp_path / "i", model=model, task=Tired())
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_names_and_texts_of_any_characters(tmp_path):
    toy.build(tmp_path / "j", ids=["日本", "é", *map(str, range(20))])
    assert len({*Rows([{"t": "a\ud800"}, {"t": "a\udc00"}, {"t": "a"}]).digests()}) == 3


def test_a_plain_module_still_trains_on_what_it_could(tmp_path):
    """-100 is a label that cross-entropy leaves out."""
    index = toy.build(tmp_path / "i", model=toy.net(), train_data=labels(5, -100))
    assert not toy.stored(index).block(0, 0)[5].any()
    assert isinstance(index.model, nn.Module) and torch.isfinite(toy.stored(index).block(0, 0)).all()
