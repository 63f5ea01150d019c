"""damping="auto": a number by the kind of task, settled when an index is built or asked, recorded and printed."""

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.methods import DAMPINGS, DEFAULT_DAMPING, EKFAC, TRAK, LoGRA
from unde.tasks import CausalLM, Classification, Diffusion
from unde.tasks.base import kind_of


def usual(method, kind="classification"):
    return DAMPINGS.get(kind, {}).get(method, DEFAULT_DAMPING)


def test_kinds_of_tasks():
    diffusers = pytest.importorskip("diffusers")
    assert kind_of(Classification().identity()) == "classification"
    assert kind_of(CausalLM().identity()) == "language"
    assert (
        kind_of(Diffusion(diffusers.DDPMScheduler(num_train_timesteps=100), timesteps=6).identity())
        == "diffusion"
    )


def test_it_is_settled_recorded_and_printed(tmp_path, capsys):
    index = toy.build(tmp_path / "i", method=TRAK(projection="none"), progress=True)
    assert index.manifest.method["damping"] == usual("trak") == index.method.damping
    assert f"chosen: damping {usual('trak'):g} (trak, classification)" in capsys.readouterr().err
    queries = toy.data(5, seed=3)
    for method in (TRAK, LoGRA):
        got = index.score(queries, method()).total()
        assert torch.equal(got, index.score(queries, method(damping=usual(method.name))).total())
    assert Index.open(index.folder).method_for("logra").damping == usual("logra")


def test_a_build_goes_on_with_what_was_settled(tmp_path, monkeypatch):
    index = toy.build(tmp_path / "i", method=TRAK(projection="none"))
    monkeypatch.setitem(DAMPINGS, "classification", {"trak": 7.0})
    toy.shard_files(index)[1].unlink()
    again = toy.build(tmp_path / "i", method=TRAK(projection="none"))
    assert again.manifest.id == index.manifest.id
    assert toy.build(tmp_path / "other", method=TRAK(projection="none")).method.damping == 7.0


def test_a_task_of_ones_own_has_the_usual_one(tmp_path):
    class CustomTask(Classification):
        pass

    index = toy.build(tmp_path / "i", task=CustomTask(), method=EKFAC(projection="none"))
    assert index.method.damping == DEFAULT_DAMPING


@pytest.mark.parametrize("damping", [-1, True, float("nan"), "0.1", "much"])
def test_what_is_no_damping(damping):
    with pytest.raises(UndeError, match=r"damping .*expected a number ≥ 0, or 'auto'"):
        TRAK(damping=damping)
    with pytest.raises(UndeError, match=r"'auto' of TRAK is relative: with relative=False give λ"):
        TRAK(relative=False)
