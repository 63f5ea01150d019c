"""`unde learn` on a project of one's own, and the options it refuses."""

from pathlib import Path

import pytest
from commands import run

from refusals import refused
from unde import Index, Weights
from unde.setup import Recipe


def test_learn_with_nothing_but_an_index(large, monkeypatch):
    notes = []
    monkeypatch.setattr("unde.console.note", notes.append)
    text = run("learn", "--index", "idx")
    assert f"using {large}, as remembered by idx" in notes
    assert any("find their original. Only `unde calibrate` tells" in note for note in notes)
    setup = Recipe(large).make()
    index = Index.open("idx", model=setup.model, task=setup.task, train_data=setup.train_data)
    weights = Weights.load("weights.json")
    assert weights.values.tolist() == index.learn_weights().values.tolist()
    assert weights.provenance["how"] == "Algorithm 1 on perturbed training examples"
    assert text.rstrip().endswith(f"weights.json: {weights}")


def test_learn_passes_its_options_on(large):
    options = ("--index", "idx", "--examples", 100, "--seed", 3, "--perturb", "weights", "--out", "w.json")
    text = run("learn", *options)
    assert "find their original" not in text and text.startswith("w.json: ")
    told = Weights.load("w.json").provenance
    assert told["seed"] == 3 and len(told["examples"]["learn"]) == 100
    assert list(told["strength"]) == ["noise on the model's weights"]


def test_learn_from_the_queries_of_a_setup(large):
    options = (
        "--objective top-k-bottom-k --k 4 --weight-decay 0.25 --epochs 3 --lr 0.02 --penalty 0.5 --noise 0.1"
    )
    run("learn", "--index", "idx", "--queries", "learn", *options.split())
    told = Weights.load("weights.json").provenance
    asked = {
        "k": 4,
        "weight_decay": 0.25,
        "epochs": 3,
        "lr": 0.02,
        "penalty": 0.5,
        "noise": 0.1,
        "queries": 8,
    }
    assert {name: told[name] for name in asked} == asked and told["objective"]["name"] == "top-k-bottom-k"
    run("learn", large, "--index", "idx", "--queries", "learn", "--solver", "fixed-point")
    told = Weights.load("weights.json").provenance
    assert (told["solver"], told["k"], told["weight_decay"]) == ("fixed-point", 5, 0.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--k 3", "--k belongs to learning from queries: add --queries FILE .*--queries learn"),
        ("--objective top-k --weight-decay 1", "--objective, --weight-decay belong to learning from queries"),
        ("--queries learn --examples 50", "--examples belongs to learning from the index alone"),
        ("--perturb pixels", "unknown perturb 'pixels'"),
        ("--queries learn --solver newton", "unknown solver 'newton'"),
        ("--queries eval", "queries as texts go with --hf-model: .* brings its own"),
        ("--out nowhere/w.json", "no folder nowhere for --out nowhere/w.json"),
    ],
)
def test_options_that_learn_refuses(large, options, says):
    refused(says, run, "learn", "--index", "idx", *options.split())
    assert not Path("weights.json").exists()
