"""The blocks of docs/tasks.md run as printed, and the table names tasks that there are."""

import re
from pathlib import Path

import pytest

import unde.tasks

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_blocks_run(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/tasks.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()


def test_every_task_is_on_the_page():
    missing = [name for name in unde.tasks.__all__ if f"`{name}" not in PAGE]
    assert not missing
