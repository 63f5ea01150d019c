"""Workers compute where the program does, on devices of their own where there are several."""

import os

import device_project
import pytest
from settings import assert_near, stored

import toy
from unde import Index
from unde.parallel import Processes, Ray


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Where processes other than this one ran the task."""
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(device_project.FOLDER, str(folder))
    own = str(os.getpid())
    return lambda: {name.split()[0] for name in os.listdir(folder) if name.split()[1] != own}


def build(folder, model, **options):
    options = {"method": "tracin", "batch_size": 1, "progress": False} | options
    return Index.build(model, device_project.Noting(), toy.data(150), folder, **options)


def test_processes_use_the_kind_of_device_of_the_model(tmp_path, notes, pretended):
    here = build(tmp_path / "here", toy.net().to(pretended.NAME))
    options = {"recipe": "device_project:make", "executor": Processes(2)}
    there = build(tmp_path / "there", toy.net().to(pretended.NAME), **options)
    assert notes() == {"pretended:0", "pretended:1"}
    assert_near(stored(there), stored(here), 0)


def test_a_device_that_is_named_is_that_of_all_workers(tmp_path, notes, pretended):
    options = {"recipe": "device_project:make", "executor": "processes:2", "device": "pretended:1"}
    index = build(tmp_path / "i", toy.net(), **options)
    assert notes() == {"pretended:1"}
    index.features(toy.data(3, 5))
    assert pretended.counts[1].operations > 0 == pretended.counts[0].operations


def test_ray(tmp_path, monkeypatch, notes, pretended):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    options = {"recipe": "device_project:make", "method": "ekfac", "projection": "kron(2)"}
    try:
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
        there = build(tmp_path / "there", toy.net().to(pretended.NAME), executor=Ray(1), **options)
        got = there.score(toy.data(3, 5)).total()
        there.close()
    finally:
        ray.shutdown()
    assert notes() == {"pretended:0"}
    here = build(tmp_path / "here", toy.net(), **options)
    assert_near(stored(there), stored(here))
    assert_near(got, here.score(toy.data(3, 5)).total(), 1e-4)
