"""Banks that several processes fill, some of which are killed."""

import multiprocessing
import subprocess
import sys
import time

import bank_jobs
import psutil
import pytest
from bank_jobs import assert_same, run
from safetensors.numpy import load_file

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import Bank

MODELS = 2 * bank_jobs.SUBSETS


def kill_midway(program, parts, count):
    """SIGKILL to the run itself, not to its workers, once `count` parts are there."""
    process = subprocess.Popen(program, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(parts.glob("model-*.safetensors"))) < count:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    return workers


def test_killed_in_two_processes_then_continued_in_two_is_as_if_run_in_one(tmp_path, reference):
    path, parts = tmp_path / "bank.npz", tmp_path / "bank.npz.parts"
    program = [sys.executable, bank_jobs.__file__, str(path)]
    workers = kill_midway(program, parts, 2 * bank_jobs.QUICK)
    _, alive = psutil.wait_procs(workers, timeout=20)  # each would train on for ten minutes
    assert len(workers) >= 2
    assert not alive
    kept = list(parts.glob("model-*.safetensors"))
    assert len(kept) == 2 * bank_jobs.QUICK
    refused(rf"not finished \({len(kept)} of {MODELS} models\)", Bank.open, path)
    seconds = {int(file.stem.removeprefix("model-")): float(load_file(file)["seconds"]) for file in kept}
    bank = run(path, processes=2)
    assert_same(bank, reference)
    assert not parts.exists()
    # not trained again
    assert all(bank.seconds.ravel()[number] == value for number, value in seconds.items())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (bank_jobs.fail, r"(?s)model 0 \(subset 0, seed \d+\) failed: Traceback.*no luck today"),
        (
            bank_jobs.die,
            r"model 0 .* failed: 3 workers died of it: .* killed \(signal 9\), often .* memory.*\n.*again",
        ),
    ],
    ids=["error", "death"],
)
def test_failures_in_other_processes_are_told(tmp_path, train, message):
    refused(message, run, tmp_path / "bank", train=train, subsets=1, seeds_per_subset=1, processes=2)
    assert not multiprocessing.active_children()


def test_functions_that_cannot_be_imported_are_refused_before_any_process_starts(tmp_path):
    with pytest.raises(UndeError, match=r"top level of a module.*run in one process"):
        run(tmp_path / "bank", train=lambda indices, seed: None, processes=2)


def test_processes_that_are_killed_while_starting_or_training_are_replaced(tmp_path, reference):
    train = bank_jobs.Deadly(tmp_path, 1, bank_jobs.die)
    assert_same(run(tmp_path / "bank", train=train, processes=2), reference)
    assert len(list(tmp_path.glob("arrived-*"))) in (3, 4)  # the last may come when all is done
    assert len(list(tmp_path.glob("trained-*"))) == MODELS + 1


def test_processes_that_are_always_killed_while_starting_are_not_blamed_on_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr("unde.parallel.base.STARTS", 3)
    train = bank_jobs.Deadly(tmp_path, 99, bank_jobs.die)
    with pytest.raises(
        UndeError, match=r"3 workers in a row did not get to work: .* killed \(signal 9\), often .* memory"
    ) as caught:
        run(tmp_path / "bank", train=train, processes=2)
    assert "__main__" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_processes_that_end_while_starting_by_themselves_are(tmp_path):
    with pytest.raises(UndeError, match=r"code 1 while starting.* under `if __name__ == '__main__':`"):
        run(tmp_path / "bank", train=bank_jobs.Deadly(tmp_path, 99, bank_jobs.give_up), processes=2)
