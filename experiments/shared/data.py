"""Where data that is not part of a package lies: the folder that the environment variable UNDE_DATA names."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def folder(*inside: str) -> Path:
    """The path of a file or folder in it; the program ends with one sentence if it is not there."""
    root = os.environ.get("UNDE_DATA")
    path = None if root is None else Path(root, *inside)
    if path is None or not path.exists():
        sys.exit(
            f"this study reads {'/'.join(inside)} from the folder that the environment variable UNDE_DATA names "
            f"(now {root!r}): set it to a folder that has it"
        )
    return path
