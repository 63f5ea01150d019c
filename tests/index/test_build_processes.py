"""Builds in several processes whose workers are killed: the same bytes as in one."""

from contextlib import closing

import projects
import pytest
from small_jobs import killing

import toy
from unde import Index, UndeError
from unde.evaluate import Bank
from unde.parallel import Processes


def test_workers_that_are_killed_at_random(tmp_path):
    """Whoever dies, the build ends by itself in the bytes of a serial one."""
    whole = toy.content(toy.build(tmp_path / "serial", 60, pass_size=1, shard_passes=2).folder)
    with killing(12, lambda: list((tmp_path / "i" / "shards").glob("*"))) as killed:
        options = {"executor": Processes(2), "recipe": "projects:slower"}
        toy.build(tmp_path / "i", 60, pass_size=1, shard_passes=2, **options)
    assert len(killed) >= 10
    assert toy.content(tmp_path / "i") == whole


def test_workers_of_a_bank_that_are_killed_at_random(tmp_path):
    options = {"utility": projects.closeness, "n_train": 20, "subsets": 30, "name": "means"}
    serial = Bank.run(tmp_path / "serial.npz", train=projects.mean_of, **options)
    parts = tmp_path / "bank.npz.parts"
    with killing(12, lambda: list(parts.glob("model-*")), seed=1) as killed:
        bank = Bank.run(tmp_path / "bank.npz", train=projects.slow_mean_of, executor="processes:2", **options)
    assert len(killed) >= 10
    assert bank.utility["queries"].tobytes() == serial.utility["queries"].tobytes()
    assert bank.masks.tobytes() == serial.masks.tobytes()


def test_each_worker_gets_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    with closing(Processes(2)) as pool:
        assert sorted(pool.run(projects.note_gpu, tmp_path, [(0,), (1,)])) == [(0,), (1,)]
        assert sorted(pool._numbers.values()) == [0, 1]
    assert {p.read_text() for p in tmp_path.iterdir()} <= {"4", "5"}


def test_a_model_object_asks_for_a_recipe(tmp_path):
    with pytest.raises(UndeError, match=r"this Sequential cannot be sent .*recipe='my_project.setup:make'"):
        toy.build(tmp_path / "i", executor="processes:2")
    toy.build(tmp_path / "i")  # settled, and gone on with in this process


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"task": projects.Unlucky(), "executor": "processes:2", "recipe": "projects:unlucky"},
            r"shard 1 \(examples 8 to 15, checkpoint 0\) failed .*out of luck.*All others are done",
        ),
        (
            {
                "train_data": projects.spoilt().train_data,
                "executor": "processes:1",
                "recipe": "projects:spoilt",
            },
            "shard 1 .*failed .*gradient of example 9 is NaN.*All others are done",
        ),
    ],
    ids=["a pass", "an example"],
)
def test_what_always_fails_is_named_and_keeps_nobody_from_the_others(tmp_path, options, said):
    with pytest.raises(UndeError, match=f"(?s){said}"):
        toy.build(tmp_path / "i", **options)
    assert len(list((tmp_path / "i" / "shards").glob("*.safetensors"))) == 2
    with pytest.raises(UndeError, match="1 of 3 shards are missing"):
        Index.open(tmp_path / "i")
