"""Self-retrieval itself, not a stand-in, on the data of each kind of setting."""

from dataclasses import replace

import numpy as np
import pytest
import scale_toy
import torch
from experiments.scale import findings
from experiments.scale.diffusion import Generation
from experiments.scale.language import WikiText
from experiments.scale.settings import CIFAR2, RESNET18, WIKITEXT103, Recipe
from experiments.scale.vision import ImageNet

import hf_toy  # isort: skip  (its folder is put on the path by scale_toy)

ENOUGH = 240  # training examples
RECIPE = Recipe(epochs=1, batch_size=50, lr=1e-3, weight_decay=0.0)


def images(tmp_path):
    for split, each in (("train", 122), ("val", 2)):
        scale_toy.images(tmp_path / "data" / split, ["automobile", "horse"], each, side=8)
    return tmp_path / "data"


def classifier(tmp_path, monkeypatch):
    tiny = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic", "num_labels": 2}
    sizes = {"train": ENOUGH, "learn": 2, "evaluate": 2, "side": 8, "stored": 8, "features": 50}
    setting = replace(RESNET18, config=tiny, recipe=RECIPE, **sizes)
    return ImageNet(setting, scale_toy.place(tmp_path, images(tmp_path)), "resnet18")


def language(tmp_path, monkeypatch):
    hf_toy.tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = " ".join(hf_toy.LINES).split()
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, 12)) for _ in range(200)]
    folder = scale_toy.tables(
        tmp_path / "wiki", {"train": texts, "validation": texts[:5], "test": texts[5:10]}
    )
    tiny = {"vocab_size": 300, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    sizes = {
        "train": ENOUGH,
        "learn": 2,
        "evaluate": 2,
        "length": 8,
        "projection": "kron(2)",
        "logra": "kron(2)",
    }
    setting = replace(WIKITEXT103, config=tiny, recipe=RECIPE, **sizes)
    return WikiText(setting, scale_toy.place(tmp_path, folder, model=tmp_path / "tokenizer"))


def denoiser(tmp_path, monkeypatch):
    tiny = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8,), "norm_num_groups": 2}
    tiny |= {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    sizes = {
        "train": ENOUGH,
        "learn": 2,
        "evaluate": 2,
        "side": 8,
        "timesteps": 1,
        "steps": 1,
        "features": 50,
    }
    setting = replace(CIFAR2, unet=tiny, recipe=RECIPE, **sizes)
    return Generation(setting, scale_toy.place(tmp_path, images(tmp_path)))


@pytest.mark.parametrize("kind", [classifier, language, denoiser])
def test_weights_by_self_retrieval(tmp_path, monkeypatch, kind):
    study = kind(tmp_path, monkeypatch)
    model, _ = study.trained()
    method = study.methods(model)["TracIn"]
    learned = study.learned("TracIn", method)
    weights, found = learned.weights, learned.weights["self-retrieval"]
    assert not learned.without and set(weights) == {"top-k", "self-retrieval"}
    assert found.groups == weights["top-k"].groups and torch.isfinite(found.values).all()
    assert findings.seen(weights["top-k"]) == []
    assert len(findings.seen(found)) > 50 and set(findings.seen(found)) <= set(range(ENOUGH))
