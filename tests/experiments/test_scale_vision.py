"""ImageNet-50k end to end, on a few images of three classes."""

from dataclasses import replace

import numpy as np
import pytest
import scale_toy
import torch
from experiments.scale.settings import RESNET18, VIT_B16, Recipe
from experiments.scale.vision import ImageNet

from refusals import refused
from unde import UndeError

TINY = replace(
    RESNET18,
    config={"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic", "num_labels": 3},
    recipe=replace(RESNET18.recipe, epochs=1, batch_size=8, lr=0.02),
    train=18, learn=4, evaluate=5, subsets=16, judged=12, corrupted=0.3, top=3, side=8, stored=10, features=200,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    scale_toy.images(tmp_path / "data" / "train", ["cat", "dog", "fish"], 8)
    scale_toy.images(tmp_path / "data" / "val", ["cat", "dog", "fish"], 2, seed=1)
    return tmp_path / "data"


def test_lds_and_wrong_labels_end_to_end(tmp_path, folder, monkeypatch):
    study = ImageNet(TINY, scale_toy.place(tmp_path, folder), "resnet18")
    found = scale_toy.results(study.lds())
    assert set(found["methods"]) == {"TracIn", "TRAK"}
    assert found["bank"]["subsets"] == 16 and found["bank"]["in each"] == 9
    for entry in found["methods"].values():
        scale_toy.check_lds(entry)
        assert entry["unweighted"]["queries"] == 5
    assert len(found["methods"]["TRAK"]["methods"]) == 5  # the paper's λ

    found = scale_toy.results(study.ablations())["methods"]
    assert set(found) == {"loss_ablation", "transfer_methods", "noise_sensitivity", "group_strength"}
    assert set(found["transfer_methods"]["TRAK"]["columns"]) == {"TracIn", "TRAK"}

    found = scale_toy.results(study.mislabel())
    for entry in found["methods"].values():
        assert 0 <= entry["unweighted"]["auc"] <= 1 and entry["unweighted"]["examples"] == 12
        assert set(entry["rules"]) == {"fixed"}

    def refuse(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr("experiments.scale.study.fit", refuse)
    assert (
        scale_toy.results(ImageNet(TINY, study.place, "resnet18").lds())["bank"]
        == scale_toy.results(study.lds())["bank"]
    )
    refused("begun with setting", ImageNet(replace(TINY, subsets=17), study.place, "resnet18").lds)


def test_roles_are_disjoint_and_labels_are_corrupted_as_often_as_asked(tmp_path, folder):
    study = ImageNet(TINY, scale_toy.place(tmp_path, folder), "resnet18", corrupted=True)
    pixels = {
        role: {image.tobytes() for image in study._data[role][0]} for role in ("train", "learn", "eval")
    }
    assert [len(p) for p in pixels.values()] == [18, 4, 5]
    assert not pixels["train"] & pixels["learn"] and not pixels["eval"] & (pixels["train"] | pixels["learn"])
    given, wrong = study.labels
    assert int(wrong.sum()) == round(0.3 * 18)
    assert torch.equal(given != study._data["train"][1], wrong)


def test_too_few_images_are_taken_only_if_asked(tmp_path, folder):
    big = replace(TINY, train=1000)
    with pytest.raises(UndeError, match=r"20 training images, the setting has 1,000.*--fewer"):
        ImageNet(big, scale_toy.place(tmp_path, folder), "resnet18").train_data()
    assert len(ImageNet(big, scale_toy.place(tmp_path, folder, fewer=True), "resnet18").train_data()) == 20


def test_a_vit_trains_too(tmp_path, folder):
    tiny = replace(
        VIT_B16,
        config={
            "image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8, "num_labels": 3,
        },
        recipe=Recipe(epochs=2, batch_size=8, lr=1e-2, weight_decay=0.0, warm_up=0.3), train=18, learn=4, evaluate=5,
        side=8, stored=10,
    )  # fmt: skip
    study = ImageNet(tiny, scale_toy.place(tmp_path, folder), "vit-b16")
    model = study.train_half(np.arange(9), seed=1)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), study.blank().parameters()))
    assert study.utility(model)["eval"].shape == (5,)
