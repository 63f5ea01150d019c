"""Folders of a real Trainer: the newest checkpoint as a model, all of them for TracInCP, from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import run
from hf_toy import LINES, gpt2, gradient, sequences, tokenizer, train, write_jsonl
from safetensors.torch import load_file

from refusals import refused
from unde import Index, UndeError
from unde.integrations.trainer import checkpoints_in, newest, steps

pytest.importorskip("accelerate")

RATE, STEPS = 0.01, 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    schedule = {"learning_rate": RATE, "lr_scheduler_type": "linear", "max_steps": STEPS}
    train(folder / "out", sequences(LINES), save_steps=2, logging_steps=2, **schedule)
    tokenizer().save_pretrained(folder / "out")
    write_jsonl(folder / "train.jsonl", LINES[:4])
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(index):
    text = run("attribute", "--index", index, "--query", LINES[5], "--top", 4, "--format", "json")
    return {row["index"]: row["score"] for row in json.loads(text)}


def product(file, line):
    one, other = (gradient(e["input_ids"], state=load_file(file)) for e in sequences([LINES[5], line]))
    return float(one @ other)


def test_the_newest_checkpoint_of_a_run(here):
    assert Path(newest("out")).name == "checkpoint-6"
    run("build --hf-model out --data train.jsonl --out idx --method tracin --projection none")
    found = ask("idx")
    for i in range(4):
        assert found[i] == pytest.approx(product("out/checkpoint-6/model.safetensors", LINES[i]), rel=1e-4)
    # What the index remembers is that checkpoint, whatever comes after it.
    shutil.copytree("out/checkpoint-2", "out/checkpoint-9")
    assert ask("idx") == found
    # A checkpoint by its own name, its tokenizer beside it; one that was not saved whole is none.
    run("build --hf-model out/checkpoint-2 --data train.jsonl --out two --method tracin")
    Path("out/checkpoint-9/trainer_state.json").unlink()
    assert Path(newest("out")).name == "checkpoint-6"


def test_checkpoints_make_tracincp_with_the_rates_of_the_log(here):
    run(
        "build --hf-model out --data train.jsonl --out idx --method tracin --projection none "
        "--checkpoints out"
    )
    rates = {
        2: RATE * 5 / 6,
        4: RATE * 3 / 6,
        6: RATE * 1 / 6,
    }  # linear decay: that of the step that was taken
    assert Index.open("idx").manifest.checkpoint_weights == pytest.approx(list(rates.values()))
    found = ask("idx")  # which checkpoints it were is remembered
    for i in range(4):
        expected = sum(
            rate * product(f"out/checkpoint-{s}/model.safetensors", LINES[i]) for s, rate in rates.items()
        )
        assert found[i] == pytest.approx(expected, rel=1e-4)
    plan = "plan --hf-model out --data train.jsonl --checkpoints out --method tracin --format json"
    planned = json.loads(run(plan))
    assert planned["checkpoints"] == 3
    shutil.move("out", "moved")
    refused(r"which is gone: say where it is now \(--hf-model\)", ask, "idx")
    with pytest.raises(UndeError, match=r"was built from checkpoints in .*out, which is gone: put them back"):
        run("attribute", "--index", "idx", "--query", LINES[5], "--hf-model", "moved")


def test_rates_between_the_steps_of_the_log(here):
    path = here / "out/checkpoint-6/trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"] = [{"step": 1, "learning_rate": 0.4}, {"step": 5, "learning_rate": 0.2, "loss": 1.0},
                            {"step": 5, "eval_loss": 3.0}]  # fmt: skip
    path.write_text(json.dumps(state))
    assert checkpoints_in(here / "out", gpt2())[1] == pytest.approx([0.35, 0.25, 0.2])
    path.write_text(json.dumps(state | {"log_history": []}))
    assert checkpoints_in(here / "out", gpt2())[1] is None
    path.write_text(json.dumps([]))
    refused(r"trainer_state.json is not what Trainer writes", checkpoints_in, here / "out", gpt2())


def test_other_methods_average_checkpoints(here):
    run("build --hf-model out --data train.jsonl --out idx --method trak --checkpoints out")
    assert Index.open("idx").manifest.checkpoint_weights == [1 / 3] * 3
    assert "4 examples" in run("finish", "idx")


def test_weights_in_several_files(here):
    from transformers import AutoModelForCausalLM

    whole = load_file("out/checkpoint-4/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained("out/checkpoint-4")
    Path("out/checkpoint-4/model.safetensors").unlink()
    model.save_pretrained("out/checkpoint-4", max_shard_size="6KB")
    assert len(list(Path("out/checkpoint-4").glob("model-*.safetensors"))) > 1
    checkpoints, _ = checkpoints_in(Path("out"), gpt2())
    assert set(checkpoints[1]) == set(whole)
    assert all(torch.equal(checkpoints[1][k], v) for k, v in whole.items())


def test_adapters(here):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("out/checkpoint-6")
    config = peft.LoraConfig(r=2, target_modules=["c_fc"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = peft.get_peft_model(base, config)
    states = {}
    for step in (10, 20):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora" in name:
                    p.normal_()
        states[step] = {k: v.clone() for k, v in model.state_dict().items()}
        model.save_pretrained(f"tuned/checkpoint-{step}")
        shutil.copy("out/checkpoint-6/trainer_state.json", f"tuned/checkpoint-{step}")
    checkpoints, _ = checkpoints_in(Path("tuned"), model)
    for state, step in zip(checkpoints, (10, 20)):
        assert set(state) == set(states[step])
        assert all(torch.equal(state[k], v) for k, v in states[step].items())
    refused("is an adapter, but the model has none", checkpoints_in, Path("tuned"), gpt2())


def test_folders_without_checkpoints(here):
    Path("empty").mkdir()
    with pytest.raises(UndeError, match="empty holds no checkpoint: expected folders checkpoint-100"):
        checkpoints_in(Path("empty"), gpt2())
    refused("nowhere holds no checkpoint", checkpoints_in, Path("nowhere"), gpt2())
    for name, file in (("b", "out/checkpoint-4"), ("a", "out/checkpoint-2")):
        shutil.copy(f"{file}/model.safetensors", f"empty/{name}.safetensors")
    assert [Path(c).name for c in checkpoints_in(Path("empty"), gpt2())[0]] == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert newest("empty") == "empty" and list(steps(Path("out"))) == [2, 4, 6]
    Path("out/checkpoint-4/model.safetensors").unlink()
    refused(r"checkpoint-4 holds no model.safetensors", checkpoints_in, Path("out"), gpt2())
