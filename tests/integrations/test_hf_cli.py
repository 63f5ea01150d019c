"""The command line on a Hugging Face model and files of texts, without Python: from build to report."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from commands import invoke, run
from hf_toy import LINES, save, write_jsonl
from typer.testing import CliRunner

from refusals import refused
from unde import Index, UndeError, Weights, cli
from unde.integrations.language import hf_setup

LEARN = ["The people of the west ask for roads.", "Peace with all nations, and honest trade."]
EVAL = ["The army and the navy are strong again.", "The grain of the north was good in spring."]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a model, texts, an index and weights, made with commands alone."""
    folder = tmp_path_factory.mktemp("project")
    save(folder / "model")
    write_jsonl(folder / "train.jsonl", LINES, "body")
    write_jsonl(folder / "learn.jsonl", LEARN, "body")
    write_jsonl(folder / "eval.jsonl", EVAL, "body")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        told = run(
            "build --hf-model model --data train.jsonl --text-field body --seq-len 24 --out idx "
            "--projection none --method tracin"
        )
        assert told.startswith("idx: ")
        learn = ("learn", "--index", "idx", "--queries", "learn.jsonl", "--out", "w.json")
        run(*learn, "--k", 3, "--weight-decay", 0.1)
    return folder


@pytest.fixture
def project(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    return prepared


def setup(**queries):
    return hf_setup("model", "train.jsonl", text_field="body", seq_len=24, **queries)


def test_attribute_prints_what_the_library_gives(project):
    here = setup(eval_queries="eval.jsonl")
    index = Index.open("idx", model=here.model, task=here.task, train_data=here.train_data)
    expected = index.score(here.eval_queries).top(3, Weights.load("w.json"))
    options = ("--index", "idx", "--queries", "eval.jsonl", "--weights", "w.json", "--top", 3)
    rows = json.loads(run("attribute", *options, "--format", "json"))
    assert [r["index"] for r in rows] == expected.indices.flatten().tolist()
    assert [r["score"] for r in rows] == pytest.approx(expected.values.flatten().tolist(), rel=1e-5)
    assert [r["id"] for r in rows] == [here.train_data.ids[r["index"]] for r in rows]
    assert (
        run("attribute", *options, "--format", "csv")
        .splitlines()[1]
        .startswith(f"0,1,1,{rows[0]['index']},{rows[0]['id']},")
    )
    table = run("attribute", *options)
    assert here.show is not None
    for query, name in zip(here.eval_queries, ("1", "2")):
        assert f"Query {name}: {here.show(query)}" in " ".join(table.split())
    assert [(r["query"], r["query_id"], r["query_text"]) for r in rows[::3]] == [
        (0, "1", EVAL[0]),
        (1, "2", EVAL[1]),
    ]
    assert [r["text"] for r in rows] == [here.show(here.train_data[r["index"]]) for r in rows]
    words = " ".join(re.sub("[│┃]", " ", table).split())
    for row in rows:
        assert row["id"] in words and f"{row['score']:+.3g}" in words
        assert here.show(here.train_data[row["index"]]).split()[0] in words


def test_a_query_on_the_command_line(project, tmp_path, monkeypatch):
    here = setup(eval_queries=["Trade [red]with[/red] the west"])
    index = Index.open("idx", model=here.model, task=here.task)
    expected = index.score(here.eval_queries).top(2)
    index_path = project / "idx"
    monkeypatch.chdir(tmp_path)  # what the index remembers holds from any folder
    options = ("attribute", "--index", index_path, "--top", 2, "--query", "Trade [red]with[/red] the west")
    rows = json.loads(run(*options, "--format", "json"))
    assert [r["index"] for r in rows] == expected.indices.flatten().tolist()
    assert "Query: Trade [red]with[/red] the west" in run(*options)
    two = json.loads(run(*options, "--query", "Peace and trade", "--format", "json"))
    assert [r["query"] for r in two] == [0, 0, 1, 1]
    assert [r["id"] for r in two[:2]] == [r["id"] for r in rows]
    # Nothing is learned or measured here, so that a training text may be asked about too.
    own = here.show(here.train_data[3]) if here.show else ""
    [first] = json.loads(
        run(*options[:3], "--top", 1, "--query", own, "--method", "tracin-cosine", "--format", "json")
    )
    assert first["index"] == 3 and first["score"] == pytest.approx(1.0, abs=1e-5)


def test_cut_queries_are_one_and_documents_are_wholes(project):
    """Queries are numbered as they were asked, however many sequences they make; scores of pieces are added up."""
    long = " and so ".join([LEARN[0], EVAL[1], LEARN[1], EVAL[0]])
    (project / "asked.jsonl").write_text(
        "".join(json.dumps({"id": name, "body": text}) + "\n" for name, text in (("a", EVAL[0]), ("b", long)))
    )
    here = setup(eval_queries="asked.jsonl")
    pieces = [i.rpartition(":")[0] for i in here.eval_queries.ids]
    assert pieces.count("a") == 1 and pieces.count("b") > 2
    index = Index.open("idx", model=here.model, task=here.task)
    total = index.score(here.eval_queries).total().double()
    asked = torch.stack([total[[p == name for p in pieces]].sum(0) for name in "ab"])
    options = ("attribute", "--index", "idx", "--queries", "asked.jsonl", "--query-field", "body", "--top", 3)
    rows = json.loads(run(*options, "--format", "json"))
    assert [(r["query"], r["query_id"]) for r in rows] == [(0, "a")] * 3 + [(1, "b")] * 3
    assert [r["query_text"] for r in rows[2:4]] == [EVAL[0], long]
    best = asked.sort(1, descending=True)
    assert [r["index"] for r in rows] == best.indices[:, :3].flatten().tolist()
    assert [r["score"] for r in rows] == pytest.approx(best.values[:, :3].flatten().tolist(), rel=1e-5)
    names = [i.rpartition(":")[0] for i in here.train_data.ids]
    whole = torch.stack([asked[:, [n == str(d + 1) for n in names]].sum(1) for d in range(len(LINES))], 1)
    run(*options, "--by", "document", "--out", "top.jsonl")
    rows = [json.loads(line) for line in (project / "top.jsonl").read_text().splitlines()]
    best = whole.sort(1, descending=True)
    assert (
        [int(r["id"]) - 1 for r in rows]
        == [r["index"] for r in rows]
        == best.indices[:, :3].flatten().tolist()
    )
    assert [r["score"] for r in rows] == pytest.approx(best.values[:, :3].flatten().tolist(), rel=1e-5)
    assert [r["text"] for r in rows] == [LINES[r["index"]] for r in rows]
    assert "Query b: " + long[:40] in " ".join(run(*options, "--by", "document").split())


def test_the_report_shades_tokens_that_sum_to_the_score(project):
    run("report --index idx --queries eval.jsonl --weights w.json --out r.html --top 2 --no-baselines")
    page = Path("r.html").read_text()
    assert "What made model do that?" in page
    assert "rows beside" in page and 'class="t plus l5"' in page and "learning a token" in page
    assert "Query </span>1:1" in page
    shown = re.findall(
        r'<span class="score">(.*?)</span>.*?class="passage shaded"[^>]*>(.*?)</(?:p|details)>', page
    )
    assert len(shown) >= 16
    for score, passage in shown:
        parts = re.findall(r'title="([^" ]+)', passage)
        number = [float(x.replace("−", "-")) for x in (score, *parts)]
        assert sum(number[1:]) == pytest.approx(number[0], abs=0.01 * sum(map(abs, number)))


def test_without_weights_there_is_one_column(project):
    options = ["--index", "idx", "--queries", "eval.jsonl", "--out", "one.html", "--first", 1, "--top", 1]
    run("report", *options, "--no-baselines")
    page = Path("one.html").read_text()
    assert 'class="rows"' in page and page.count("<article") == 1
    assert "show BM25" not in page
    run("report", *options)
    page = Path("one.html").read_text()
    assert 'class="rows compared"' in page and "show BM25" in page and "show hidden-state similarity" in page


@pytest.mark.parametrize("method", ["logra", "ekfac"])
def test_other_methods_and_packed_texts(project, tmp_path, method):
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress((project / "train.jsonl").read_bytes()))
    run(
        f"build --hf-model model --text-field body --projection 'kron(4)' --method {method}",
        *("--data", tmp_path / "train.jsonl.gz", "--out", tmp_path / "idx"),
    )
    rows = json.loads(
        run("attribute", "--index", tmp_path / "idx", "--query", EVAL[0], "--top", 8, "--format", "json")
    )
    assert sorted(r["id"] for r in rows) == [f"{n}:1" for n in range(1, 9)]  # one line, one sequence of 64
    assert Index.open(tmp_path / "idx").method.name == method


def test_a_plan_is_that_of_the_build(project, tmp_path):
    short = write_jsonl(tmp_path / "train.jsonl", ["Peace and trade."] * 5 + LINES[:3])
    model = ("--hf-model", "model", "--data", short, "--method", "tracin", "--batch-size", 5)
    told = json.loads(run("plan", *model, "--format", "json"))
    run("build", *model, "--out", tmp_path / "idx")
    index = Index.open(tmp_path / "idx")
    assert (told["examples"], told["totals"]["features"]) == (len(index), index.manifest.width)
    assert tuple(told["groups"]) == index.groups.names


def test_data_that_changed_or_went_away(project, tmp_path):
    data = write_jsonl(tmp_path / "train.jsonl", LINES[:3])
    run("build", "--hf-model", "model", "--data", data, "--out", tmp_path / "idx", "--method", "tracin")
    ask = ("attribute", "--index", tmp_path / "idx", "--query", EVAL[0], "--top", 1, "--format", "json")
    before = run(*ask)
    write_jsonl(data, [*LINES[:2], "Something else than was there at first."])
    refused(r"What differs: the training data \(example 2 has another content\)", run, *ask)
    data.unlink()
    refused(r"train.jsonl, which is gone: say where it is now \(--data\)", run, *ask)
    moved = write_jsonl(tmp_path / "moved.jsonl", LINES[:3])
    assert run(*ask, "--data", moved) == before


def test_queries_may_name_their_text_otherwise(project, tmp_path):
    other = write_jsonl(tmp_path / "eval.jsonl", EVAL, "speech")
    options = ("attribute", "--index", "idx", "--top", 1, "--format", "json", "--queries")
    refused(r"eval.jsonl, line 1: no field 'body', there is 'speech'.*--query-field", run, *options, other)
    assert run(*options, other, "--query-field", "speech") == run(*options, "eval.jsonl")


def test_training_examples_may_be_asked_about(project):
    out = invoke("attribute", "--index", "idx", "--queries", "train.jsonl", "--top", 1, "--format", "json")
    count = len(LINES)
    assert f"{count} of {count} queries are also training examples: 1, 2" in out
    assert run("leaks", "--index", "idx", "--queries", "train.jsonl", "--out", "l.html", "--csv", "l.csv")
    kinds = [line.split(",")[2] for line in Path("l.csv").read_text().splitlines()[1:]]
    assert kinds.count("exact duplicate") == len(setup().train_data)


def test_the_three_roles_stay_apart(project):
    with pytest.raises(UndeError, match="of the queries are also in the training data"):
        run("learn", "--index", "idx", "--queries", "train.jsonl", "--out", "no.json")
    count = len(setup(learn_queries="learn.jsonl").learn_queries)
    with pytest.raises(UndeError, match=rf"w.json was learned on {count} of these queries"):
        run("attribute", "--index", "idx", "--queries", "learn.jsonl", "--weights", "w.json")
    count = len(setup(learn_queries=LEARN[:1]).learn_queries)
    with pytest.raises(UndeError, match=rf"w.json was learned on {count} of these queries"):
        run("attribute", "--index", "idx", "--query", LEARN[0], "--weights", "w.json")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "build --out x",
            "name a model and its training data: MODULE:FUNCTION .* or --hf-model DIR with --data",
        ),
        ("build --out x --hf-model model", "--hf-model model needs --data FILE"),
        ("build --out x --data train.jsonl", "--data train.jsonl needs --hf-model DIR"),
        (
            "build a:b --out x --hf-model model --data train.jsonl",
            "a:b and --hf-model: give MODULE:FUNCTION, or",
        ),
        ("attribute a:b --index idx --seq-len 3", "a:b and --seq-len: give MODULE:FUNCTION, or"),
        (
            "evaluate a:b --index idx --queries eval.jsonl --bank b.npz",
            "queries as texts go with --hf-model: a:b brings its own",
        ),
        (
            "learn a:b --index idx --queries learn.jsonl",
            "queries as texts go with --hf-model: a:b brings its own",
        ),
        ("build model --out x", "expected MODULE:FUNCTION.* For the model in this folder: --hf-model model"),
        (
            "build --out x --hf-model model --data trian.jsonl",
            "no file trian.jsonl. Did you mean train.jsonl",
        ),
        (
            "build --out x --hf-model model --data train.jsonl",
            "train.jsonl, line 1: no field 'text', there is 'body'",
        ),
        ("attribute --index idx", 'nothing to attribute: give --query "some text", or --queries FILE.jsonl'),
        (
            "attribute --index idx --query x --queries eval.jsonl",
            "--query 'x' with --queries: expected a number, which of them",
        ),
        ("attribute --index nowhere --query x", "no folder nowhere: make an index with unde build"),
        (
            "attribute --index model --query x",
            "model remembers none: it is not finished, or was not built with `unde build`",
        ),
        ("attribute --index idx --query Peace --device gpu", "cannot use the device 'gpu'"),
        (
            "learn --index idx --k 3 --solver adamw",
            "--k, --solver belong to learning from queries: add --queries FILE",
        ),
        (
            "report --index idx",
            "no queries: give texts to ask about .--queries FILE.jsonl",
        ),
    ],
)
def test_mistakes(project, line, says):
    refused(says, run, *re.findall(r"\S+", line))
    assert not (project / "x").exists()


def test_a_damaged_memory_is_named(project, tmp_path):
    (tmp_path / "source.json").write_text('{"model": 3}')
    with pytest.raises(UndeError, match=r"source.json is damaged .*delete it, and give --hf-model"):
        run("attribute", "--index", tmp_path, "--query", "x")


def test_columns_that_are_not_used_are_named_once(project, tmp_path):
    rows = [{"text": line, "url": "x", "id": f"d{i}", "date": 1} for i, line in enumerate(LINES[:2])]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = ("build", "--hf-model", "model", "--data", tmp_path / "train.jsonl", "--out", tmp_path / "idx")
    result = CliRunner().invoke(cli.app, [str(a) for a in (*built, "--method", "tracin")])
    assert result.exit_code == 0 and result.output.count("does not read 'url', 'date'") == 1
    assert "1 shard" in result.output and "1 shards" not in result.output


def test_texts_are_appended_and_removed(prepared, tmp_path, monkeypatch):
    """A file of new texts, numbered from 0 as the first was, or the file that has grown: the same index."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(prepared / "model")
    write_jsonl(tmp_path / "old.jsonl", LINES, "body")
    write_jsonl(tmp_path / "new.jsonl", EVAL, "body")
    write_jsonl(tmp_path / "all.jsonl", [*LINES, *EVAL], "body")
    options = ("--hf-model", "model", "--text-field", "body", "--seq-len", 24, "--projection", "none")
    for data, folder in (("old.jsonl", "a"), ("old.jsonl", "b"), ("all.jsonl", "c")):
        run("build", *options, "--data", data, "--method", "tracin", "--out", folder)
    run("append", "--index", "a", "--data", "new.jsonl")
    run("append", "--index", "b", "--data", "all.jsonl")
    a, b, c = (Index.open(f) for f in "abc")
    count = len(c) - len(Index.open(prepared / "idx"))
    assert count >= 2 and all(str(i).startswith("new.jsonl:") for i in a.ids[-count:])
    assert b.ids == c.ids

    def scores(index, *more):
        out = run("attribute", "--index", index, "--query", LEARN[0], "--format", "jsonl", "--top", 5, *more)
        return [json.loads(line)["score"] for line in out.splitlines()]

    assert scores("a", "--data", "all.jsonl") == scores("b") == pytest.approx(scores("c"), rel=1e-5)
    write_jsonl(tmp_path / "new.jsonl", LEARN, "body")
    with pytest.raises(UndeError, match=r"give each record of new\.jsonl a field id"):
        run("append", "--index", "a", "--data", "new.jsonl")
    run("remove", "--index", "a", "--ids", ",".join(map(str, a.ids[-count:])))
    assert Index.open("a").ids == Index.open(prepared / "idx").ids
