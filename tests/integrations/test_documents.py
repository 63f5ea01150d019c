"""Texts from files of every kind, and the line of every mistake."""

import csv
import gzip
import json
import os

import pytest

from refusals import refused
from unde.integrations.documents import columns_of, read_documents, read_records
from unde.integrations.examples import messages_of

TEXTS = ["One.", 'Two, with "quotes"\nand a second line.', "Drei – ä, 三."]


def read(path, field="text"):
    return [(record.name, text) for record, text in read_documents(path, field)]


def test_every_format_holds_the_same_texts(tmp_path):
    jsonl = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
    (tmp_path / "a.jsonl").write_text(jsonl)
    (tmp_path / "b.JSONL.gz").write_bytes(gzip.compress(jsonl.encode(), mtime=0))
    (tmp_path / "c.json").write_text(json.dumps([{"text": t} for t in TEXTS], ensure_ascii=False))
    with open(tmp_path / "d.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["n", "text"])
        writer.writeheader()
        writer.writerows({"n": i, "text": t} for i, t in enumerate(TEXTS))
    expected = [(str(i), t) for i, t in enumerate(TEXTS, 1)]
    for name in ("a.jsonl", "b.JSONL.gz", "c.json", "d.csv"):
        assert read(tmp_path / name) == expected, name


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": TEXTS}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(str(i), t) for i, t in enumerate(TEXTS, 1)]
    refused(r"a.parquet, row 1: no field 'body', there is 'n', 'text'", read, tmp_path / "a.parquet", "body")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    refused(r"cannot read .*b.parquet", read, tmp_path / "b.parquet")


def test_folders_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"n": [1, 2, 3], "text": TEXTS})
    made.with_format("numpy").save_to_disk(tmp_path / "a")
    assert read(tmp_path / "a") == [(str(i), t) for i, t in enumerate(TEXTS, 1)]
    assert columns_of(tmp_path / "a") == ["n", "text"]
    refused(r"a, row 1: no field 'body', there is 'n', 'text'", read, tmp_path / "a", "body")
    datasets.DatasetDict(train=made, test=made).save_to_disk(tmp_path / "b")
    refused(r"b holds the splits test, train: name one of them, as in .*b/test", read, tmp_path / "b")
    assert read(tmp_path / "b" / "train") == read(tmp_path / "a")
    next((tmp_path / "a").glob("*.arrow")).write_bytes(b"nothing")
    refused(r"cannot read .*a", read, tmp_path / "a")


def test_messages_in_tables(tmp_path):
    """Tables write what a message has not as nothing, and read it back as None."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    from pyarrow import parquet

    talks = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}],
        [{"role": "assistant", "content": "c"}],
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    parquet.write_table(pyarrow.table({"messages": talks}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"messages": talks}).save_to_disk(tmp_path / "a")
    for name in ("a.jsonl", "a.parquet", "a"):
        records = list(read_records(tmp_path / name, ("messages", "tools")))
        found = [messages_of(r.fields["messages"], r.where, "messages") for r in records]
        assert found == talks, name


def test_lines_of_a_text_file_are_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\n\n  \nTwo.  \n")
    assert read(tmp_path / "a.txt") == [("1", "One."), ("4", "Two.  ")]


def test_records_may_name_themselves(tmp_path):
    lines = [{"id": "washington-1790", "text": "a"}, {"id": 7, "text": "b"}, {"id": None, "text": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read(tmp_path / "a.jsonl") == [("washington-1790", "a"), ("7", "b"), ("3", "c")]


def test_lists_of_texts():
    assert read(["a", "b"]) == [("0", "a"), ("1", "b")]
    refused("text 1: the text is empty", read, ["a", " "])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\nplain words\n',
            r"a.jsonl, line 2: not JSON .*expected one object on each",
        ),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"line 2: a list, expected an object with a field 'text'"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"body": "b", "url": "c"}',
            r"line 3: no field 'text', there is 'body', 'url'",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": " \\n"}', r"line 2: the text is empty"),
        ("a.jsonl", b'{"text": null}', r"line 1: 'text' is NoneType, expected a text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"line 2: not UTF-8"),
        ("a.jsonl.gz", b"not packed", r"cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], r"cannot read .*a.jsonl.gz"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}', r"a.json: not JSON .*Is it .jsonl"),
        ("a.json", b'{"text": "a"}', r"a.json: a dict, expected a list of objects"),
        ("a.csv", b"id,text\n1,a\n2\n", r"a.csv, line 3: expected 2 values"),
        ("a.csv", b'text\n"a" b\n', r"a.csv, after line 1: not CSV"),
        ("a.docx", b"", r"cannot read .*a.docx: expected .jsonl"),
        ("noend", b"", r"cannot read .*noend: expected .jsonl"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    refused(says, read, tmp_path / name)


def test_files_that_are_not_there(tmp_path):
    refused(r"no file .*a.jsonl$", read, tmp_path / "a.jsonl")
    (tmp_path / "train.jsonl").touch()
    refused(r"no file .*trian.jsonl. Did you mean .*train.jsonl\?", read, tmp_path / "trian.jsonl")
    (tmp_path / "b.txt").mkdir()
    refused(r"b.txt is a folder: expected a file", read, tmp_path / "b.txt")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "one \\ud800 two"}', r"line 1: character 5 is half of a pair \(\\ud800\)"),
        ('{"text": "one two", "id": "x\\udc00"}', r"line 1: character 2 is half of a pair"),
        ('{"text": ' + "[" * 100_000, "line 1: not JSON .*recursion"),
    ],
    ids=["text", "id", "deep"],
)
def test_texts_that_are_none(tmp_path, line, says):
    (tmp_path / "t.jsonl").write_text(line + "\n")
    refused(says, list, read_documents(tmp_path / "t.jsonl"))


def test_a_pipe_is_no_file_of_texts(tmp_path):
    os.mkfifo(tmp_path / "t.jsonl")
    refused("no plain file", list, read_documents(tmp_path / "t.jsonl"))


def test_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.txt").write_text("one two\n")
    assert [text for _, text in read_documents("~/t.txt")] == ["one two"]
