"""`unde calibrate`, and the commands that use what it found."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import TRAINED, add_project, invoke, run

from refusals import refused
from unde import UndeError
from unde.evaluate import Bank
from unde.index.calibration import Calibration
from unde.setup import Recipe


@pytest.fixture
def project(tmp_path, monkeypatch):
    name = add_project(tmp_path, monkeypatch, TRAINED, "calibrated")
    run("build", f"{name}:trained", "--out", "idx", "--method", "ekfac", "--projection", "none")
    return name


def test_calibrate_and_ask(project):
    text = run("calibrate", f"{project}:trained", "--index", "idx", "--halves", 4)
    assert "<- chosen" in text and "6 trainings" in text and "settings judged" in text
    found = Calibration.load(Path("idx/calibration.json"))
    assert found.halves == 4 and set(found.baselines) == {"hidden-state similarity", "loss"}
    said = " ".join(invoke("attribute", f"{project}:trained", "--index", "idx", "--top", 2).split())
    assert f"calibrated: {found}" in said
    without = invoke("attribute", f"{project}:trained", "--index", "idx", "--top", 2, "--uncalibrated")
    assert "calibrated:" not in without
    run("report", f"{project}:trained", "--index", "idx", "--out", "r.html", "--first", 1)
    page = Path("r.html").read_text()
    assert "Calibration: how good are these scores?" in page and page.count('class="measure after"') == 1
    assert str(found) in page
    run(f"report {project}:trained --index idx --out u.html --first 1 --uncalibrated")
    assert "Calibration: how good" not in Path("u.html").read_text()


def bank(setup, sets):
    rng = np.random.default_rng(0)
    masks = rng.random((8, 60)) < 0.5
    utility = {name: rng.random((8, 1, 15)) for name in sets}
    return Bank.run(
        "bank.npz", train=lambda indices, seed: indices, n_train=60, subsets=8,
        utility=lambda model: {name: utility[name][int(model.sum()) % 8, 0] for name in sets},
    ) and masks  # fmt: skip


def test_a_bank_trains_nothing_and_queries_that_calibrated_do_not_evaluate(project):
    bank(Recipe(f"{project}:trained").make(), ("learn", "eval"))
    base = ("calibrate", f"{project}:trained", "--index", "idx", "--bank", "bank.npz")
    refused("say which", run, *base)
    assert "nothing was trained" in run(*base, "--utility", "learn")
    table = run("evaluate", f"{project}:trained", "--index", "idx", "--bank", "bank.npz", "--format", "json")
    assert "unweighted" in json.loads(table[table.index("{") :])
    run(*base, "--queries", "eval", "--utility", "eval")
    with pytest.raises(UndeError, match=r"calibrated on 15 of these queries.*--uncalibrated"):
        run("evaluate", f"{project}:trained", "--index", "idx", "--bank", "bank.npz")
    run("evaluate", f"{project}:trained", "--index", "idx", "--bank", "bank.npz", "--uncalibrated")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--how", "again"), "again"),
        (("--base", "gpt2"), "--base goes with --hf-model"),
        (("--bank", "bank.npz"), "there is no bank"),
        (("--queries", "test"), "unknown queries 'test'"),
    ],
)
def test_refused(project, options, says):
    refused(says, run, "calibrate", f"{project}:trained", "--index", "idx", *options)


def test_a_setup_that_cannot_train(project):
    text = Path(f"{project}.py").read_text()
    Path(f"{project}_bare.py").write_text(text.replace("setup.train = train", "pass"))
    with pytest.raises(
        UndeError, match=r"there is no way to train: .* gives none. Set Setup\(\.\.\., train="
    ):
        run("calibrate", f"{project}_bare:trained", "--index", "idx")
