"""The diffusion settings end to end: a tiny DDPM, and a tiny Stable Diffusion with LoRA."""

from dataclasses import replace

import numpy as np
import pytest
import scale_toy
import torch

import sd_toy  # isort: skip  (its folder is put on the path by scale_toy)
from experiments.scale.diffusion import Generation, Pokemon
from experiments.scale.settings import ARTBENCH2, CATEGORIES, CIFAR2, NARUTO, SB_POKEMON, Recipe

from unde import UndeError

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SMALL = {
    "recipe": Recipe(epochs=1, batch_size=4, lr=1e-3, weight_decay=1e-6, warm_up=0.1),
    "side": 8, "learn": 4, "evaluate": 5, "subsets": 16, "timesteps": 2, "steps": 2, "features": 200,
}  # fmt: skip
UNET = {
    "sample_size": 8, "layers_per_block": 1, "block_out_channels": (4, 8), "norm_num_groups": 2,
    "down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return sd_toy.save(tmp_path_factory.mktemp("pipeline"))


def test_a_ddpm_end_to_end(tmp_path, monkeypatch):
    folder = scale_toy.images(tmp_path / "cifar", ["automobile", "horse", "ship"], 6, side=8)
    study = Generation(replace(CIFAR2, unet=UNET, train=10, **SMALL), scale_toy.place(tmp_path, folder))
    found = scale_toy.results(study.run_lds())
    bank = found.pop("bank")
    assert [bank["subsets"], bank["in each"], study.count] == [16, 5, 10]
    assert set(found) == {"TracIn", "TRAK", "Journey-TRAK", "D-TRAK", "DAS"}
    for entry in found.values():
        scale_toy.check_lds(entry)
    assert {name.split("/")[0] for name in study.pictures.names} == {"automobile", "horse"}
    learn, evaluate = study.samples("learn"), study.samples("eval")
    assert not set(learn.seeds) & set(evaluate.seeds) and evaluate.trajectory.shape[1] == 2


def test_lora_and_recall_end_to_end(tmp_path, pipeline, monkeypatch):
    names = [name for those in CATEGORIES.values() for name in those]
    folder = scale_toy.images(tmp_path / "pokemon", [n.replace(" ", "_") for n in names], 1, side=8)
    setting = replace(SB_POKEMON, train=30, rank=2, **SMALL)
    monkeypatch.setitem(CATEGORIES, "style", CATEGORIES["style"][:4])  # fewer combinations: 5 × 2 × 5
    monkeypatch.setitem(CATEGORIES, "background", CATEGORIES["background"][:2])
    setting = replace(setting, classes=tuple(n for those in CATEGORIES.values() for n in those), train=16)
    setting = replace(setting, fine_learn=5, repeats=1, k=3)
    study = Pokemon(setting, scale_toy.place(tmp_path, folder, model=pipeline))
    found = scale_toy.results(study.run_recall())
    assert set(found["weights"]) == {"subject", "style", "background"}
    for split in ("train", "validation"):
        assert set(found[split]["recall"]) == {"none", *found["weights"]}
        assert found[split]["recall"]["none"]["all"]["queries"] == 5 * 2 * 1
    data = study.attributes
    for attribute, those in CATEGORIES.items():  # one contributor for each category
        assert sorted(data.labels[attribute][data.labels[attribute] >= 0]) == list(range(len(those)))
    assert data.prompt(style=2, subject=9, background=0) == "A risograph print of Eevee, in a misty marsh"

    model = study.model
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


def test_halves_start_alike_and_share_frozen_weights(tmp_path, pipeline):
    folder = scale_toy.images(tmp_path / "art", ["ukiyo_e", "Post_Impressionism"], 4, side=8)
    setting = replace(ARTBENCH2, train=8, rank=2, **SMALL)
    study = Generation(setting, scale_toy.place(tmp_path, folder, model=pipeline))
    one, two = study.blank(), study.blank()
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b)
        assert (a is b) != ("lora_" in name)
    one = study.train_half(np.arange(4), 1)
    changed = [
        name
        for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters())
        if not torch.equal(a, b)
    ]
    assert changed and all("lora_" in name for name in changed)
    assert study.prompts() == ["a post-impressionism painting"] * 4 + ["a ukiyo-e painting"] * 4
    asked = study.query_prompts("eval", 6)
    assert asked.count("a ukiyo-e painting") == 3


def test_captions_are_prompts_and_queries(tmp_path, pipeline):
    folder = scale_toy.captioned(tmp_path / "naruto", 6)
    study = Generation(
        replace(NARUTO, train=6, rank=2, **SMALL), scale_toy.place(tmp_path, folder, model=pipeline)
    )
    assert study.prompts()[1] == "a fish b"
    assert sorted(study.query_prompts("learn", 6)) == sorted(study.prompts())


def test_what_is_missing_is_said(tmp_path, pipeline):
    folder = scale_toy.images(tmp_path / "art", ["cubism", "realism"], 2, side=8)
    with pytest.raises(UndeError, match="no images of class 'post-impressionism', there are cubism, realism"):
        Generation(ARTBENCH2, scale_toy.place(tmp_path, folder, model=pipeline)).train()
    with pytest.raises(UndeError, match=r"have no captions: expected images with metadata.jsonl"):
        Generation(NARUTO, scale_toy.place(tmp_path, folder, model=pipeline)).train()
    with pytest.raises(UndeError, match="--model FOLDER with a Stable Diffusion 1 pipeline"):
        Generation(ARTBENCH2, scale_toy.place(tmp_path, folder)).blank()
