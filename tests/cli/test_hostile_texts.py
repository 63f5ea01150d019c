"""Ids and texts that would command a terminal or a spreadsheet."""

import csv
import io
import json
from pathlib import Path

import pytest
from commands import PROJECT, add_project, run
from typer.testing import CliRunner

from unde import cli, console

BAD = ["\x1b[2J\x1b[31mred", '=HYPERLINK("http://x")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-5"]
BAD += ["\x9b5m", "ok"]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    ids = f"{BAD!r}[i % {len(BAD)}] + str(i) * (i > 9) for i in range(60)"
    text = PROJECT.replace('f"row-{i}" for i in range(60)', ids)
    name = add_project(tmp_path, monkeypatch, text, "hostile")
    run("build", f"{name}:make", "--out", "idx", "--projection", "none", "--method", "tracin")
    return name


def commands_in(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c not in "\n\t"]


def test_no_command_reaches_the_terminal(hostile):
    result = CliRunner().invoke(
        cli.app, ["attribute", "--index", "idx", "--top", "60"], env={"COLUMNS": "4000"}
    )
    assert result.exit_code == 0 and not commands_in(result.output)
    assert "[2J" in result.output  # spelled out


def test_formulas_are_quoted_in_csv_and_numbers_stay_numbers(hostile):
    rows = list(csv.DictReader(io.StringIO(run("attribute --index idx --top 60 --format csv"))))
    assert len(rows) == 15 * 60
    for row in rows:
        float(row["score"]), int(row["index"])
        try:
            float(row["id"])
        except ValueError:
            assert not row["id"].startswith(("=", "+", "-", "@", "\t", "\r")), row
    found = {row["id"] for row in rows}
    assert {'\'=HYPERLINK("http://x")', "'+1+1", "'@SUM(A1)", "-5", "ok"} <= found
    assert any(float(row["score"]) < 0 for row in rows)
    names = {row["id"] for row in json.loads(run("attribute --index idx --top 60 --format json"))}
    assert set(BAD) <= names  # JSON is for programs: as they are


@pytest.mark.parametrize("where", ["line", "note", "fail", "say", "echo"])
def test_everything_printed_is_filtered(where, capsys):
    getattr(console, where)("a\x1b]0;title\x07b\u202ec\ud800d")
    out, err = capsys.readouterr()
    assert not commands_in(out + err) and "a\\x1b]0;title\\x07b\\u202ec\\ud800d" in out + err


def test_tables_are_filtered(capsys):
    console.show_table("t\x1b[1m", ["a"], [["\x1b[31mx\x08"]])
    assert not commands_in(capsys.readouterr().out)


def test_texts_that_people_write_stay():
    text = "naïve 日本語\u3000 👩\u200d👧 נ\n\tend\u00a0"
    assert console.plain(text) == text


def test_an_error_about_a_hostile_file_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["unde", "verify", str(Path("x\x1b[2Jy"))])
    with pytest.raises(SystemExit):
        cli.main()
    out, err = capsys.readouterr()
    assert not commands_in(out + err) and "x\\x1b[2Jy" in err
