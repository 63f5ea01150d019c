"""The command line on a project of one's own, and the mistakes people make."""

import csv
import io
import json

import numpy as np
import pytest
from commands import invoke, run

from refusals import refused
from unde import Index, Weights, cli
from unde.evaluate import Bank, baseline_scores, lds, search
from unde.setup import Recipe


def opened(target):
    """The setup of a project, and its index."""
    setup = Recipe(target).make()
    return setup, Index.open("idx", model=setup.model, task=setup.task)


def test_attribute_prints_what_the_library_gives(built):
    setup, index = opened(built)
    expected = index.score(setup.eval_queries).top(3, Weights.load("w.json"))
    rows = json.loads(run(f"attribute {built} --index idx --weights w.json --top 3 --format json"))
    assert [r["index"] for r in rows] == expected.indices.flatten().tolist()
    assert np.allclose([r["score"] for r in rows], expected.values.flatten())
    assert rows[0]["id"] == f"row-{rows[0]['index']}"
    text = run("attribute", built, "--index", "idx", "--top", 3, "--format", "csv", "--opponents")
    table = list(csv.DictReader(io.StringIO(text)))
    lowest = index.score(setup.eval_queries).top(3, largest=False)
    assert [int(r["index"]) for r in table] == lowest.indices.flatten().tolist()


def bank_of(path, scores):
    """A bank whose models behave exactly as these scores predict."""
    options = {"utility": lambda predicted: {"eval": predicted}, "n_train": 60, "subsets": 8}
    Bank.run(path, train=lambda indices, seed: scores[:, indices].sum(1), **options)


def test_evaluate_measures_lds_against_a_bank(built):
    setup, index = opened(built)
    total = index.score(setup.eval_queries).total().numpy()
    bank_of("bank.npz", total)
    found = json.loads(run(f"evaluate {built} --index idx --bank bank.npz --weights w.json --format json"))
    assert found["unweighted"]["mean"] == pytest.approx(1.0)
    assert found["difference"]["mean"] == pytest.approx(found["weighted"]["mean"] - 1.0)
    expected = baseline_scores(setup.model, setup.task, setup.train_data, setup.eval_queries)
    bank, baselines = Bank.open("bank.npz"), found["baselines"]
    assert list(baselines) == ["hidden-state similarity", "loss"]
    for name, scores in expected.items():
        mean = lds(scores, bank.masks, bank.utility["eval"]).mean
        assert baselines[name]["mean"] == pytest.approx(mean)
        assert baselines[name]["difference"]["mean"] == pytest.approx(found["weighted"]["mean"] - mean)


def test_evaluate_says_when_a_baseline_wins(built):
    setup = Recipe(built).make()
    loss = baseline_scores(setup.model, setup.task, setup.train_data, setup.eval_queries)["loss"].numpy()
    bank_of("losses.npz", loss)
    said = " ".join(invoke("evaluate", built, "--index", "idx", "--bank", "losses.npz").split())
    assert "the baseline loss predicts the retrained models better than trak: LDS 100.0" in said
    assert "unweighted − baseline" in said and "hidden-state similarity" in said


def test_evaluate_searches_as_the_paper_does(built):
    setup, index = opened(built)
    scores = index.score(setup.eval_queries)
    bank_of("bank.npz", scores.total().numpy())
    line = f"evaluate {built} --index idx --bank bank.npz --search --out s.json"
    found = json.loads(run(f"{line} --format json"))
    bank = Bank.open("bank.npz")
    expected = search(scores, (bank.masks, bank.utility["eval"]))
    assert found["chosen"] == expected.best.setting and found["measure"] == "LDS"
    assert found["unweighted"]["mean"] == pytest.approx(1.0)
    assert np.allclose(Weights.load("s.json").values, expected.weights.values)
    refused("leave out --weights", run, *line.split(), "--weights", "w.json")
    refused("add --search, or leave it out", run, *line.replace(" --search", "").split())


def test_bench_tells_a_ratio(project):
    text = run("bench", f"{project}:make", "--batch-size", 30, "--runs", 2)
    assert "of a plain pass" in text and "2 interleaved runs over 120 examples" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learn {}:overlapping --index idx --queries learn", "learn_queries are also in eval_queries"),
        ("attribute {}:make --index idx --weights w.json --queries learn", "learned on 15 of these queries"),
        ("attribute {}:make --index idx --format jsn", "Did you mean 'json'"),
        ("attribute {}:make --index idx --method trakk", "Did you mean 'trak'"),
        ("build {}:make --out i --engine rays", "unknown executor 'rays': expected 'serial', 'processes:4'"),
        *((f"build {{}}:make --out i --engine array --worker {w}", "such as 3/64") for w in ("3", "4/3", "x/3", "1/0")),
        ("build {}:make --out i --engine array", "which worker is this"),
    ],
)  # fmt: skip
def test_mistakes_are_named(built, project, line, message):
    refused(message, run, line.format(project))


def test_an_error_is_one_line_and_exit_code_2(project, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["unde", "build", "no_colon", "--out", "idx"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and "Traceback" not in printed
    assert "expected MODULE:FUNCTION" in printed


def assert_same_index(*folders):
    one, two = (Index.open(folder) for folder in folders)
    assert one.manifest == two.manifest
    shards = [sorted((index.folder / "shards").iterdir()) for index in (one, two)]
    assert [p.read_bytes() for p in shards[0]] == [p.read_bytes() for p in shards[1]]


def test_several_processes_build_the_same_index(built):
    run(f"build {built} --out again --projection none --batch-size 16 --engine processes:2")
    assert_same_index("idx", "again")


def test_array_workers_and_a_command_that_finishes(built, monkeypatch):
    monkeypatch.setattr("unde.gradients.feature_pass.MOST", 4)
    monkeypatch.setattr("unde.index.sizes.SHARD_PASSES", 2)
    run("build", built, "--out", "whole", "--projection", "none", "--threads", 1)
    common = ("build", built, "--out", "parts", "--projection", "none", "--threads", 1)
    said = run(*common, "--engine", "array", "--worker", "1/3")
    assert "this worker has done its share" in said
    assert said.strip().endswith("When all workers have ended: unde finish parts")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")  # of 5 to 7
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "3")
    run(*common, "--engine", "array")
    refused("shards are missing", Index.open, "parts")
    assert "60 examples" in run("finish", "parts")
    assert_same_index("whole", "parts")
    assert len(Index.open("parts").manifest.shards) > 3


def test_asked_in_several_processes(built):
    one = run("attribute", built, "--index", "idx", "--top", 7, "--format", "csv")
    many = run("attribute", built, "--index", "idx", "--top", 7, "--format", "csv", "--engine", "processes:2")
    assert many == one
