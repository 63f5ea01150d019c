"""Jobs that other processes can import."""

import os
import signal
import time
from pathlib import Path

from unde import UndeError


def write(folder: Path, number: int) -> None:
    """A file with the job's number; one line more in a log for each time it is run."""
    with open(folder / "log", "a") as log:
        log.write(f"{number} {os.getpid()}\n")
    (folder / f"{number}.txt").write_text(str(number))


def write_together(folder: Path, number: int) -> None:
    """Ends when two processes have written, so that both have had a job."""
    write(folder, number)
    end = time.monotonic() + 60
    while len({line.split()[1] for line in (folder / "log").read_text().splitlines()}) < 2:
        assert time.monotonic() < end, "the other never came"
        time.sleep(0.01)


def tell(folder: Path, number: int) -> None:
    """What the environment says now."""
    (folder / str(number)).write_text(os.environ["UNDE_TOLD"])


def die_first_time(folder: Path, number: int) -> None:
    """Odd jobs kill their process the first time."""
    marker = folder / f"{number}.died"
    if number % 2 and not marker.exists():
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, number)


def die_always(folder: Path, number: int) -> None:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, number)


def fail_first_time(folder: Path, number: int) -> None:
    marker = folder / f"{number}.failed"
    if number == 1 and not marker.exists():
        marker.write_text("")
        raise OSError("the network is away")
    write(folder, number)


def fail_always(folder: Path, number: int) -> None:
    if number == 1:
        raise ValueError("never")
    write(folder, number)


def refuse(folder: Path, number: int) -> None:
    if number == 1:
        raise UndeError("bad input: expected better")
    write(folder, number)


def hang_first_time(folder: Path, number: int) -> None:
    marker = folder / f"{number}.hung"
    if number == 1 and not marker.exists():
        marker.write_text("")
        time.sleep(600)
    write(folder, number)


def wait_long(folder: Path, number: int) -> None:
    write(folder, number)
    time.sleep(600)


class Unmade:
    """A context that cannot be made in another process."""

    def __getstate__(self):
        return {"sent": True}

    def __setstate__(self, state):
        raise UndeError("another model here: expected the same")


def die_late(folder: Path, number: int) -> None:
    """Job 1 kills its process the first time, when the other job is done."""
    marker = folder / "died"
    if number == 1 and not marker.exists():
        while not (folder / "0.txt").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, number)
