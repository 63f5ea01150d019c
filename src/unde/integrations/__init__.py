"""Adapters of other libraries; each is imported on its own, and only where it is used."""

from __future__ import annotations

import importlib
from typing import Any

from unde.errors import UndeError


def require(library: str, install: str = "unde[hf]") -> Any:
    """Import an optional library; raise with what to install."""
    try:
        return importlib.import_module(library)
    except ImportError as e:
        raise UndeError(f"this needs {library.partition('.')[0]}: pip install '{install}' ({e})") from None
