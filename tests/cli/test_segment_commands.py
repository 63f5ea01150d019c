"""`unde append`, `remove` and `merge` as somebody types them."""

import json
import textwrap
from pathlib import Path
from unittest import mock

import pytest
from commands import run

from refusals import refused
from unde import Index, UndeError
from unde.index import updates

GROWN = """

def grown():
    setup, more = make(), large()
    first = make().train_data
    setup.train_data = tuple(torch.cat([a, b[-9:]]) for a, b in zip(first, more.train_data))
    setup.ids = [f"row-{i}" for i in range(69)]
    return setup

def only_new():
    setup = grown()
    setup.train_data, setup.ids = tuple(c[60:] for c in setup.train_data), setup.ids[60:]
    return setup
"""


@pytest.fixture
def grown(project, tmp_path):
    with open(tmp_path / f"{project}.py", "a") as file:
        file.write(textwrap.dedent(GROWN))
    run("build", f"{project}:make", "--out", "idx", "--method", "ekfac", "--projection", "kron(3)")
    return project


def test_appended_and_remembered(grown):
    assert Path("idx/run.toml").exists()
    out = run("append", f"{grown}:grown", "--index", "idx")
    assert out.strip() == "idx: 9 examples appended (60 were there already), 69 now"
    assert not Path("idx/run.toml").exists()  # it would build another index
    assert Index.open("idx").ids[-1] == "row-68"
    refused("all 69 examples are in idx already", run, "append", "--index", "idx")
    run("remove", "--index", "idx", "--ids", "row-3, row-64")  # EKFAC, with the project that is remembered
    assert ",row-3," not in run("attribute", "--index", "idx", "--top", 67, "--format", "csv")
    assert len(Index.open("idx")) == 67
    told = run("verify", "idx")
    assert "appended 9" in told and "removed 2" in told


def test_only_what_is_new(grown, capsys):
    out = run("append", f"{grown}:only_new", "--index", "idx")
    assert out.strip() == "idx: 9 examples appended, 69 now"
    with pytest.raises(UndeError, match="60 of its examples are not in what is given"):
        run("attribute", f"{grown}:only_new", "--index", "idx")
    assert run("attribute", f"{grown}:grown", "--index", "idx")


def test_killed_at_its_end(grown):
    with mock.patch.object(updates, "clear", side_effect=KeyboardInterrupt), pytest.raises(BaseException):  # noqa: B017
        run("append", f"{grown}:grown", "--index", "idx")
    assert "old files are still there" in run("verify", "idx")
    assert run("append", f"{grown}:grown", "--index", "idx").strip() == "idx: 69 examples now"
    assert "still there" not in run("verify", "idx")
    with mock.patch.object(updates, "clear", side_effect=KeyboardInterrupt), pytest.raises(BaseException):  # noqa: B017
        run("remove", f"{grown}:grown", "--index", "idx", "--ids", "row-3")
    run("remove", f"{grown}:grown", "--index", "idx", "--ids", "row-3")
    assert "not finished" not in run("verify", "idx")
    assert len(Index.open("idx")) == 68


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
def test_marks_of_the_live_page(project, tmp_path, suffix):
    run("build", f"{project}:make", "--out", "idx", "--method", "tracin")
    rows = [(3, "row-3", "remove"), (5, "row-5", "duplicate"), (7, "row-7", "remove")]
    file = tmp_path / f"marks.{suffix}"
    if suffix == "csv":
        file.write_text("index,id,mark,label,text\n" + "".join(f"{i},{n},{m},1,x\n" for i, n, m in rows))
    elif suffix == "jsonl":
        file.write_text("".join(json.dumps({"index": i, "id": n, "mark": m}) + "\n" for i, n, m in rows))
    else:
        file.write_text("row-3\nrow-7\n")
    run("remove", "--index", "idx", "--ids", file)
    assert [n for n in ("row-3", "row-5", "row-7") if n in Index.open("idx").ids] == ["row-5"]
    if suffix != "txt":
        with pytest.raises(UndeError, match="nothing is marked 'dup', there is duplicate, remove"):
            run("remove", "--index", "idx", "--ids", file, "--mark", "dup")
        run("remove", "--index", "idx", "--ids", file, "--mark", "duplicate")
        assert "row-5" not in Index.open("idx").ids


def test_by_position_where_there_are_no_ids(project):
    run("build", f"{project}:large", "--out", "idx", "--method", "tracin")
    assert "698 examples left" in run("remove", "--index", "idx", "--ids", "0,699")
    refused(r"has no ids.*'row-1' is no number", run, "remove", "--index", "idx", "--ids", "row-1")
    refused("no example 698 in the index", run, "remove", "--index", "idx", "--ids", "698")


def test_bad_lists(project, tmp_path):
    run("build", f"{project}:make", "--out", "idx", "--method", "tracin")
    (tmp_path / "no.csv").write_text("name\nrow-3\n")
    (tmp_path / "bad.jsonl").write_text("{]\n")
    (tmp_path / "plain.csv").write_text("id\nrow-3\n")
    for given, match in (
        (["no.csv"], "no.csv, line 2: no 'id'"),
        (["bad.jsonl"], "bad.jsonl, line 1: not JSON"),
        ([" , "], "names no example"),
        (["row-999"], "not in the index: 'row-999'"),
        (["row-3", "--mark", "remove"], "no file row-3"),
        (["plain.csv", "--mark", "remove"], "has no column 'mark'"),
    ):
        refused(match, run, "remove", "--index", "idx", "--ids", *given)
    assert len(Index.open("idx")) == 60


def test_merged(grown):
    for name, dtype in (("more", "float32"), ("other", "int8")):
        run(
            f"build {grown}:only_new --out {name} --method ekfac --projection 'kron(3)' --store-dtype {dtype}"
        )
    refused("store_dtype .* there, .* Append the examples", run, "merge", "all", "idx", "other")
    assert run("merge", "all", "idx", "more").strip() == "all: 69 examples of 2 indexes in 2 groups"
    refused("holds an index already", run, "merge", "more", "idx", "more")
    assert run("attribute", f"{grown}:grown", "--index", "all")
