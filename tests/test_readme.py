"""The quickstart of the README runs as printed, and does what the text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_quickstart_runs_as_printed(tmp_path):
    pytest.importorskip("sklearn")
    [code] = re.findall(r"## Quickstart\n\n```python\n(.*?)```", README.read_text(), re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    digits, proponents = (
        eval(part) for part in re.findall(r"(\[.*\]) proponents (\[\[.*\]\])", done.stdout)[0]
    )
    agree = sum(p == d for d, row in zip(digits, proponents) for p in row)
    assert agree >= 15, f"{agree} of 25 proponents show their query's digit"
    assert (tmp_path / "runs" / "digits" / "manifest.json").exists()


def test_commands_of_the_readme_exist():
    from typer.main import get_command

    from unde.cli import app

    known = set(get_command(app).commands)
    named = set(re.findall(r"^unde (\w+)", README.read_text(), re.M))
    assert named and named <= known
    assert known == {
        *("demo", "plan", "build", "finish", "learn", "attribute", "evaluate", "report"),
        *("verify", "push", "pull", "bench"),
    }


def test_local_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#h][^)]*)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
