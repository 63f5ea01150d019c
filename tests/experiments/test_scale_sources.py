"""Data from folders of every layout, and what is said where it is missing."""

import numpy as np
import pytest
import scale_toy
from experiments.scale.sources import enough, of_classes, pictures, texts

from refusals import refused
from unde import UndeError

LAYOUT = "such and such a layout"


def as_dataset(folder):
    """The images of a folder as a data set with named classes."""
    import datasets

    found = pictures(str(folder), "train", LAYOUT)
    rows = {"img": [], "label": found.labels.tolist()}
    for name in found.names:
        rows["img"].append({"bytes": (folder / name).read_bytes(), "path": None})
    kinds = {"img": datasets.Image(), "label": datasets.ClassLabel(names=found.classes)}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def test_images_are_the_same_from_every_layout(tmp_path):
    import datasets

    plain = scale_toy.images(tmp_path / "plain", ["cat", "dog"], 3)
    scale_toy.images(tmp_path / "splits" / "train", ["cat", "dog"], 3)
    rows = as_dataset(plain)
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "disk"))
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    rows.to_parquet(str(tmp_path / "parquet" / "data" / "train-00000-of-00001.parquet"))
    first = pictures(str(plain), "train", LAYOUT)
    for name in ("splits", "disk", "parquet"):
        found = pictures(str(tmp_path / name), "train", LAYOUT)
        assert found.classes == ["cat", "dog"] and found.labels.tolist() == first.labels.tolist()
        for i in range(6):
            np.testing.assert_array_equal(found.pixels(i, 12), first.pixels(i, 12))


def test_a_data_set_is_loaded_by_name_only_if_one_is_named(tmp_path, monkeypatch):
    asked = []
    rows = as_dataset(scale_toy.images(tmp_path / "plain", ["cat", "dog"], 2))
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    with pytest.raises(UndeError, match=r"nothing to read: give --data FOLDER \(or hf:NAME\) with such"):
        pictures("", "train", LAYOUT)
    assert not asked
    assert len(pictures("hf:some/where:small", "train", LAYOUT)) == 4
    assert asked == [(("some/where", "small"), {"split": "train"})]


def test_classes_are_balanced_and_numbered_as_asked(tmp_path, capsys):
    folder = scale_toy.images(tmp_path / "x", ["Dog", "big_cat", "cow"], 4)
    found = pictures(str(folder), "train", LAYOUT)
    taken = of_classes(found, ["big cat", "dog"], 6, LAYOUT)
    assert taken.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert [name.split("/")[0] for name in taken.names] == ["big_cat"] * 3 + ["Dog"] * 3
    assert len(of_classes(found, ["dog"], 10, LAYOUT)) == 4
    assert "4 images of class 'dog', the setting has 10" in capsys.readouterr().err


def test_texts_of_a_split(tmp_path):
    folder = scale_toy.tables(tmp_path / "t", {"train": ["a", "", "b"], "valid": ["c"], "test_x": ["d"]})
    assert [t for some in texts(str(folder), "train", LAYOUT, batch=2) for t in some] == ["a", "", "b"]
    assert list(texts(str(folder), "validation", LAYOUT)) == [["c"]]
    assert list(texts(str(folder), "test", LAYOUT)) == [["d"]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "cannot read the train split.*expected such"),
        ({"notes.xyz": "x"}, "cannot read the train split.*expected such"),
        ({"train.jsonl": '{"words": "x"}\n'}, "has no column 'text', only words: expected such"),
        ({"train.parquet": "not parquet"}, "cannot read the train split.*expected such"),
    ],
)
def test_what_is_wrong_with_a_folder_of_texts(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "data").mkdir(exist_ok=True)
    folder = tmp_path if files else tmp_path / "data"
    if files:
        (tmp_path / "data").rmdir()
    refused(message, list, texts(str(folder), "train", LAYOUT))


def test_what_is_wrong_with_a_folder_of_images(tmp_path):
    refused(r"no folder .*nowhere: expected such", pictures, str(tmp_path / "nowhere"), "train", LAYOUT)
    scale_toy.images(tmp_path / "x", ["cat", "dog"], 2)
    (tmp_path / "x" / "cat" / "0.png").write_text("no image")
    refused("cannot read an image", pictures(str(tmp_path / "x"), "train", LAYOUT).pixels, 0, 4)
    (tmp_path / "x" / "metadata.jsonl").write_text('{"file_name": "cat/0.png"}\n')
    with pytest.raises(UndeError, match=r"has no column 'text', only image: expected such"):
        pictures(str(tmp_path / "x"), "train", LAYOUT)


def test_nothing_is_never_enough():
    refused("no images: the setting has 3", enough, 0, 3, "images")
