"""Code that comes with a model is run on request alone, pickles never, and an index chooses nothing silently."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import hf_toy
import pytest
import torch
from typer.testing import CliRunner

from refusals import refused
from unde import UndeError, cli
from unde.integrations.language import hf_setup, load_model
from unde.integrations.source import ModelSource, make_setup
from unde.store.files import settings_checksum

CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path({marker!r}).touch()

class OwnConfig(GPT2Config):
    model_type = "own-gpt2"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """A folder whose config asks for code of its own, which leaves a mark when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = hf_toy.save(tmp_path / "model")
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "was run")))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own-gpt2",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    hf_toy.write_jsonl(tmp_path / "train.jsonl", hf_toy.LINES)
    monkeypatch.chdir(tmp_path)
    return folder


def invoke(*arguments):
    """Whoever is asked says yes."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input="y\ny\ny\n")


NAMED = ("--hf-model", "model", "--data", "train.jsonl")
REFUSED = "comes with Python code of its own, which is not run"


def test_code_is_run_if_it_is_asked_for_on_this_very_line(with_code, tmp_path):
    marker = tmp_path / "was run"
    for line in (
        ("build", *NAMED, "--out", "idx"),
        ("plan", *NAMED),
        ("plan", "--hf-config", "model", "--examples", 3, "--seq-len", 8),
        ("bench", *NAMED),
    ):
        result = invoke(*line)
        assert isinstance(result.exception, UndeError) and REFUSED in str(result.exception), result.output
        assert not marker.exists()
    result = invoke("build", *NAMED, "--out", "idx", "--trust-remote-code", "--projection", "kron(2)")
    assert result.exit_code == 0, result.exception
    assert marker.exists()
    marker.unlink()
    for name in [m for m in sys.modules if "transformers_modules" in m]:
        del sys.modules[name]

    # The index remembers the model, and not that it was trusted, whatever its file says.
    settings = json.loads(Path("idx/source.json").read_text())
    assert "trust_remote_code" not in settings
    settings |= {"trust_remote_code": True}
    Path("idx/source.json").write_text(json.dumps(settings | {"checksum": settings_checksum(settings)}))
    ask = ("attribute", "--index", "idx", "--query", "The mills are busy.")
    result = invoke(*ask)
    assert isinstance(result.exception, UndeError) and REFUSED in str(result.exception)
    result = invoke(*ask, "--trust-remote-code")
    assert isinstance(result.exception, UndeError)
    assert "code is not run because idx names a model" in str(result.exception)
    assert not marker.exists()
    assert invoke(*ask, "--trust-remote-code", "--hf-model", "model").exit_code == 0
    assert marker.exists()


def test_a_tokenizer_with_code(tmp_path, monkeypatch):
    folder = hf_toy.save(tmp_path / "model")
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "was run")))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
    }
    path.write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *a: "y")
    with suppress(UndeError):  # transformers may have one of its own that fits
        hf_setup(folder, hf_toy.LINES)
    assert not (tmp_path / "was run").exists()


def test_other_processes_are_told(with_code, tmp_path):
    said = {"model": str(with_code), "data": str(tmp_path / "train.jsonl")}
    assert ModelSource(**said).recipe.arguments == said
    trusted = ModelSource(**said, trust_remote_code=True).recipe
    assert trusted.arguments == said | {"trust_remote_code": True}
    assert type(make_setup(**trusted.arguments).model).__name__ == "OwnModel"
    refused(REFUSED, make_setup, **said)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("was run"),))


@pytest.mark.parametrize("adapter", [False, True])
def test_pickles_are_never_loaded(tmp_path, monkeypatch, adapter):
    monkeypatch.chdir(tmp_path)
    folder = hf_toy.save(tmp_path / "model")
    broken, name = folder, "model"
    if adapter:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])
        broken, name = tmp_path / "adapter", "adapter_model"
        peft.get_peft_model(load_model(str(folder)), config).save_pretrained(broken)
        assert load_model(str(broken))  # as it should be
    (broken / f"{name}.safetensors").unlink()
    torch.save(Evil(), broken / f"{'pytorch_' * (not adapter)}{name}.bin")
    for trusted in (False, True):
        refused("pickles are never loaded", load_model, str(broken), trusted)
    assert not Path("was run").exists()


def test_what_an_index_chooses_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_toy.save(tmp_path / "model")
    hf_toy.write_jsonl(tmp_path / "train.jsonl", hf_toy.LINES)
    assert invoke("build", *NAMED, "--out", "idx", "--projection", "kron(2)").exit_code == 0
    said = " ".join(invoke("attribute", "--index", "idx", "--query", "The mills are busy.").output.split())
    assert (
        f"using the model {tmp_path}/model and the texts {tmp_path}/train.jsonl, as remembered by idx" in said
    )
    said = " ".join(
        invoke("attribute", *NAMED, "--index", "idx", "--query", "The mills are busy.").output.split()
    )
    assert "as remembered" not in said


def test_trust_belongs_to_a_model(tmp_path):
    result = invoke("build", "a:b", "--out", tmp_path / "idx", "--trust-remote-code")
    assert isinstance(result.exception, UndeError) and "goes with --hf-model" in str(result.exception)
