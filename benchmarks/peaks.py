"""Peak memory of single steps, each in a process of its own that has its libraries loaded and has run nothing yet.

One fresh process imports what is needed once, and forks for every job: torch has no threads there yet, and the
high-water mark of each child is its own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import forget_peak, status

Job = Sequence[
    Any
]  # "module:function" and what it is called with: it gets ready, and returns what is measured


def peaks(jobs: Sequence[Job]) -> list[int]:
    """Bytes that each job added to its process at most."""
    command = [sys.executable, "-m", "benchmarks.peaks"]
    done = subprocess.run(command, input=json.dumps(list(map(list, jobs))), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"peak memory could not be measured: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one(job: Job) -> int:
    """In a child, which ends."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(added(*job)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as told:
        words = told.read()
    if os.waitpid(child, 0)[1] or not words:
        raise RuntimeError(f"{job} failed")
    return int(words)


def added(name: str, *given: Any) -> int:
    module, function = name.split(":")
    step: Callable[[], Any] = getattr(importlib.import_module(module), function)(*given)
    forget_peak()
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def main() -> None:
    jobs = json.loads(sys.stdin.read())
    for name in {job[0].split(":")[0] for job in jobs}:
        importlib.import_module(name)
    import transformers  # noqa: F401

    print(json.dumps([one(job) for job in jobs]))


if __name__ == "__main__":
    main()
