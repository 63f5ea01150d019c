"""Jobs in several processes: all are done, whoever dies; what cannot be done is named; nobody is left behind."""

import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import worker_jobs

from unde import UndeError
from unde.parallel import JobsFailed, Processes, Serial, get_executor

HERE = Path(__file__).parent
JOBS = [(i,) for i in range(6)]


def done(folder):
    return sorted(int(p.stem) for p in folder.glob("*.txt"))


def runs(folder):
    """How often each job was run to its end."""
    return Counter(int(line.split()[0]) for line in (folder / "log").read_text().splitlines())


@pytest.mark.parametrize("count", [1, 2])
def test_every_job_once(tmp_path, count):
    assert sorted(Processes(count).run(worker_jobs.write, tmp_path, JOBS)) == JOBS
    assert runs(tmp_path) == dict.fromkeys(range(6), 1)
    pids = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(pids) <= count


def test_killed_workers_are_replaced_and_nothing_is_done_twice(tmp_path, capsys):
    assert sorted(Processes(2).run(worker_jobs.die_first_time, tmp_path, JOBS)) == JOBS
    assert len(list(tmp_path.glob("*.died"))) == 3
    assert runs(tmp_path) == dict.fromkeys(range(6), 1)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("a worker process was killed (signal 9)") == 3 and "Another one takes over" in said


@pytest.mark.parametrize(
    ("job", "bad", "said"),
    [
        (worker_jobs.die_always, 2, "3 workers died of it: the last process was killed (signal 9)"),
        (worker_jobs.fail_always, 1, "never"),
    ],
)
def test_what_fails_again_and_again_is_named_and_the_rest_is_done(tmp_path, job, bad, said):
    with pytest.raises(JobsFailed) as failure:
        list(Processes(2).run(job, tmp_path, JOBS))
    assert list(failure.value.reasons) == [(bad,)]
    assert said in failure.value.reasons[(bad,)]
    assert done(tmp_path) == [i for i in range(6) if i != bad]


def test_what_fails_once_is_tried_again(tmp_path):
    assert sorted(Processes(2).run(worker_jobs.fail_first_time, tmp_path, JOBS)) == JOBS


def test_who_has_nothing_left_to_do_takes_over_from_who_dies(tmp_path, monkeypatch):
    """On a cluster there may be no room for another worker beside those that wait."""
    pool = Processes(2)
    started = []
    monkeypatch.setattr(
        Processes, "start", lambda self, start=Processes.start: started.append(1) or start(self)
    )
    assert sorted(pool.run(worker_jobs.die_late, tmp_path, [(0,), (1,)])) == [(0,), (1,)]
    assert len(started) == 2
    pool.close()


def test_workers_stay_for_the_next_run(tmp_path):
    with closing(Processes(2)) as pool:
        for name, job in (("one", worker_jobs.write_together), ("two", worker_jobs.write)):
            (tmp_path / name).mkdir()
            assert sorted(pool.run(job, tmp_path / name, JOBS)) == JOBS
    logs = [(tmp_path / name / "log").read_text().splitlines() for name in ("one", "two")]
    one, two = ({line.split()[1] for line in lines} for lines in logs)
    assert len(one) == 2 and two <= one
    assert not multiprocessing.active_children()


def test_whoever_starts_the_workers_may_die(tmp_path):
    with closing(Processes(1)) as pool:
        assert list(pool.run(worker_jobs.write, tmp_path, [(0,)])) == [(0,)]
    for process in psutil.Process().children():
        if "forkserver" not in " ".join(process.cmdline()):
            continue
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:  # whom multiprocessing buries
            time.sleep(0.01)
    with closing(Processes(1)) as pool:
        assert list(pool.run(worker_jobs.write, tmp_path, [(1,)])) == [(1,)]
    assert done(tmp_path) == [0, 1]


def test_workers_see_the_environment_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDE_TOLD", "first")
    with closing(Processes(1)) as pool:
        list(pool.run(worker_jobs.tell, tmp_path, [(0,)]))
        monkeypatch.setenv("UNDE_TOLD", "second")
    with closing(Processes(1)) as pool:
        list(pool.run(worker_jobs.tell, tmp_path, [(1,)]))
    assert [(tmp_path / str(n)).read_text() for n in (0, 1)] == ["first", "second"]


def test_bad_input_ends_the_run(tmp_path):
    with pytest.raises(UndeError, match="bad input: expected better"):
        list(Processes(1).run(worker_jobs.refuse, tmp_path, JOBS))
    assert done(tmp_path) == [0]
    with pytest.raises(UndeError, match="another model here: expected the same"):
        list(Processes(1).run(worker_jobs.write, worker_jobs.Unmade(), JOBS))
    with pytest.raises(UndeError, match=r"cannot be sent .*top level of a module"):
        list(Processes(1).run(lambda folder, number: None, tmp_path, JOBS))


def test_a_job_that_hangs_is_noticed(tmp_path):
    begun = time.monotonic()
    assert sorted(Processes(2, timeout=3).run(worker_jobs.hang_first_time, tmp_path, JOBS)) == JOBS
    assert time.monotonic() - begun < 60


def test_no_orphans_when_the_parent_is_killed(tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import worker_jobs\nfrom pathlib import Path\nfrom unde.parallel import Processes\n"
        "if __name__ == '__main__':\n"
        "    list(Processes(2).run(worker_jobs.wait_long, Path(sys.argv[1]), [(0,), (1,)]))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, script, tmp_path, HERE])
    give_up = time.monotonic() + 90
    while len(done(tmp_path)) < 2 and time.monotonic() < give_up:
        time.sleep(0.1)
    workers = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert len(workers) >= 2
    assert not alive


@pytest.mark.parametrize("name", ["rays", "processes", "processes:x", "serial:2", ""])
def test_unknown_names(name):
    with pytest.raises(UndeError, match="unknown executor"):
        get_executor(name)

    with pytest.raises(UndeError, match="workers is 0"):
        get_executor("processes:0")


def test_names():
    assert get_executor("serial") == Serial()
    assert get_executor("processes:3").count == 3
    own = Processes(2, timeout=9)
    assert get_executor(own) is own
