"""Fine-tunings of Hugging Face models as a calibration repeats them: of a real Trainer, of an adapter, continued."""

import json
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from hf_toy import LINES, gpt2, sequences, tokenizer, train, write_jsonl

from refusals import refused
from unde import UndeError
from unde.index.calibration import Calibration
from unde.integrations.finetuning import Arguments, fine_tuning, read_arguments
from unde.integrations.language import hf_setup

pytest.importorskip("accelerate")
import peft

RATE, EPOCHS, BATCH = 0.02, 4, 4
TEXTS = [f"{a[:24]} {b[:24]}" for a in LINES for b in LINES[:4]]
TRAIN, HELD_OUT = TEXTS[:16], TEXTS[16:]


def run(*arguments):
    return " ".join(commands.run(*arguments, both=True, columns=200).split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """base/, and out/, the run of a Trainer that fine-tuned it."""
    folder = tmp_path_factory.mktemp("finetuned")
    gpt2().save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    schedule = {"learning_rate": RATE, "lr_scheduler_type": "linear", "num_train_epochs": EPOCHS}
    batches = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
    train(folder / "out", sequences(TRAIN), save_steps=8, logging_steps=2, **schedule, **batches)
    tokenizer().save_pretrained(folder / "out")
    write_jsonl(folder / "train.jsonl", TRAIN)
    write_jsonl(folder / "held-out.jsonl", HELD_OUT)
    return folder


def test_arguments_are_those_of_the_trainer(trained):
    last = max((trained / "out").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    found = read_arguments(last, len(TRAIN))
    assert (found.epochs, found.batch_size) == (EPOCHS, BATCH)  # accumulation is counted
    assert found.lr == pytest.approx(RATE, rel=0.1)


def test_without_a_trainer_they_are_its_defaults(tmp_path):
    assert read_arguments(tmp_path, 10) == Arguments(3, 5e-5, 8)
    (tmp_path / "trainer_state.json").write_text("{}")
    refused("not what Trainer writes", read_arguments, tmp_path, 10)


def test_calibrate_retrains_from_the_base_checkpoint(trained, monkeypatch):
    monkeypatch.chdir(trained)
    run("build", "--hf-model", "out", "--data", "train.jsonl", "--out", "idx", "--method", "tracin")
    with pytest.raises(UndeError, match=r"there is no way to train.*--base DIR.*--how local"):
        run("calibrate", "--index", "idx", "--queries", "held-out.jsonl", "--halves", 4)
    text = run("calibrate", "--index", "idx", "--queries", "held-out.jsonl", "--halves", 4, "--base", "base")
    assert "from base" in text and "4 epochs of AdamW at 0.02" in text and "BM25" in text
    found = Calibration.load(Path("idx/calibration.json"))
    assert (found.how, found.halves) == ("retrain", 4)
    assert f"calibrated: {found}" in run("attribute --index idx --query 'The debt is paid' --top 1")
    local = run("calibrate", "--index", "idx", "--queries", "held-out.jsonl", "--halves", 4, "--how", "local")
    assert "short continued trainings" in local


def test_no_queries_is_one_clear_error(trained, monkeypatch):
    monkeypatch.chdir(trained)
    run("build", "--hf-model", "out", "--data", "train.jsonl", "--out", "other", "--method", "tracin")
    refused("no queries", run, "calibrate", "--index", "other")


def test_an_adapter_starts_from_its_base_with_fresh_weights(trained, tmp_path):
    base = gpt2()
    base.save_pretrained(trained / "base")
    base.config._name_or_path = str(trained / "base")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = peft.get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = str(trained / "base")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer().save_pretrained(tmp_path / "adapter")
    setup = hf_setup(tmp_path / "adapter", trained / "train.jsonl")
    training = fine_tuning(setup, str(tmp_path / "adapter"), epochs=1, lr=0.1, batch_size=4)
    start = training.initial_model(0)
    trainable = {n for n, p in start.named_parameters() if p.requires_grad}
    assert trainable and all("lora" in n for n in trainable)
    assert all(not p.any() for n, p in start.named_parameters() if "lora_B" in n)
    after = training(np.arange(8), 0)
    assert any(p.any() for n, p in after.named_parameters() if "lora_B" in n)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
