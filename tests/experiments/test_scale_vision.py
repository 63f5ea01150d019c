"""ImageNet-50k end to end, on a few images of three classes."""

from dataclasses import replace

import numpy as np
import pytest
import scale_toy
import torch
from experiments.scale.settings import RESNET18, VIT_B16, Recipe
from experiments.scale.study import PartTrainer
from experiments.scale.vision import ImageNet

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
    study = ImageNet(TINY, scale_toy.place(tmp_path, folder))
    first = scale_toy.results(study.run_lds())
    found, bank = dict(first), first["bank"]
    assert found.pop("bank")["subsets"] == 16 and bank["in each"] == 9
    assert set(found) == {"TracIn", "TRAK"}
    for entry in found.values():
        scale_toy.check_lds(entry)
        assert entry["unweighted"]["queries"] == 5
    assert len(found["TRAK"]["methods"]) == 5  # the paper's λ

    found = scale_toy.results(study.run_ablations())
    assert set(found) == {"loss_ablation", "transfer_methods", "noise_sensitivity", "group_strength"}
    assert set(found["transfer_methods"]["TRAK"]["columns"]) == {"TracIn", "TRAK"}

    found = scale_toy.results(study.run_mislabel())
    assert set(found) == {"TracIn", "TRAK"}
    for entry in found.values():
        assert "unweighted normalised" in entry and "weighted normalised" in entry
        assert all(0 <= area <= 1 for area in entry.values())

    def refuse(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(PartTrainer, "step", refuse)
    assert str(scale_toy.results(ImageNet(TINY, study.place).run_lds())) == str(first)
    with pytest.raises(AssertionError, match="trained again"):  # another setting has a folder of its own
        ImageNet(replace(TINY, subsets=17), study.place).run_lds()


def test_roles_are_disjoint_and_labels_are_corrupted_as_often_as_asked(tmp_path, folder):
    study = ImageNet(replace(TINY, mislabelled=True), scale_toy.place(tmp_path, folder))
    pixels = {
        role: {image.tobytes() for image in study._data[role][0]} for role in ("train", "learn", "eval")
    }
    assert [len(p) for p in pixels.values()] == [18, 4, 5]
    assert not pixels["train"] & pixels["learn"] and not pixels["eval"] & (pixels["train"] | pixels["learn"])
    given, wrong = study.labels
    assert int(wrong.sum()) == round(0.3 * 18)
    assert torch.equal(given != study._data["train"][1], wrong)


def test_fewer_images_are_taken_with_a_word(tmp_path, folder, capsys):
    assert len(ImageNet(replace(TINY, train=1000), scale_toy.place(tmp_path, folder)).train()) == 20
    assert "20 training images, the setting has 1,000" in capsys.readouterr().err


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
    study = ImageNet(tiny, scale_toy.place(tmp_path, folder))
    model = study.train_half(np.arange(9), seed=1)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), study.blank().parameters()))
    assert study.utility(model)["eval"].shape == (5,)
