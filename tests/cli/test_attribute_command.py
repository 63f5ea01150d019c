"""`unde attribute` for other programs: formats, files, queries and documents that were cut into pieces."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from commands import run

import unde
from refusals import refused
from unde import Index, UndeError
from unde.setup import Recipe


def rows_in(file: str) -> list[dict]:
    if file.endswith(".parquet"):
        return pytest.importorskip("pyarrow.parquet").read_table(file).to_pylist()
    text = Path(file).read_text()
    if file.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text)))
    return json.loads(text) if file.endswith(".json") else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_a_file_holds_what_the_library_gives(built, suffix):
    setup = Recipe(built).make()
    index = Index.open("idx", model=setup.model, task=setup.task)
    best = index.score(setup.eval_queries).top(3)
    ask = ("attribute", built, "--index", "idx", "--top", 3)
    assert run(*ask, "--out", f"top.{suffix}").strip() == f"top.{suffix}: 15 queries, 3 examples each"
    rows = rows_in(f"top.{suffix}")
    assert list(rows[0]) == ["query", "query_id", "rank", "index", "id", "score"]
    assert [int(r["index"]) for r in rows] == best.indices.flatten().tolist()
    assert [r["id"] for r in rows] == [f"row-{r['index']}" for r in rows]
    np.testing.assert_allclose([float(r["score"]) for r in rows], best.values.flatten(), rtol=1e-6)
    assert [int(r["query"]) for r in rows] == [q for q in range(15) for _ in range(3)]
    before = Path(f"top.{suffix}").read_bytes()
    with pytest.raises(UndeError, match=f"--out top.{suffix} is there already: --overwrite replaces it"):
        run(*ask, "--out", f"top.{suffix}")
    assert Path(f"top.{suffix}").read_bytes() == before
    run("attribute", built, "--index", "idx", "--top", 1, "--out", f"top.{suffix}", "--overwrite")
    assert len(rows_in(f"top.{suffix}")) == 15


def test_lines_of_json_and_a_format_that_the_name_does_not_tell(built):
    ask = ("attribute", built, "--index", "idx", "--top", 2)
    lines = [json.loads(line) for line in run(*ask, "--format", "jsonl").splitlines()]
    assert lines == json.loads(run(*ask, "--format", "json"))
    run(*ask, "--format", "jsonl", "--out", "top.txt")
    assert [json.loads(line) for line in Path("top.txt").read_text().splitlines()] == lines


def test_one_of_the_held_out_queries_by_its_number(built):
    ask = ("attribute", built, "--index", "idx", "--top", 2, "--format", "json")
    everything = json.loads(run(*ask))
    few = json.loads(run(*ask, "--query", 7, "--query", 3))
    assert [row["query_id"] for row in few] == [7, 7, 3, 3]
    of = {q: [row["id"] for row in everything if row["query_id"] == q] for q in (3, 7)}
    assert [row["id"] for row in few] == of[7] + of[3]
    for query, said in (
        ("15", "there are 15 queries, numbered from 0 to 14"),
        ("hello", "'hello' is no file"),
    ):
        with pytest.raises(UndeError, match=said):
            run(*ask, "--query", query)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--format parquet", "say where it goes, --out top.parquet"),
        ("--format tabel", "Did you mean 'table'"),
        ("--out top.xlsx", r"cannot tell a format from .*top\.xlsx"),
        ("--out none/top.csv", "no folder none for --out none/top.csv"),
        ("--out idx", "--out idx is a folder"),
        ("--out top.csv --format table", "--format table is for a terminal"),
        ("--overwrite", "--overwrite without --out"),
        ("--by documents", "Did you mean 'document'"),
        ("--by document", r"do not say which document .*\(one is 'row-0'\)"),
    ],
)
def test_mistakes_leave_no_file(built, options, said):
    before = sorted(Path().iterdir())
    refused(said, run, "attribute", built, "--index", "idx", *options.split())
    assert sorted(Path().iterdir()) == before


def test_a_device_is_no_file_to_replace(built):
    with pytest.raises(UndeError, match=r"cannot write /dev/null \(it is a device\)"):
        run("attribute", built, "--index", "idx", "--out", "/dev/null", "--format", "csv", "--overwrite")


def test_exact_scores_need_no_index(built, tmp_path):
    """As the library, in all formats; with an index of whole gradients the same lists."""
    setup = Recipe(built).make()
    want = unde.attribute(setup.model, setup.task, setup.train_data, setup.eval_queries, ids=setup.ids)
    ask = ("attribute", built, "--exact", "--top", 3)
    rows = json.loads(run(*ask, "--format", "json"))
    assert [r["id"] for r in rows] == [name for row in want.top(3).ids for name in row]
    np.testing.assert_allclose([r["score"] for r in rows], want.top(3).values.flatten(), rtol=1e-4)
    assert "proponents" in run(*ask, "--method", "tracin", "--groups", "tensor", "--exclude", "bias")
    assert run(*ask, "--opponents", "--out", str(tmp_path / "o.csv")).strip().endswith("3 examples each")
    unde.learn_weights(want, k=3).save("weights.json")
    refused("was learned on 15 of these queries", run, *ask, "--weights", "weights.json")
    run(*ask, "--queries", "learn", "--weights", "weights.json", "--memory", "1GB", "--batch-size", 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "give --index DIR, the index to ask; or --exact"),
        ("--exact --index idx", "--exact and --index"),
        ("--exact --uncalibrated", "--exact and --uncalibrated"),
        ("--index idx --batch-size 3", "--batch-size goes with --exact"),
        ("--exact --method trak", "use 'ekfac' or 'tracin', or build an index"),
        ("--exact --cg -1", "cg=-1: expected a number of steps"),
        ("--exact --query-rank 0", "query_rank=0: expected a number of outer products"),
        ("--index idx --cg 3", "--cg goes with --exact"),
        ("--exact --memory 100B", "the gradient of one query takes"),
        ("--exact --engine array:0/2", "an array of workers shares an index"),
    ],
)
def test_mistakes_without_an_index(built, options, said):
    refused(said, run, "attribute", built, *options.split())
