"""Our end of a peer's process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from benchmarks.peers.environment import ROOT, python_of
from benchmarks.rounds import Failed

PATIENCE = 240.0  # seconds for one answer


class Process(Protocol):
    stdin: Any
    stdout: Any

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Peer:
    """Answers are waited for; one that is late, or a process that ended, is a failure like any other."""

    def __init__(self, name: str, process: Process, patience: float = PATIENCE) -> None:
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


if __name__ == "__main__":  # one run of one peer, to try it: python -m benchmarks.peers.host dattri gpt2 16
    peer = start(sys.argv[1], 2)
    try:
        print(peer.ask("load", case=sys.argv[2]))
        for examples in map(int, sys.argv[4:] or ["32"]):
            print(peer.ask("run", rank=int(sys.argv[3]), examples=examples))
    finally:
        peer.close()
