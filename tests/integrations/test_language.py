"""Hugging Face models and text files as a Setup, and the folders and files that are not what they should be."""

import json
import shutil

import pytest
import torch
from hf_toy import CONTEXT, LINES, gpt2, gradient, index_of, save, tokenizer, write_jsonl

import toy
from refusals import refused
from unde import Index, UndeError
from unde.integrations.language import hf_setup, load_model
from unde.scoring import documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, folder):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    made = peft.get_peft_model(load_model(str(folder)), config)
    for name, p in made.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave lora_A without a gradient
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("adapter")
    made.save_pretrained(path)
    return path


def copy(folder, tmp_path, *without):
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns(*without))
    return tmp_path / "copy"


def test_scores_are_gradients_of_the_model_on_the_text(folder, tmp_path):
    data = write_jsonl(tmp_path / "train.jsonl", LINES[:3])
    setup = hf_setup(folder, data, eval_queries=LINES[3:4])
    found = index_of(setup, tmp_path / "idx").score(setup.eval_queries).total()
    *train, query = (gradient(tokenizer()(line)["input_ids"]) for line in LINES[:4])
    expected = torch.stack([query @ other for other in train])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-7)


def test_one_text_is_enough(tmp_path):
    """Positions, which all examples of a batch share, look like one example's own if there is only one."""
    setup = hf_setup(gpt2(), LINES[:1], tokenizer=tokenizer(), eval_queries=LINES[1:3])
    found = index_of(setup, tmp_path / "i").score(setup.eval_queries).total()
    own, *queries = (gradient(e["input_ids"]) for e in (setup.train_data[0], *setup.eval_queries))
    expected = torch.stack([query @ own for query in queries])
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-4, atol=1e-6)


def test_a_query_without_a_loss_is_named(tmp_path):
    setup = hf_setup(gpt2(), LINES[:2], tokenizer=tokenizer())
    index = index_of(setup, tmp_path / "i")
    asked = [{"input_ids": e["input_ids"], "labels": e["input_ids"].clone()} for e in setup.train_data]
    asked[1]["labels"][:] = -100
    refused(r"^query 1 has no target, so no loss", index.score, asked)


def test_ids_of_texts_need_not_be_named(tmp_path):
    setup = hf_setup(gpt2(), LINES[:3], tokenizer=tokenizer(), seq_len=8)
    index = Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        tmp_path,
        method="tracin",
        projection="kron(2)",
        progress=False,
    )
    assert index.ids == list(setup.ids) and index.ids[0] == "0:1"
    assert index.score([setup.train_data[0]]).top(2, by=documents(index.ids))
    index.remove(["1"])
    assert {name[0] for name in index.ids} == {"0", "2"}


def test_what_is_shown_is_the_text(folder):
    setup = hf_setup(folder, LINES, seq_len=8)
    assert setup.show is not None and setup.pieces is not None and setup.ids is not None
    shown = [setup.show(setup.train_data[i]) for i, name in enumerate(setup.ids) if name.startswith("0:")]
    assert "".join(shown) == LINES[0]
    assert "".join(setup.pieces(setup.train_data[0])) == shown[0]
    assert setup.show({"input_ids": torch.tensor([0, *tokenizer()("free")["input_ids"]])}) == "free"


def test_sequences_are_as_long_as_the_context_unless_told(folder):
    long = " ".join(LINES)
    assert len(hf_setup(folder, [long]).train_data[0]["input_ids"]) == CONTEXT
    assert len(hf_setup(folder, [long], seq_len=10).train_data[0]["input_ids"]) == 10
    with pytest.raises(UndeError, match=rf"sequences of 512 tokens, but the context of .* is {CONTEXT}"):
        hf_setup(folder, [long], seq_len=512)


def test_models_in_half_precision_are_computed_in_full(tmp_path):
    gpt2().bfloat16().save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_loaded_model_brings_its_tokenizer(folder):
    setup = hf_setup(gpt2(), LINES, tokenizer=tokenizer())
    assert setup.train_data.ids == hf_setup(folder, LINES, tokenizer=folder).train_data.ids
    refused("needs its tokenizer=", hf_setup, gpt2(), LINES)


def test_adapters_train_and_bases_do_not(adapter, folder, tmp_path):
    setup = hf_setup(adapter, LINES[:4])  # the tokenizer is that of the base
    trained = [n for n, p in setup.model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 and all("lora_" in n for n in trained)
    index = index_of(setup, tmp_path / "idx")
    assert index.manifest.unit_names == trained
    ids = torch.tensor([tokenizer()(LINES[0])["input_ids"]])
    setup.model(input_ids=ids, labels=ids).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in setup.model.parameters() if p.requires_grad])
    torch.testing.assert_close(toy.stored(index).block(0, 0)[0], expected, rtol=1e-4, atol=1e-7)


def test_models_without_a_trainable_parameter_are_refused():
    with pytest.raises(UndeError, match="the model has no trainable parameter"):
        hf_setup(gpt2().requires_grad_(False), LINES, tokenizer=tokenizer())


def test_an_adapter_without_its_base_is_named(adapter, tmp_path):
    moved = copy(adapter, tmp_path)
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/base"}))
    refused("no folder /gone/base", hf_setup, moved, LINES)


def test_tokenizers_that_do_not_fit_are_refused(folder):
    with pytest.raises(
        UndeError, match=r"the tokenizer knows 330 tokens, .*model 300: it is not the model's"
    ):
        hf_setup(folder, LINES, tokenizer=tokenizer(330))
    added = tokenizer()
    added.add_special_tokens({"pad_token": "<pad>"})  # beyond the model's tokens, and never used
    assert hf_setup(folder, LINES, tokenizer=added).train_data.tokens.max() < 300
    with pytest.raises(UndeError, match="text 1: the tokenizer gives token 300, the model knows 0 to 299"):
        hf_setup(folder, [*LINES[:1], "padded<pad>"], tokenizer=added)


def test_folders_that_hold_something_else(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(r"empty holds no tokenizer: .*there is nothing", hf_setup, tmp_path / "empty", LINES)
    bare = copy(folder, tmp_path, "tokenizer*")
    refused(r"copy holds no tokenizer: expected tokenizer.json .*there is config.json", hf_setup, bare, LINES)
    shutil.rmtree(bare)
    with pytest.raises(UndeError, match=r"copy holds no model: expected config.json or adapter_config.json"):
        hf_setup(copy(folder, tmp_path, "config.json", "*.safetensors"), LINES)
    refused(r"no folder ./nowhere", hf_setup, "./nowhere", LINES)
    refused("is a file: expected the folder", hf_setup, folder / "model.safetensors", LINES, tokenizer=folder)


def test_folders_that_are_damaged_or_not_whole(folder, tmp_path):
    broken = copy(folder, tmp_path)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    refused(r"cannot load the model .*copy, in its folder", hf_setup, broken, LINES)
    (broken / "model.safetensors").unlink()
    refused(r"cannot load the model .*copy, in its folder", hf_setup, broken, LINES)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.0.mlp.c_fc.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    refused(r"not hold all weights .*'transformer.h.0.mlp.c_fc.weight' is missing", hf_setup, broken, LINES)


def test_names_that_nobody_knows(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UndeError,
        match="cannot load the tokenizer no-such-model, no such folder here, and not found on the hub",
    ):
        hf_setup("no-such-model", LINES)
