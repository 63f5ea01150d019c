"""The command line on a user's own project, from build to report, and the mistakes people make."""

import csv
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from unde import Index, UndeError, Weights, cli
from unde.evaluate import Bank
from unde.project import load

PROJECT = """
import torch
import unde

def make():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return unde.Setup(model, unde.tasks.Classification(), (x[:60], y[:60]),
                        learn_queries=(x[60:75], y[60:75]), eval_queries=(x[75:], y[75:]),
                        ids=[f"row-{i}" for i in range(60)])

def large():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(715, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    setup = make()
    setup.train_data, setup.ids = (x[:700], y[:700]), None
    setup.learn_queries, setup.eval_queries = (x[700:708], y[700:708]), (x[708:], y[708:])
    return setup

def overlapping():
    setup = make()
    setup.learn_queries = setup.eval_queries
    return setup

def nothing():
    return 3

def marked():
    setup = make()
    setup.contributors = {"style": torch.ones(3, 60, dtype=bool)}
    return setup
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    name = f"project_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def built(project):
    run("build", f"{project}:make", "--out", "idx", "--projection", "none", "--batch-size", 16)
    learn = (
        "learn",
        f"{project}:make",
        "--index",
        "idx",
        "--out",
        "w.json",
        "--queries",
        "learn",
        "--no-trust",
    )
    run(*learn, "--k", 5, "--weight-decay", 0.1)
    return f"{project}:make"


def test_attribute_prints_what_the_library_gives(built):
    setup = load(built)
    index = Index.open("idx", model=setup.model, task=setup.task)
    expected = index.score(setup.eval_queries).top(3, Weights.load("w.json"))
    rows = json.loads(
        run("attribute", built, "--index", "idx", "--weights", "w.json", "--top", 3, "--format", "json")
    )
    assert [r["index"] for r in rows] == expected.indices.flatten().tolist()
    assert np.allclose([r["score"] for r in rows], expected.values.flatten())
    assert rows[0]["id"] == f"row-{rows[0]['index']}"
    text = run("attribute", built, "--index", "idx", "--top", 3, "--format", "csv", "--opponents")
    table = list(csv.DictReader(io.StringIO(text)))
    lowest = index.score(setup.eval_queries).top(3, largest=False)
    assert [int(r["index"]) for r in table] == lowest.indices.flatten().tolist()


def test_evaluate_measures_lds_against_a_bank(built):
    setup = load(built)
    index = Index.open("idx", model=setup.model, task=setup.task)
    total = index.score(setup.eval_queries).total().numpy()

    Bank.run(  # a bank whose models behave exactly as the unweighted scores predict
        "bank.npz",
        train=lambda indices, seed: total[:, indices].sum(1),
        utility=lambda predicted: {"eval": predicted},
        n_train=60,
        subsets=8,
    )
    found = json.loads(
        run(
            "evaluate",
            built,
            "--index",
            "idx",
            "--bank",
            "bank.npz",
            "--weights",
            "w.json",
            "--format",
            "json",
        )
    )
    assert found["unweighted"]["mean"] == pytest.approx(1.0)
    assert found["difference"]["mean"] == pytest.approx(found["weighted"]["mean"] - 1.0)


def test_report_shows_queries_and_both_ways(built):
    run("report", built, "--index", "idx", "--weights", "w.json", "--out", "page.html", "--first", 2)
    page = Path("page.html").read_text()
    assert "unweighted" in page and "weighted" in page and "row-" in page
    assert "http://" not in page and "https://" not in page


def test_a_report_of_several_named_sets(built):
    groups = Weights.load("w.json").groups
    for name, values in (("a.json", [0.5, 1.5]), ("b.json", [1.9, 0.1])):
        Weights(torch.tensor(values), groups).save(name)
    options = ["--index", "idx", "--out", "page.html", "--first", 2, "--top", 3]
    run("report", built, *options, "--weights", "left=a.json", "--weights", "right=b.json")
    page = Path("page.html").read_text()
    first, second = page.split('<article class="query')[1:3]
    for article in (first, second.partition("</article>")[0]):
        assert re.findall("<h4>(.*?)</h4>", article) == ["unweighted", "left", "right"]
    assert re.findall('"weight-set"><h3>(.*?)</h3>', page) == ["left", "right"]
    setup = load(built)
    scores = Index.open("idx", model=setup.model, task=setup.task).score(setup.eval_queries)
    best = scores.top(3, Weights.load("b.json")).ids[0]
    assert re.findall('class="id">(.*?)<', first.partition("<h4>right")[2])[:3] == best


def test_one_named_set_and_paths_with_an_equals_sign(built):
    Path("lr=0.1").mkdir()
    for path in ("k=5.json", "lr=0.1/w.json"):  # paths, as they always were
        Path(path).write_text(Path("w.json").read_text())
        run("report", built, "--index", "idx", "--weights", path, "--out", "page.html", "--first", 1)
        assert "<h4>weighted</h4>" in Path("page.html").read_text()
    run("report", built, "--index", "idx", "--weights", "late=w.json", "--out", "page.html", "--first", 1)
    assert "<h4>late</h4>" in Path("page.html").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a=w.json", "a=w.json"], "--weights a=… is given twice"),
        (["a=w.json", "w.json"], "--weights w.json has no name: .* --weights subject=w.json"),
        (["unweighted=w.json"], "'unweighted' names the scores without weights"),
        (["=w.json"], "cannot read --weights =w.json: expected FILE or NAME=FILE"),
        (["a="], "cannot read --weights a=:"),
        (["a=nowhere.json"], "no weights file at 'nowhere.json'"),
        (["runs/lr=0.1/w.json"], "no weights file at 'runs/lr=0.1/w.json'"),
        (["a=idx"], "idx is a folder: expected a file of weights"),
        (["a=w.json", "b=other.json"], "other.json: weights do not match the groups: no weight for '0'"),
    ],
)
def test_weights_that_a_report_cannot_use(built, given, says):
    Weights.uniform(["x", "y"]).save("other.json")
    arguments = [part for text in given for part in ("--weights", text)]
    with pytest.raises(UndeError, match=says):
        run("report", built, "--index", "idx", "--out", "page.html", *arguments)
    assert not Path("page.html").exists()


def test_contributors_of_another_shape_are_refused(built, project):
    with pytest.raises(
        UndeError, match=r"contributors 'style' are bool of shape \(3, 60\): expected .*\(15, 60\)"
    ):
        run("report", f"{project}:marked", "--index", "idx")


def test_bench_tells_a_ratio(project):
    text = run("bench", f"{project}:make", "--batch-size", 30, "--runs", 2)
    assert "of a plain pass" in text and "2 interleaved runs over 120 examples" in text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_colon", "expected MODULE:FUNCTION"),
        ("nowhere_at_all:make", "no module 'nowhere_at_all' here"),
        ("{project}:mkae", "Did you mean 'make'"),
        ("{project}:nothing", "gave a int: expected an unde.Setup"),
    ],
)
def test_targets_that_lead_nowhere(project, target, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        run("build", target.format(project=project), "--out", "idx")


def test_roles_that_overlap_are_refused(built, project):
    with pytest.raises(ValueError, match="learn_queries are also in eval_queries"):
        run("learn", f"{project}:overlapping", "--index", "idx", "--queries", "learn")


def test_weights_are_refused_on_queries_they_were_learned_on(built):
    with pytest.raises(ValueError, match="learned on 15 of these queries"):
        run("attribute", built, "--index", "idx", "--weights", "w.json", "--queries", "learn")


def test_unknown_names_suggest_the_nearest(built):
    with pytest.raises(ValueError, match="Did you mean 'json'"):
        run("attribute", built, "--index", "idx", "--format", "jsn")
    with pytest.raises(ValueError, match="Did you mean 'trak'"):
        run("attribute", built, "--index", "idx", "--method", "trakk")


def test_an_error_is_one_line_and_exit_code_2(project, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["unde", "build", "no_colon", "--out", "idx"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and "Traceback" not in printed


def test_every_command_has_help_with_an_example():
    for name in ("demo", "plan", "build", "learn", "attribute", "evaluate", "report", "bench"):
        assert f"unde {name}" in CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).stdout


def test_models_on_the_command_line_are_left_as_they_were(project):
    setup = load(f"{project}:make")
    before = {k: v.clone() for k, v in setup.model.state_dict().items()}
    run("build", f"{project}:make", "--out", "idx")
    assert all(torch.equal(v, before[k]) for k, v in load(f"{project}:make").model.state_dict().items())


@pytest.fixture
def large(project):
    run("build", f"{project}:large", "--out", "idx", "--projection", "none", "--method", "tracin")
    return f"{project}:large"


def invoke(*arguments):
    """What is printed on both streams; notes go to stderr."""
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_learn_with_nothing_but_an_index(large, monkeypatch):
    notes = []
    monkeypatch.setattr("unde.console.note", notes.append)
    text = run("learn", "--index", "idx")
    assert f"using {large}, as remembered by idx" in notes
    assert any("find their original" in note or "stay uniform" in note for note in notes)
    setup = load(large)
    index = Index.open("idx", model=setup.model, task=setup.task, train_data=setup.train_data)
    weights = Weights.load("weights.json")
    assert weights.values.tolist() == index.learn_weights().values.tolist()
    assert weights.provenance["how"] == "self-retrieval"
    assert str(index.trust(weights)) in text and text.rstrip().endswith(f"weights.json: {weights}")


def test_learn_passes_its_options_on(large):
    options = ("--index", "idx", "--examples", 100, "--seed", 3, "--perturb", "weights", "--out", "w.json")
    text = run("learn", *options, "--no-trust")
    assert "find their original" not in text and text.startswith("w.json: ")
    told = Weights.load("w.json").provenance
    assert told["seed"] == 3 and len(told["examples"]["learn"]) == 100
    assert list(told["strength"]) == ["noise on the model's weights"]
    # A page shows the curve of the perturbation that weights were learned with.
    run("report", "--index", "idx", "--weights", "w.json", "--out", "page.html", "--first", 1)
    assert (
        "Copies that find their original: noise on the model&#x27;s weights" in Path("page.html").read_text()
    )


def test_learn_from_the_queries_of_a_setup(large):
    run("learn", "--index", "idx", "--queries", "learn", "--k", "5", "--weight-decay", "0.5", "--no-trust")
    told = Weights.load("weights.json").provenance
    assert (told["k"], told["weight_decay"], told["queries"]) == (5, 0.5, 8)
    text = run("learn", large, "--index", "idx", "--queries", "learn", "--k", "auto", "--out", "auto.json")
    assert "copies that find their original" in text
    tried = Weights.load("auto.json").provenance["candidates"]
    assert len({c["k"] for c in tried}) > 1 and len({c["weight_decay"] for c in tried}) > 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--k 3", "--k belongs to learning from queries of your own: add --queries FILE .*--queries learn"),
        ("--loss top-k --weight-decay 1", "--weight-decay, --loss belong to learning from queries"),
        ("--queries learn --examples 50", "--examples belongs to learning from the index alone"),
        ("--perturb pixels", "unknown perturb 'pixels'"),
        ("--queries learn --k three", "--k is 'three': expected a whole number, or auto"),
        ("--queries learn --weight-decay x", "--weight-decay is 'x': expected a number, or auto"),
        ("--queries eval", "queries as texts go with --hf-model: .* brings its own"),
        ("--out nowhere/w.json", "no folder nowhere for --out nowhere/w.json"),
    ],
)
def test_options_that_learn_refuses(large, options, says):
    with pytest.raises(UndeError, match=says):
        run("learn", "--index", "idx", *options.split())
    assert not Path("weights.json").exists()


def test_a_report_shows_trust_unless_told_not_to(large):
    Weights(torch.tensor([0.2, 1.8]), Weights.load(_learned()).groups).save("w.json")
    common = ("report", "--index", "idx", "--weights", "w.json", "--first", 1, "--out")
    run(*common, "page.html")
    page = Path("page.html").read_text()
    assert 'href="#trust"' in page and "Content-Security-Policy" in page
    section = page.partition('<section id="trust"')[2].partition("</section>")[0]
    assert section.count("<polyline") == 2 and "weighted" in section
    assert "http://" not in page and "https://" not in page
    run(*common, "plain.html", "--no-trust")
    assert "trust-title" not in Path("plain.html").read_text()


def _learned():
    run("learn", "--index", "idx", "--no-trust")
    return "weights.json"


def test_a_report_on_few_examples_goes_without_trust(built, monkeypatch):
    notes = []
    monkeypatch.setattr("unde.console.note", notes.append)
    run("report", built, "--index", "idx", "--out", "page.html", "--first", 1)
    assert "trust-title" not in Path("page.html").read_text()
    assert any("no trust curve: 60 different training examples are too few" in note for note in notes)


def test_commands_remember_what_an_index_was_built_from(built):
    said = ("attribute", built, "--index", "idx", "--format", "json")
    unsaid = ("attribute", "--index", "idx", "--format", "json")
    assert json.loads(run(*unsaid)) == json.loads(run(*said))
    run("report", "--index", "idx", "--first", 1, "--no-trust", "--out", "page.html")
    assert "row-" in Path("page.html").read_text()
    assert f"using {built}, as remembered by idx" in " ".join(invoke(*unsaid).split())


def test_a_remembered_name_is_found_as_a_typed_one_is(built, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("sys.path", [p for p in sys.path if Path(p).resolve() != tmp_path.resolve()])
    for name in [m for m in sys.modules if m.startswith("project_")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UndeError, match=r"no module 'project_.* here"):
        run("attribute", "--index", tmp_path / "idx")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("os:abort", "os is a part of Python"),
        ("os.path:x", "os is a part of Python"),
        ("evil", "it is no MODULE:FUNCTION"),
        ("a b:c", "it is no MODULE:FUNCTION"),
        ("../evil:make", "it is no MODULE:FUNCTION"),
        ("idx.evil:make", "idx.evil lies in the index itself"),
    ],
)
def test_names_in_a_foreign_index_are_not_run(built, target, why):
    Path("idx/evil.py").write_text("raise SystemExit('run')")
    Path("idx/source.json").write_text(json.dumps({"target": target}))
    with pytest.raises(UndeError, match=f"which is not run without being asked for .*{why}"):
        run("learn", "--index", "idx")


def test_modules_inside_the_index_are_not_run_from_there(built, monkeypatch):
    Path("idx/evil.py").write_text("raise SystemExit('run')")
    Path("idx/source.json").write_text(json.dumps({"target": "evil:make"}))
    monkeypatch.chdir("idx")
    with pytest.raises(UndeError, match="evil lies in the index itself"):
        run("learn", "--index", ".")
