"""Our end of the processes of peers, which stay from one case to the next: loading their libraries takes longer than a
round."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.peers.environment import ROOT, python_of
from benchmarks.rounds import Failed

PATIENCE = 240.0  # seconds for one answer


class Peer:
    """Answers are waited for; one that is late, or a process that ended, is a failure like any other."""

    def __init__(self, name: str, process: Any, patience: float = PATIENCE) -> None:
        self.name, self.process, self.patience = name, process, patience
        self._left, self.ended = b"", False

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        try:
            self.process.stdin.write((json.dumps({"do": do, **given}) + "\n").encode())
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            self.close()
            raise Failed("its process ended") from None
        answer = json.loads(self._line(self.process.stdout))
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _line(self, stream: BinaryIO) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not selector.select(self.patience):
                    self.close()
                    raise Failed(f"no answer within {self.patience:.0f} s")
                more = os.read(stream.fileno(), 2**16)
                if not more:
                    self.close()
                    raise Failed("its process ended")
                self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return line

    def close(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def start(name: str, threads: int) -> Peer:
    """A process of its own environment; what it prints is in benchmarks/envs/NAME.log."""
    binary = python_of(name)
    paths = [str(ROOT / "src"), str(ROOT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with Path(f"{binary.parent.parent}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(binary), "-m", "benchmarks.peers.worker", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment,
        )  # fmt: skip
    return Peer(name, process)


_alive: dict[str, Peer] = {}


def start_all(names: Iterable[str], threads: int, errors: dict[str, str]) -> dict[str, Peer]:
    """Those that could be started, beside one another; of the others, why not."""
    for name in names:
        if name in _alive and not _alive[name].ended:
            continue
        try:
            _alive[name] = start(name, threads)
        except Failed as e:
            errors[name] = str(e)
    return {name: _alive[name] for name in names if name in _alive and name not in errors}


@atexit.register
def close_all() -> None:
    for name in list(_alive):
        _alive.pop(name).close()
