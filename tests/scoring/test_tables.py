"""Tables of the best examples, read back by the libraries they are for."""

import csv
import io
import json
import pickle
from dataclasses import replace

import pytest
import torch
from random_group_scores import random_scores

from unde import UndeError
from unde.scoring import Table, Top

BAD = ["=1+1", "ünï", 'a,b\n"c"', 4, -0.5]
COLUMNS = ["query", "query_id", "rank", "index", "id", "score"]


def top() -> Top:
    scores = random_scores(3, 5, ids=BAD)
    return scores.top(4, queries=["first", "second", "third"])


def expected(top: Top) -> list[tuple]:
    def row(q: int, r: int) -> tuple:
        at = int(top.indices[q, r])
        return q, ("first", "second", "third")[q], r + 1, at, BAD[at], float(top.values[q, r])

    return [row(q, r) for q in range(3) for r in range(4)]


def test_a_data_frame_has_a_row_for_each_rank():
    pytest.importorskip("pandas")
    found = top().to_pandas()
    assert list(found.columns) == COLUMNS
    assert list(found.itertuples(index=False, name=None)) == expected(top())
    best = found[found["rank"] == 1]["score"]
    torch.testing.assert_close(torch.tensor(best.to_numpy()), top().values[:, 0])
    plain = random_scores(2, 5).top(2).to_pandas()
    assert plain["query_id"].tolist() == plain["query"].tolist()
    assert plain["id"].tolist() == plain["index"].tolist()


def test_parquet_read_back(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = replace(
        top(), query_texts=["q0", "q1", None], texts=[[f"t{q}{r}" for r in range(4)] for q in range(3)]
    )
    whole.to_parquet(tmp_path / "top.parquet")
    found = parquet.read_table(tmp_path / "top.parquet").to_pylist()
    want = [tuple(str(v) if i == 4 else v for i, v in enumerate(row)) for row in expected(top())]
    assert [tuple(row[c] for c in COLUMNS) for row in found] == want  # ids of two types are all names
    assert [row["query_text"] for row in found] == ["q0"] * 4 + ["q1"] * 4 + [None] * 4
    assert found[6]["text"] == "t12"
    numbered = random_scores(2, 5).top(2)
    numbered.to_parquet(tmp_path / "top.parquet")  # replaced, as pandas does
    assert (
        parquet.read_table(tmp_path / "top.parquet")["id"].to_pylist() == numbered.indices.flatten().tolist()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["top.parquet"]


def test_text_formats_read_back(tmp_path):
    top().to_jsonl(tmp_path / "top.jsonl")
    lines = (tmp_path / "top.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == expected(top())
    top().to_csv(tmp_path / "top.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "top.csv").read_text("utf-8"), newline="")))
    quoted = ["'=1+1", "ünï", 'a,b\n"c"', "4", "-0.5"]
    assert [r["id"] for r in rows] == [quoted[i] for i in top().indices.flatten().tolist()]
    assert [float(r["score"]) for r in rows] == top().values.flatten().tolist()
    top().table().save(tmp_path / "top.json")
    assert [tuple(r.values()) for r in json.loads((tmp_path / "top.json").read_text())] == expected(top())
    assert "".join(top().table().text("csv")).encode() == (tmp_path / "top.csv").read_bytes()


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    for path, said in (
        ("top.xlsx", "ends in .csv, .json"),
        ("top", "ends in"),
        ("none/top.csv", "No such file"),
    ):
        with pytest.raises(UndeError, match=said):
            top().table().save(tmp_path / path)
    with pytest.raises(UndeError, match="unknown format 'tsv'"):
        top().table().save(tmp_path / "x", "tsv")
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UndeError, match=r"cannot write .*folder\.csv \(Is a directory\)"):
        top().to_csv(tmp_path / "folder.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.csv", "old.csv"]


def test_without_the_libraries_the_error_names_them(monkeypatch):
    import importlib

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UndeError, match=r"this needs pandas: pip install 'unde\[tables\]'"):
        top().to_pandas()
    with pytest.raises(UndeError, match="this needs pyarrow"):
        top().table().content("parquet")


def test_a_top_is_short_to_read_and_can_be_sent():
    found = random_scores(200, 50).top(50)
    assert len(repr(found)) < 120 and repr(found).startswith("Top(200 queries, 50 examples each: ")
    again = pickle.loads(pickle.dumps(replace(found, trained_on=None)))
    assert torch.equal(again.indices, found.indices) and len(again) == 200
    assert len(Table({})) == 0 and list(Table({}).rows()) == []
