"""The command line and the live page on a device: the numbers of the CPU, computed there."""

import json

import commands
import pytest
import settings
import torch

import pages
from unde.ui.explorer.jobs import Jobs

EVAL = {"kind": "eval", "at": 0}


@pytest.fixture
def page_in_one_thread(monkeypatch):
    """Gradients in the thread that answers questions: see `one_thread`."""
    work = Jobs._work

    def run(self):
        with torch.autograd.set_multithreading_enabled(False):
            work(self)

    monkeypatch.setattr(Jobs, "_work", run)


def test_the_live_page(tmp_path, device, operations, page_in_one_thread):
    pytest.importorskip("starlette")
    found = {}
    for place in ("cpu", device):
        setup = pages.classification()
        setup.model.to(place)
        with pages.client(pages.session(setup, tmp_path / place)) as client:
            before = operations()
            answer = client.ask(EVAL)
            found[place] = pages.values(client.rank(answer, values=[0.5, 2.0, 1.0])["rows"][-1])
            assert place == "cpu" or operations() > before
    assert found["cpu"] == pytest.approx(found[device], rel=1e-3)


def test_the_command_line(tmp_path, monkeypatch, device, operations):
    project = commands.add_project(tmp_path, monkeypatch)
    found = {}
    for place in ("cpu", device):
        given = ("--device", place)
        before = operations()
        commands.run("build", f"{project}:make", "--out", place, "--projection", "none", *given)
        assert place == "cpu" or operations() > before
        before = operations()
        line = f"attribute {project}:make --index {place} --top 3 --format json"
        found[place] = json.loads(commands.run(line, *given))
        assert place == "cpu" or operations() > before
    assert [row["index"] for row in found["cpu"]] == [row["index"] for row in found[device]]
    scores = [torch.tensor([row["score"] for row in rows]) for rows in found.values()]
    settings.assert_near(scores[1], scores[0], 1e-4)
