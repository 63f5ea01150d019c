"""Workers on a Ray cluster: actors that make the model once from its recipe and write to shared files.

Only the recipe and the numbers of jobs go through Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch

from unde.errors import UndeError, explain
from unde.parallel.base import Answer, JobRunner, Message, WorkerExit, WorkerPool

_PULSE = 1.0  # seconds between looks at the actors
_ANSWER = 10.0  # seconds in which a cluster must answer


class Ray(WorkerPool[Any]):
    """`count` actors, by default as many as the cluster has processors for, each with `threads` of them and `gpus`.

    `address` is that of a cluster, by default RAY_ADDRESS, or the one that this program is connected to already;
    without any of them Ray is started on this machine, for as long as the program runs.
    """

    def __init__(
        self,
        count: int | None = None,
        threads: int = 1,
        gpus: float = 0,
        address: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.address, self.gpus, self._ray = address, gpus, None
        self._pending: dict[Any, Any] = {}  # what each actor was asked last
        if count is None:
            have = self._client().cluster_resources()
            by_gpu = have.get("GPU", 0) // gpus if gpus else have.get("CPU", 1)
            count = max(1, int(min(have.get("CPU", 1) // max(1, threads), by_gpu)))
        super().__init__(count, threads, timeout)

    def __repr__(self) -> str:
        return f"Ray(count={self.count}, threads={self.threads}, gpus={self.gpus:g}, timeout={self.timeout})"

    def __getstate__(self) -> dict[str, Any]:
        raise UndeError("an executor cannot be sent to another process: name it where it is used")

    def sharing(self, device: torch.device, named: bool) -> int:
        return max(1, int(1 / self.gpus)) if self.gpus else super().sharing(device, named)

    def start(self) -> Any:
        ray = self._client()
        actor = ray.remote(_Actor).options(
            num_cpus=self.threads,
            num_gpus=self.gpus or None,
            max_restarts=0,  # a new one takes over, wherever there is room
            scheduling_strategy="SPREAD",
        )
        return actor.remote(self.threads, os.getcwd(), [p for p in sys.path if p])

    def send(self, worker: Any, message: Message) -> None:
        if isinstance(message, bytes):
            message = self._client().put(message)  # one copy on each machine
        self._pending[worker] = worker.receive.remote(message)

    def receive(
        self, workers: Sequence[Any], seconds: float | None
    ) -> Sequence[tuple[Any, Answer | WorkerExit]]:
        ray = self._client()
        pending = {self._pending[w]: w for w in workers}
        ready, _ = ray.wait(list(pending), timeout=min(_PULSE, seconds or _PULSE), fetch_local=False)
        return [(pending[r], self._answer(pending[r], r)) for r in ready]

    def end(self, worker: Any) -> WorkerExit:
        ray = self._client()
        self._pending.pop(worker, None)
        ray.kill(worker, no_restart=True)
        return WorkerExit("was ended")

    def _answer(self, worker: Any, reply: Any) -> Answer | WorkerExit:
        ray = self._client()
        try:
            return ray.get(reply)
        except ray.exceptions.RayError as e:  # its process, or its machine, is gone
            self._pending.pop(worker, None)
            ray.kill(worker, no_restart=True)
            failed = "error raised in its creation task" in str(e)  # the next would fare no better
            return WorkerExit(f"is gone: {' '.join(str(e).split())[-600:]}", fatal=failed)

    def _client(self) -> Any:
        if self._ray is None:
            self._ray = _connect(self.address)
        return self._ray


class _Actor:
    """A `JobRunner` in the folder and with the module paths of the program that started it."""

    def __init__(self, threads: int, folder: str, modules: list[str]) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [m for m in modules if m not in sys.path]
        torch.set_num_threads(threads)  # Ray would leave it to OMP_NUM_THREADS
        self._runner = JobRunner()

    def receive(self, message: Message) -> Answer:
        return self._runner(message)


def _connect(address: str | None) -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise UndeError(
            "the engine 'ray' needs Ray, which is not installed: pip install 'unde[ray]'"
        ) from None
    if ray.is_initialized():
        return ray
    where = address or os.environ.get("RAY_ADDRESS")
    how: dict[str, Any] = {"address": where} if where else {"include_dashboard": False}
    host, _, port = (where or "").removeprefix("ray://").rpartition(":")
    message = (
        f"no Ray cluster answers at {where or 'this machine'} ({{e}}): look whether it runs (`ray status`), or leave "
        "the address out to start Ray on this machine"
    )
    with explain(message, OSError, RuntimeError, ValueError):
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _ANSWER).close()
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **how)
    return ray
