"""Our end of the processes of peers, which stay from one case to the next: loading their libraries takes longer than a
round. The environments of peers, made once from the package index that pip is set up with, under benchmarks/envs.

Each holds the peer and what it alone needs. torch, transformers and the rest of the packages that we run with are
shared: a .pth file names their folder, and pip finds them there. torchvision and torchaudio are taken out again: their
wheels do not load beside a CPU build of torch, and transformers would try.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.peers import PEERS
from benchmarks.rounds import Failed

ROOT = Path(__file__).parent.parent.parent
ENVS = ROOT / "benchmarks" / "envs"
UNWANTED = ("torchvision", "torchaudio")
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


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there or has another version."""
    folder = ENVS / name
    binary, made = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python", folder / "made"
    wanted = f"{PEERS[name]} beside {_shared()}"
    if made.exists() and made.read_text() == wanted:
        return binary
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    [packages] = [
        path for path in folder.rglob("site-packages") if path.parent.parent.name in ("lib", folder.name)
    ]
    (packages / "shared.pth").write_text(f"{_shared()}\n")
    _pip(binary, "install", "-c", str(ROOT / "constraints.txt"), PEERS[name])
    _pip(binary, "uninstall", "-y", *UNWANTED)
    made.write_text(wanted)
    return binary


def _shared() -> str:
    return str(Path(sysconfig.get_paths()["purelib"]).resolve())


def _pip(binary: Path, *words: str) -> None:
    command = [str(binary), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Failed(f"no environment: {(errors or done.stderr.splitlines() or ['pip failed'])[0]}")


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
