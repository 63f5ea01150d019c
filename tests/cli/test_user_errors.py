"""What goes wrong in a user's own module and function is shown with their own lines, and nothing of ours."""

import pytest
from commands import add_project, run

from unde import UndeError

PROJECT = """
import json
import sys
import torch
import unde

def read(path):
    return open(path)

def missing():
    data = read("nowhere.pt")
    return data

def deep():
    return json.loads("{")

def ends():
    sys.exit(3)

def picky(path):
    return path

def forgot():
    unde.Setup(None, None, None)

def ours():
    unde.methods.parse("trakk")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    return lambda text=PROJECT: add_project(tmp_path, monkeypatch, text, "own")


def error(target):
    with pytest.raises(UndeError) as e:
        run("build", target, "--out", "idx")
    assert "site-packages/unde" not in str(e.value) and "src/unde" not in str(e.value)
    return str(e.value).splitlines()


def test_the_line_that_failed_is_on_top(module, tmp_path):
    name = module()
    first, *lines = error(f"{name}:missing")
    assert first == (
        f"{name}:missing raised FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.pt'"
    )
    file = tmp_path / f"{name}.py"
    assert lines == [
        f"  {file}, line 8, in read",
        "    return open(path)",
        f"  {file}, line 11, in missing",
        '    data = read("nowhere.pt")',
    ]


def test_errors_from_another_library(module, tmp_path):
    name = module()
    first, *lines = error(f"{name}:deep")
    assert "raised JSONDecodeError: Expecting property name" in first
    assert lines[:2] == [f"  {tmp_path / name}.py, line 15, in deep", '    return json.loads("{")']
    assert len(lines) == 3 and lines[2].startswith("  raised in ") and "json/decoder.py, line" in lines[2]


@pytest.mark.parametrize(
    ("function", "says", "line"),
    [
        ("ends", r":ends ended the program \(SystemExit: 3\)", "    sys.exit(3)"),
        ("ours", "unknown method 'trakk'.*Did you mean 'trak'", '    unde.methods.parse("trakk")'),
        ("picky", r":picky takes other arguments \(missing a required argument: 'path'\).*without any", None),
        ("forgot", r"gave a NoneType: expected an unde.Setup.*Does it end with a return\?", None),
        ("mising", "unknown function of own_.*Did you mean 'missing'", None),
    ],
)
def test_functions_that_give_no_setup(module, function, says, line):
    first, *lines = error(f"{module()}:{function}")
    assert pytest.raises(UndeError, match=says).matches(UndeError(first))
    assert lines[1:] == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("text", "says", "code"),
    [
        ("x = 1\nimport nowhere_at_all\n", "No module named 'nowhere_at_all'", "    import nowhere_at_all"),
        (
            "from json import no_such\n",
            "raised ImportError: cannot import name 'no_such'",
            "    from json import",
        ),
        ("def make(:\n", "raised SyntaxError: invalid syntax", "    def make(:"),
        ("x = 1 / 0\n", "raised ZeroDivisionError: division by zero", "    x = 1 / 0"),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['x'])\n",
            "ended the program",
            "    argparse.",
        ),
    ],
    ids=["module", "name", "syntax", "value", "exit"],
)
def test_modules_that_cannot_be_imported(module, tmp_path, text, says, code):
    name = module(text)
    first, place, line, *_ = error(f"{name}:make")
    assert says in first and first.startswith(name)
    assert place.startswith(f"  {tmp_path / name}.py, line {text.count(chr(10))}")
    assert line.startswith(code)


def test_a_module_that_is_not_there(module):
    [only] = error("nowhere_at_all:make")
    assert only.startswith("no module 'nowhere_at_all' here")
    module()
    [only] = error(f"{module()}.deeper:make")
    assert only.startswith(f"no module '{module()}.deeper' here")
