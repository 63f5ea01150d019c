"""The command at the paper's scale: names, and that the settings are the paper's."""

import pickle

import pytest
import scale_toy
import torch
from experiments.scale import SETTINGS, run
from experiments.scale.diffusion import Generation, Pokemon
from experiments.scale.language import OpenWebText, WikiText
from experiments.scale.settings import CATEGORIES, CIFAR2, RESNET18, VIT_B16, WIKITEXT103
from experiments.scale.study import closest
from experiments.scale.vision import ImageNet, made

from refusals import refused
from unde.groups import trainable
from unde.projection import Spec, feature_size


def width(model, projection, exclude=()):
    shapes = dict(model.named_parameters())
    return sum(
        feature_size(Spec.parse(projection), tuple(shapes[n].shape)) for n in trainable(model, exclude)
    )


def test_the_list_names_every_setting_and_study(capsys):
    run("list", [])
    shown = capsys.readouterr().out
    for name in (
        "imagenet-resnet18", "imagenet-vit-b16", "wikitext103", "cifar2", "artbench2", "naruto", "sb-pokemon",
        "llama-owt", "lds", "ablations", "mislabel", "patches", "recall",
    ):  # fmt: skip
        assert name in shown


def test_unknown_names_are_refused_with_the_list():
    refused(r"(?s)imagnet.*imagenet-resnet18.*naruto", run, "imagnet", [])


@pytest.mark.parametrize(
    ("name", "arguments", "called"),
    [
        ("imagenet-vit-b16", ["--study", "mislabel"], ["mislabel"]),
        ("imagenet-resnet18", [], ["lds", "mislabel", "ablations"]),
        ("wikitext103", [], ["lds", "patches", "ablations"]),
        ("naruto", ["--study", "lds", "ablations"], ["lds", "ablations"]),
        ("sb-pokemon", [], ["lds", "recall", "ablations"]),
        ("llama-owt", [], ["patches"]),
    ],
)
def test_names_lead_to_studies(monkeypatch, tmp_path, name, arguments, called):
    seen = []
    for kind in (ImageNet, WikiText, Generation, Pokemon, OpenWebText):
        for what in ("lds", "mislabel", "patches", "recall", "ablations"):
            if hasattr(kind, f"run_{what}"):
                monkeypatch.setattr(kind, f"run_{what}", lambda self, what=what: seen.append(what))
    run(name, [*arguments, "--out", str(tmp_path)])
    assert seen == called


def test_models_and_projections_are_the_papers():
    from diffusers import UNet2DModel
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        resnet, vit = made(RESNET18), made(VIT_B16)
        gpt2, ddpm = GPT2LMHeadModel(WikiText(WIKITEXT103, None).config), UNet2DModel(**CIFAR2.unet)
    assert [round(sum(p.numel() for p in m.parameters()) / 1e6, 1) for m in (resnet, vit, gpt2, ddpm)] == [
        11.7, 86.6, 124.4, 35.7,
    ]  # fmt: skip
    s = WIKITEXT103
    assert width(gpt2, s.projection, s.exclude) == 196_608 and width(gpt2, s.logra, s.exclude) == 442_368
    for model, k in ((resnet, 11_264), (vit, 12_800), (ddpm, 25_472)):
        found = closest(model, k)
        side = Spec.parse(found).size
        assert abs(width(model, found) - k) / k < 0.05
        for other in (side - 1, side + 1):
            assert abs(width(model, found) - k) <= abs(width(model, f"kron({other})") - k)
    assert [len(names) for names in CATEGORIES.values()] == [10, 10, 10]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_other_processes_get_the_setting_alone(tmp_path, name):
    """Halves may be trained by several processes, which are sent what trains and judges them."""
    study = SETTINGS[name].study(SETTINGS[name].setting, scale_toy.place(tmp_path, tmp_path))
    study.trained = (torch.nn.Linear(1000, 1000), {})
    sent = pickle.dumps((study.train_half, study.utility))
    assert len(sent) < 20_000
    there = pickle.loads(sent)[0].__self__
    assert (there.name, there.setting, there.place) == (study.name, study.setting, study.place)
    assert "trained" not in vars(there) and there._built == {}


def test_help_says_what_the_data_should_look_like(capsys):
    for name, layout in (
        ("artbench2", "images by class in CLASS/name.png"),
        ("naruto", "images with metadata"),
    ):
        with pytest.raises(SystemExit):
            run(name, ["--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert layout in shown and "miniSD-diffusers" in shown.replace("- ", "-")  # a line may end there
