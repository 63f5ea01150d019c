"""Where the studies keep things, and where data that is no part of a package lies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
BANKS = HERE / "banks"  # retrained models: what LDS is measured against; in the repository
MODELS = HERE / "models"  # attributed models, in half precision; in the repository
RESULTS = HERE / "results"  # what studies found; in the repository
RUNS = HERE / "runs"  # indexes, query features, unfinished work: can be deleted


def data_folder(*inside: str) -> Path:
    """A file or folder in the folder that UNDE_DATA names; the program ends with one sentence if it is not there."""
    root = os.environ.get("UNDE_DATA")
    path = None if root is None else Path(root, *inside)
    if path is None or not path.exists():
        sys.exit(
            f"this study reads {'/'.join(inside)} from the folder that the environment variable UNDE_DATA names "
            f"(now {root!r}): set it to a folder that has it"
        )
    return path


@contextmanager
def unfinished(path: Path) -> Generator[Path]:
    """Where to write a file that is then there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.{os.getpid()}.unfinished{path.suffix}")
    yield part
    part.replace(path)


def write_json(path: Path, content: Any) -> None:
    with unfinished(path) as part:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def computed(path: Path, compute: Callable[[], Any]) -> Any:
    """What a JSON file holds, which is written first if it is not there: an interrupted run goes on."""
    if not path.exists():
        write_json(path, compute())
    return json.loads(path.read_text())
