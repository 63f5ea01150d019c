"""The command at the paper's scale: names, plans, and that the settings are the paper's."""

import pickle
from dataclasses import replace

import experiments.scale.command as command
import pytest
import scale_toy
import torch
from experiments.scale import plans, run
from experiments.scale.diffusion import Generation
from experiments.scale.language import WikiText
from experiments.scale.llama import OpenWebText
from experiments.scale.settings import CATEGORIES, CIFAR2, LLAMA_OWT, RESNET18, VIT_B16, WIKITEXT103
from experiments.scale.study import closest
from experiments.scale.vision import ImageNet, made

from unde import UndeError
from unde.groups import trainable
from unde.projection import Spec, feature_size

pytestmark = pytest.mark.usefixtures("one_thread")


def width(model, projection, exclude=()):
    shapes = dict(model.named_parameters())
    return sum(
        feature_size(Spec.parse(projection), tuple(shapes[n].shape)) for n in trainable(model, exclude)
    )


def test_the_list_names_every_setting_and_study(capsys):
    run("list", [])
    shown = capsys.readouterr().out
    for name in (
        "imagenet", "wikitext103", "cifar2", "artbench2", "naruto", "sb-pokemon", "llama-owt", "lds_classification",
        "mislabel_auc", "lds_language", "language_tail_patch", "lds_diffusion", "fine_grained_recall",
        "llama_tail_patch",
    ):  # fmt: skip
        assert name in shown


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(UndeError, match=r"(?s)imagnet.*imagenet.*lds_diffusion"):
        run("imagnet", [])


def test_a_study_of_several_settings_asks_which(capsys):
    with pytest.raises(SystemExit):
        run("lds_diffusion", ["--plan"])
    assert "--setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "called"),
    [
        ("lds_classification", [], ["lds"]),
        ("mislabel_auc", ["--architecture", "vit-b16"], ["mislabel"]),
        ("imagenet", [], ["lds", "mislabel"]),
        ("language_tail_patch", [], ["patches"]),
        ("wikitext103", [], ["lds", "patches"]),
        ("lds_diffusion", ["--setting", "naruto"], ["lds"]),
        ("fine_grained_recall", [], ["recall"]),
        ("sb-pokemon", [], ["lds", "recall"]),
        ("llama_tail_patch", [], ["patches"]),
    ],
)
def test_names_lead_to_studies(monkeypatch, tmp_path, name, arguments, called):
    seen = []
    monkeypatch.setattr(plans, "text", lambda study, rate, wanted: "the plan")
    for kind in (ImageNet, WikiText, Generation, command.Pokemon, OpenWebText):
        for what in ("lds", "mislabel", "patches", "recall"):
            if hasattr(kind, what):
                monkeypatch.setattr(kind, what, lambda self, what=what: seen.append(what))
    run(name, [*arguments, "--out", str(tmp_path)])
    assert seen == called
    seen.clear()
    run(name, [*arguments, "--out", str(tmp_path), "--plan"])
    assert not seen and not list(tmp_path.iterdir())


def test_a_plan_needs_neither_data_nor_model(tmp_path, monkeypatch, capsys):
    tiny = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8,), "norm_num_groups": 2}
    tiny |= {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    monkeypatch.setattr(command, "CIFAR2", replace(CIFAR2, unet=tiny, features=100, side=8))
    run("cifar2", ["--plan", "--out", str(tmp_path), "--rows", "8", "--tflops", "50"])
    shown = capsys.readouterr().out
    assert "200 epochs of 5,000 noisy images, 8,000 steps" in shown
    assert "64 models of 4,000 steps" in shown and "50 TFLOP/s" in shown
    assert "5,000 images × 50 timesteps × 3 indexes" in shown and "3 indexes like this" in shown


def test_plans_count_what_is_trained(tmp_path):
    place = scale_toy.place(tmp_path, None)
    tiny = {"vocab_size": 300, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    setting = replace(
        WIKITEXT103,
        config=tiny,
        length=16,
        train=64,
        learn=2,
        evaluate=3,
        projection="kron(2)",
        logra="kron(3)",
    )
    costs = {what: n for what, n, *_ in WikiText(setting, place).costs()[0]}
    assert costs["retraining on halves"] == pytest.approx(50 * costs["training"])
    assert costs["tail-patches"] == pytest.approx(costs["training"] / 10 / 64 * 128 * 3 * 13)


def test_a_plan_of_llama_takes_the_config_of_its_folder(tmp_path):
    from transformers import LlamaConfig

    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    llama = replace(LLAMA_OWT, length=8, train=10, learn=2, evaluate=2, projection="kron(2)")
    shown = plans.text(
        OpenWebText(llama, scale_toy.place(tmp_path, None, model=tmp_path)), 1e12, ["llama_tail_patch"]
    )
    assert "tail-patches" in shown and "14 steps on 1 sequence" in shown
    assert "model.layers.*.mlp.up_proj" in shown


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


@pytest.mark.parametrize("name", list(command.SETTINGS))
def test_other_processes_get_the_setting_alone(tmp_path, name):
    """Halves may be trained by several processes, which are sent what trains and judges them."""
    study = command.SETTINGS[name].make(scale_toy.place(tmp_path, tmp_path), "resnet18")
    study._trained = (torch.nn.Linear(1000, 1000), {})
    sent = pickle.dumps((study.train_half, study.utility))
    assert len(sent) < 20_000
    there = pickle.loads(sent)[0].__self__
    assert (there.name, there.setting, there.place) == (study.name, study.setting, study.place)
    assert there._trained is None and there._indexes == {}


def test_help_says_what_the_data_should_look_like(capsys):
    with pytest.raises(SystemExit):
        run("lds_diffusion", ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "artbench2: images by class in CLASS/name.png" in shown
        and "naruto: images with metadata.jsonl" in shown
    )
    assert "miniSD-diffusers" in shown


def test_a_plan_counts_only_what_the_study_needs(tmp_path):
    tiny = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic", "num_labels": 3}
    setting = replace(RESNET18, config=tiny, features=100, side=8)
    study = ImageNet(setting, scale_toy.place(tmp_path, None), "resnet18")
    costs = study.costs()
    study.costs = lambda: costs
    ranked, labels = (plans.text(study, 1e12, [name]) for name in ("lds_classification", "mislabel_auc"))
    assert "100 models of 8,820 steps" in ranked and "training on wrong labels" not in ranked
    assert "100 models" not in labels and "training on wrong labels" in labels
