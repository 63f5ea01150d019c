"""The process of one peer: reads one JSON request a line, answers each with one line.

    {"do": "load", "case": "gpt2", "seed": 0}          → {"note": …, "version": …}
    {"do": "run", "rank": 16, "examples": 16}          → {"seconds": …, "planning": …, "numbers": …}

Whatever goes wrong is answered as {"error": one line}, and the next request is read. Libraries may print: the real
output is put aside for answers, and theirs goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from benchmarks.cases import CASES, SEED, rows_of
from benchmarks.peers.inputs import BuildInputs, Cannot


class Worker:
    def __init__(self, peer: ModuleType) -> None:
        self.peer, self.loaded = peer, None

    def load(self, case: str, seed: int = SEED) -> dict[str, Any]:
        chosen = CASES[case]
        setup = chosen.setup(seed)
        setup.model.eval()
        self.loaded = chosen, setup, rows_of(setup, max(chosen.examples, 32))
        return {"note": self.peer.NOTE, "version": _version(self.peer)}

    def run(self, rank: int, examples: int) -> dict[str, Any]:
        assert self.loaded is not None, "nothing is loaded"
        case, setup, rows = self.loaded
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            return self.peer.run(BuildInputs(case, setup, rows, rank, examples, Path(folder)))


def serve(peer: ModuleType, requests: Iterable[str], answers: TextIO) -> None:
    worker = Worker(peer)
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": one_line(e)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def one_line(error: BaseException, most: int = 160) -> str:
    """
    >>> one_line(ValueError("no such layer\\nand more"))
    'ValueError: no such layer'
    """
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__
    words = first if isinstance(error, Cannot) else f"{kind}: {first}" if first else kind
    return words if len(words) <= most else words[: most - 1] + "…"


def _version(peer: ModuleType) -> str:
    name = peer.__name__.rpartition(".")[2]
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}")
    serve(peer, sys.stdin, answers)


if __name__ == "__main__":
    main()
