"""Builds, questions and banks on a Ray cluster of three nodes: the same bytes as in one process, whatever dies."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import projects
import psutil
import pytest
import worker_jobs
from small_jobs import killing

import toy
from unde import UndeError
from unde.evaluate import Bank
from unde.methods import EKFAC
from unde.parallel import JobsFailed, Ray, get_executor

ray = pytest.importorskip("ray")
HERE = Path(__file__).parent
ERRANDS = HERE.parent / "parallel"
WORKERS = 2  # each on a node of its own
CUT = {"n": 60, "pass_size": 1, "shard_passes": 2}  # 30 shards


class Nodes:
    """A head without room for jobs, and nodes with room for one worker each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # paths of sockets must be short
        Path("/tmp/ray").mkdir(exist_ok=True)  # wherever its folder is, it notes its address there
        head = {"num_cpus": 0, "temp_dir": self.folder, "object_store_memory": 80_000_000}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = []

    def add(self, count):
        while len(self.nodes) < count:
            self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=80_000_000))

    def remove(self):
        """One, as if its power was cut."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def end(self):
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes():
    sys.path.insert(0, str(ERRANDS))
    made = Nodes()
    made.add(WORKERS)
    ray.init(address=made.cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    yield made
    made.end()
    sys.path.remove(str(ERRANDS))


@pytest.fixture(scope="module")
def crew(nodes):
    executor = Ray(WORKERS)
    yield executor
    executor.close()


@pytest.fixture
def executor(nodes, crew):
    """Workers that stay from test to test, as from run to run: each takes seconds to start."""
    nodes.add(WORKERS)
    return crew


def workers():
    """The processes of this cluster that run jobs."""
    return [p for p in psutil.process_iter(["cmdline"]) if "ray::_Actor" in " ".join(p.info["cmdline"] or [])]


def wait_until(so, seconds=60, step=0.02):
    give_up = time.monotonic() + seconds
    while not so() and time.monotonic() < give_up:
        time.sleep(step)
    return so()


def meanwhile(act, until):
    """A thread that acts once something is so."""
    thread = threading.Thread(target=lambda: act() if wait_until(until) else None)
    thread.start()
    return thread


def written(folder):
    return len(list(folder.glob("shards/*.safetensors")))


def stamps(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.glob("shards/*.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process makes of it."""
    return toy.content(toy.build(tmp_path_factory.mktemp("whole") / "i", **CUT).folder)


def test_everything_is_what_one_process_makes_of_it(tmp_path, executor):
    method = EKFAC(projection="kron(3)", fisher="sampled")
    here = toy.build(tmp_path / "here", method=method)
    there = toy.build(tmp_path / "there", method=method, executor=executor, recipe="projects:make")
    queries = toy.data(9, seed=5)
    one, other = here.score(queries), there.score(queries)
    assert other.queries.numpy().tobytes() == one.queries.numpy().tobytes()
    assert other.top(5).values.tolist() == one.top(5).values.tolist()
    assert there.self_influence().tolist() == here.self_influence().tolist()
    assert toy.content(there.folder) == toy.content(here.folder)


def test_workers_that_are_killed(tmp_path, executor, whole):
    shards = partial(tmp_path.glob, "i/shards/*.safetensors")
    with killing(4, lambda: list(shards()), workers) as killed:
        toy.build(tmp_path / "i", **CUT, executor=executor, recipe="projects:slower")
    assert len(killed) >= 3
    assert toy.content(tmp_path / "i") == whole


def test_a_node_that_is_lost_during_a_build(tmp_path, nodes, executor, whole):
    """What was whole by then is not computed again."""
    before = {}

    def lose():
        before.update(stamps(tmp_path / "i"))
        nodes.remove()

    thread = meanwhile(lose, lambda: written(tmp_path / "i") >= 4)
    toy.build(tmp_path / "i", **CUT, executor=executor, recipe="projects:slower")
    thread.join()
    assert 4 <= len(before) < 30 and len(nodes.nodes) == WORKERS - 1
    assert toy.content(tmp_path / "i") == whole
    assert stamps(tmp_path / "i").items() >= before.items()


def test_a_node_that_is_lost_during_a_bank(tmp_path, nodes, executor):
    options = {"train": projects.mean_of, "utility": projects.closeness, "n_train": 20, "subsets": 20}
    serial = Bank.run(tmp_path / "serial.npz", **options)
    parts = tmp_path / "bank.npz.parts"
    thread = meanwhile(nodes.remove, lambda: len(list(parts.glob("model-*"))) >= 2)
    bank = Bank.run(tmp_path / "bank.npz", **(options | {"train": projects.slow_mean_of}), executor=executor,
                    name=serial.provenance["plan"]["name"])  # fmt: skip
    thread.join()
    assert len(nodes.nodes) == WORKERS - 1
    assert bank.utility["queries"].tobytes() == serial.utility["queries"].tobytes()
    assert bank.masks.tobytes() == serial.masks.tobytes()


def test_a_job_that_hangs(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(executor, "timeout", 3)
    jobs = [(i,) for i in range(4)]
    assert sorted(executor.run(worker_jobs.hang_first_time, tmp_path, jobs)) == jobs


def test_what_fails_again_and_again_is_named_and_the_rest_is_done(tmp_path, executor):
    for job, bad, said in (
        (worker_jobs.fail_always, 1, "never"),
        (worker_jobs.die_always, 2, "3 workers died of it"),
    ):
        folder = tmp_path / str(bad)
        folder.mkdir()
        with pytest.raises(JobsFailed) as failure:
            list(executor.run(job, folder, [(i,) for i in range(5)]))
        assert list(failure.value.reasons) == [(bad,)]
        assert said in failure.value.reasons[(bad,)]
        assert sorted(int(p.stem) for p in folder.glob("*.txt")) == [i for i in range(5) if i != bad]


def test_a_program_that_is_killed_leaves_nobody_and_goes_on_when_started_again(
    tmp_path, nodes, executor, whole
):
    executor.close()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import toy\n"
        "from unde.parallel import Ray\n"
        "if __name__ == '__main__':\n"
        "    cut = {'pass_size': 1, 'shard_passes': 2, 'threads': 1}\n"
        "    toy.build(sys.argv[1], 60, **cut, executor=Ray(2), recipe='projects:slow')\n"
    )
    environment = os.environ | {"RAY_ADDRESS": nodes.cluster.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, tmp_path / "i", HERE, HERE.parent]
    program = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: written(tmp_path / "i") >= 3)
    program.kill()
    program.wait()
    before = stamps(tmp_path / "i")
    assert 3 <= len(before) < 30
    assert wait_until(lambda: not workers(), 20, 0.1)
    toy.build(tmp_path / "i", **CUT, executor="ray", recipe="projects:slow")
    assert toy.content(tmp_path / "i") == whole
    assert stamps(tmp_path / "i").items() >= before.items()


def test_an_engine_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UndeError, match=r"needs Ray, which is not installed: pip install 'unde\[ray\]'"):
        get_executor("ray")


def test_a_cluster_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UndeError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
        get_executor("ray", address="127.0.0.1:9")
