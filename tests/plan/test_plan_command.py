"""The command `unde plan` and the table it prints."""

import json
import re
from functools import partial

import pytest
import torch
from commands import invoke
from torch import nn

from unde import Setup, UndeError
from unde.setup import Recipe
from unde.tasks import Classification
from zoo import encoder, t5

SIZES = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 50}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("gpt2")
    GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return folder


run = partial(invoke, "plan")


def test_a_config(config):
    """No weights: bytes alone."""
    given = ["--hf-config", config, "--examples", 1000, "--projection", "kron(4)"]
    made = json.loads(run(*given, "--store-dtype", "float16", "--format", "json"))
    parameters = 50 * 16 + 32 * 16 + 16 * 48 + 48 + 16 * 16 + 16 + 2 * 16 * 64 + 64 + 16 + 3 * 2 * 16
    assert made["totals"]["parameters"] == parameters
    assert made["totals"]["features"] == 16 * 16  # four matrices and two tables, four biases, six of norms
    assert made["disk"]["features"] == 1000 * (2 * 256 + 16)
    assert made["timing"] is None
    table = run(*given[:1], config / "config.json", *given[2:], "--exclude", "wte|wpe")
    assert table.startswith("GPT2LMHeadModel in float32: 1,000 examples; trak, kron(4)")
    assert re.search(r"^2 × transformer\.h\.\*\.ln_\* +64 +64$", table, re.MULTILINE)
    assert re.search(rf"^all 7 +{parameters - 50 * 16 - 32 * 16:,} +224$", table, re.MULTILINE)


@pytest.mark.parametrize(
    "build",
    [encoder("Bert", "MaskedLM"), encoder("Bert", "SequenceClassification", num_labels=5), t5(num_layers=1)],
    ids=["masked", "sequence", "t5"],
)
def test_configs_of_other_kinds(tmp_path, build):
    model = build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    made = json.loads(run("--hf-config", tmp_path, "--examples", 5, "--method", "tracin", "--format", "json"))
    assert made["model"] == type(model).__name__
    assert made["totals"]["parameters"] == sum(p.numel() for p in model.parameters())


def setup():
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    return Setup(model, Classification(), (torch.randn(50, 6), torch.randint(3, (50,))))


def test_a_setup_and_a_kernel_beyond_the_budget(monkeypatch):
    monkeypatch.setattr(Recipe, "make", lambda recipe: setup())
    made = json.loads(run("mine:setup", "--projection", "none", "--workers", 3, "--format", "json"))
    assert (made["examples"], made["method"]["name"], made["workers"]) == (50, "trak", 3)
    assert made["totals"]["features"] == made["totals"]["parameters"] == 6 * 20 + 20 + 60 + 3
    assert made["totals"]["minutes"] > 0 and made["totals"]["memory"] > 2**20
    table = run("mine:setup", "--projection", "none", "--workers", 3)
    assert re.search(r"^time, 3 workers +\d", table, re.MULTILINE)
    assert re.search(r"^peak memory of a process +[\d.]+ [MG]B$", table, re.MULTILINE)
    assert re.search(r"^parameter tensors +4 by layer rules$", table, re.MULTILINE)
    assert "note:" not in table
    given = ["mine:setup", "--method", "trak", "--projection", "none", "--memory"]
    needs = 16 * 50**2  # dual: as many examples squared
    assert "note: the kernel would stop with an error: the N × N kernel" in run(*given, needs - 1)
    assert "note" not in run(*given, needs)


def test_what_a_budget_buys(tmp_path):
    from transformers import GPT2Config

    GPT2Config(**(SIZES | {"n_embd": 64}), bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    given = ["--hf-config", tmp_path, "--examples", 10**5]
    whole = run(*given, "--method", "auto", "--projection", "auto", "--disk", "20GB").splitlines()
    assert whole[1].startswith("chosen: method ekfac (language); projection none: ")
    less = run(*given, "--disk", "1GB").splitlines()
    assert less[0].endswith("ekfac, factored(4), stored in factored(4)")
    assert "of --disk 1GB (with --disk 2GB: factored(8))" in less[1]
    assert (
        run(*given, "--projection", "kron(16)").splitlines()[1].startswith("chosen: method ekfac (language)")
    )


NOT_ONE = "expected one of three things to plan for"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], f"{NOT_ONE}: MODULE:FUNCTION .* --hf-model with --data, or --hf-config"),
        (["mine:setup", "--hf-config", "x"], NOT_ONE),
        (["mine:setup", "--hf-model", "x"], NOT_ONE),
        (["--hf-model", "x", "--hf-config", "x"], NOT_ONE),
        (["--data", "x", "--hf-config", "x"], NOT_ONE),
        (["mine:setup", "--seq-len", 4], "mine:setup and --seq-len: give MODULE:FUNCTION, or --hf-model"),
        (["--hf-model", "x"], "--hf-model x needs --data FILE"),
        (["--data", "x"], "--data x needs --hf-model DIR"),
        (["--hf-config", "nowhere", "--examples", 5], "nowhere does not exist.*Nothing is downloaded"),
        (["--hf-config", "CONFIG"], "--examples is missing"),
        (["--hf-config", "CONFIG", "--examples", 5, "--disk", "1kB"], "no features of trak fit --disk 1kB"),
        (["--hf-config", "CONFIG", "--examples", 5, "--disk", "some"], "cannot read disk 'some'"),
        (["--hf-config", "CONFIG", "--format", "xml"], "unknown format 'xml'"),
        (["--hf-config", "OTHER", "--examples", 5], "no language model can be made from"),
        (["--hf-config", "BROKEN", "--examples", 5], "no language model can be made from"),
    ],
)
def test_errors(arguments, said, config, tmp_path):
    (tmp_path / "other.json").write_text('{"model_type": "vit"}')
    (tmp_path / "broken.json").write_text("{")
    places = {"CONFIG": config, "OTHER": tmp_path / "other.json", "BROKEN": tmp_path / "broken.json"}
    with pytest.raises(UndeError, match=said):
        run(*(places.get(a, a) for a in arguments))
