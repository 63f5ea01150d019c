"""Worker processes on this machine; none of them outlives its parent."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, cast

import torch

from unde import devices
from unde.parallel.base import Answer, JobRunner, Message, WorkerExit, WorkerPool, describe_exit

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

_NO_MAIN_GUARD = (
    "process ended with code {code} while starting; its own message is above. A script that starts "
    "processes must do so under `if __name__ == '__main__':`, and its functions must be in a file that can be imported"
)

_IMPORTED_BY = os.getpid()


class Processes(WorkerPool[Connection]):
    """`count` processes with `threads` of torch each. With several GPUs, each worker sees one of them."""

    def __init__(self, count: int, threads: int = 1, timeout: float | None = None) -> None:
        super().__init__(count, threads, timeout)
        self._processes: dict[Connection, BaseProcess] = {}
        self._numbers: dict[Connection, int] = {}
        self._answered_once: set[Connection] = set()  # those that have answered once
        end = weakref.finalize(self, _terminate_all, self._processes)
        atexit.register(end)  # before multiprocessing waits for its children

    def __repr__(self) -> str:
        return f"Processes(count={self.count}, threads={self.threads}, timeout={self.timeout})"

    def start(self) -> Connection:
        context = _context()
        ours, theirs = context.Pipe()
        used = set(self._numbers.values())
        number = next(i for i in itertools.count() if i not in used)
        arguments = (theirs, self.threads, number, devices.visible(), dict(os.environ))
        process = context.Process(target=_serve, args=arguments)
        process.start()
        theirs.close()
        self._processes[ours], self._numbers[ours] = process, number
        return ours

    def send(self, worker: Connection, message: Message) -> None:
        with suppress(ConnectionError):
            worker.send(message)

    def receive(
        self, workers: Sequence[Connection], seconds: float | None
    ) -> Sequence[tuple[Connection, Answer | WorkerExit]]:
        return [(w, self._answer(w)) for w in cast(list[Connection], wait(workers, seconds))]

    def _answer(self, worker: Connection) -> Answer | WorkerExit:
        try:
            answer = worker.recv()
        except (EOFError, OSError):
            self._processes[worker].join(timeout=5)  # it is about to end, with a code that tells why
            return self.end(worker)
        self._answered_once.add(worker)
        return answer

    def end(self, worker: Connection) -> WorkerExit:
        process, answered = self._processes.pop(worker), worker in self._answered_once
        self._numbers.pop(worker, None)
        self._answered_once.discard(worker)
        _terminate(worker, process)
        code = process.exitcode or 0
        if code >= 0 and not answered:
            return WorkerExit(_NO_MAIN_GUARD.format(code=code), fatal=True)
        return WorkerExit(f"process {describe_exit(code)}")

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        super().close()


def _context() -> SpawnContext | ForkServerContext:
    """A fork server that has only imported torch, since forks of a process that used torch may hang; "spawn" where
    there are no forks, and in forks of this process, which cannot share its server."""
    if "forkserver" not in multiprocessing.get_all_start_methods() or os.getpid() != _IMPORTED_BY:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _terminate(connection: Connection, process: BaseProcess) -> None:
    process.terminate()
    process.join(timeout=5)
    process.kill()  # for user code that ignores the polite signal
    process.join()
    connection.close()


def _terminate_all(processes: dict[Connection, BaseProcess]) -> None:
    while processes:
        _terminate(*processes.popitem())


def _serve(
    connection: Connection, threads: int, number: int, gpus: list[str], environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # the server was started with an earlier one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends the workers
    devices.become_worker(number, gpus)
    torch.set_num_threads(threads)
    runner = JobRunner()
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(runner(connection.recv()))


def _exit_with_parent() -> None:
    """End this process when its parent has ended, even if that was killed."""
    cast(BaseProcess, multiprocessing.parent_process()).join()
    os._exit(1)
