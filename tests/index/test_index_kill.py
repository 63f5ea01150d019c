"""Kill -9 at any moment: the index that is finished later is byte for byte the one that was never killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import toy

HERE = Path(__file__).parent


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_builds_end_in_the_same_bytes(tmp_path):
    run = subprocess.run(
        [sys.executable, HERE / "kill_builds.py", tmp_path, "0"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    kills = json.loads(run.stdout)
    steps = ("opened", "half written", "written", "synced", "renamed")
    assert all(kills[step] >= 2 for step in steps), kills
    assert kills["timed"] >= 10, kills

    whole = toy.content(tmp_path / "whole")
    assert sorted(whole) == [
        "ids.json",
        "manifest.json",
        "probe.safetensors",
        *(f"shards/c0{c}-00000{s}.safetensors" for c in range(2) for s in range(4)),
    ]
    folders = [p for p in tmp_path.iterdir() if p.name != "whole"]
    assert len(folders) > 2
    for folder in folders:
        assert toy.content(folder) == whole, folder.name
