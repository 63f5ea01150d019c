"""Low-rank adapters and gradient checkpointing: what fine-tuning leaves on a model."""

import copy
import re
import warnings

import pytest
import torch

from cases import Case
from oracles import assert_features, check, collect, plan, slow_gradients, ways
from unde import Groups, Index, UndeError, methods
from unde.groups import trainable
from zoo import BY_NAME, assert_rounded, make

peft = pytest.importorskip("peft")

LAYERS = {  # modules of each model that get adapters, by the names of old and new versions of transformers
    "gpt2-tied": r".*(c_attn|c_fc|c_proj)",
    "llama": r".*(q_proj|v_proj|up_proj|down_proj)",
    "qwen3": r".*(q_proj|k_proj|o_proj|gate_proj)",
    "mistral": r".*(q_proj|v_proj|o_proj)",
    "bert": r".*(query|value|dense)",
    "vit": r".*(query|value|q_proj|v_proj)",
    "resnet": r".*convolution",
}


def adapted(name, **options):
    """The case with adapters of rank 2 in it; `Case.make` moves them all away from zero."""
    case = BY_NAME[name]

    def build():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GPT-2's layers are stored transposed: PEFT says it takes note
            config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=LAYERS[name], **options)
            return peft.get_peft_model(case.model(), config)

    return Case(f"{name}-lora", build, case.data, case.task)


OPTIONS = [
    {"lora_dropout": 0.3},
    {"use_rslora": True},
    {"bias": "lora_only"},
    {"modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in LAYERS), *(("qwen3", options) for options in OPTIONS)]
)
def test_adapters_are_attributed(name, options):
    """Alone; dropout is off, as everywhere; what else is trained is attributed too."""
    model, task, rows = make(adapted(name, **options))
    found, _ = check(model, task, rows)
    assert set(found.values()) == {"hook"}
    if not options:
        assert set(found) == {n for n, _ in model.named_parameters() if "lora_" in n}
    assert any("lm_head" in n for n in found) == ("modules_to_save" in options)


def test_adapters_in_float32_on_a_base_in_bfloat16():
    """How PEFT sets them up."""
    model, task, rows = make(adapted("llama"), torch.bfloat16)
    for n, p in model.named_parameters():
        if "lora_" in n:
            p.data = p.data.float()
    truth = slow_gradients(copy.deepcopy(model).float(), task, rows)
    rough = slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows)
    assert set(ways(units, coverage).values()) == {"hook"}
    assert_rounded(collect(model, task, rows, units, coverage, batch_size=7), truth, rough, units)
    alone = collect(model, task, rows, units, coverage, batch_size=1)
    assert_features(alone, rough, units, 1e-6)  # the very numbers that torch gets


def test_adapters_as_groups(tmp_path):
    """Scores by group are inner products of the gradients of these adapters."""
    model, task, rows = make(adapted("llama"), torch.float32)
    by_layer = Groups.by_layer(model)
    assert len(by_layer) == 16
    assert all(re.search(r"lora_[AB]\.default$", name) for name in by_layer.names)
    groups = Groups.by_pattern(model, {"down": "lora_A", "up": "lora_B"})
    assert len(groups.members["down"]) == len(groups.members["up"]) == 8
    options = {"method": methods.TracIn(projection="none"), "batch_size": 3, "progress": False}
    index = Index.build(model, task, rows.data, tmp_path / "i", groups=groups, **options)
    found = index.score(rows.data[:2]).by_group()  # (2, N, 2)
    truth = {n: g.flatten(1) for n, g in slow_gradients(model, task, rows).items()}
    for j, members in enumerate(groups.members.values()):
        g = torch.cat([truth[n] for n in members], 1)
        torch.testing.assert_close(found[..., j], g[:2] @ g.T, rtol=1e-4, atol=1e-6)


def frozen_by_config(folder):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], inference_mode=True)
    return peft.get_peft_model(BY_NAME["llama"].model(), config)


def loaded_for_inference(folder, **options):
    base = BY_NAME["llama"].model()
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    return peft.PeftModel.from_pretrained(BY_NAME["llama"].model(), folder, **options)


@pytest.mark.parametrize("load", [frozen_by_config, loaded_for_inference])
def test_adapters_that_are_not_trainable(tmp_path, load):
    model = load(tmp_path)
    message = r"4 adapter parameters \('base_model.*lora_A.* frozen for inference.*is_trainable=True"
    for make_groups in (trainable, Groups.by_layer, Groups.by_tensor):
        with pytest.raises(UndeError, match=message):
            make_groups(model)
    with pytest.raises(UndeError, match=message):
        Index.build(model, BY_NAME["llama"].task(), [{"input_ids": [1, 2]}], tmp_path / "i", progress=False)


def test_adapters_loaded_as_the_error_says(tmp_path):
    names = trainable(loaded_for_inference(tmp_path, is_trainable=True))
    assert len(names) == 4
    assert all("lora_" in n for n in names)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", [BY_NAME["gpt2-tied"], BY_NAME["llama"], adapted("llama")], ids=str)
def test_gradient_checkpointing(case, reentrant):
    """It is off in eval mode, in which features are taken: it costs nothing, the numbers are the same, and so is the
    model after."""
    model, task, rows = make(case)
    truth = slow_gradients(model, task, rows)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    found, _ = check(model, task, rows, truth=truth)
    assert set(found.values()) == {"hook"}
    assert model.training
    assert model.is_gradient_checkpointing
