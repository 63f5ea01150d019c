"""An index in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from unde.markup import Child
from unde.methods import Method
from unde.notebook import facts, listed
from unde.store.manifest import Manifest
from unde.store.remote import StorePath


def index_facts(folder: StorePath, m: Manifest, method: Method, groups: Sequence[str]) -> str:
    found: dict[str, Child] = {
        "folder": str(folder),
        "method": str(method),
        "training examples": f"{m.examples:,}" + ("" if m.ids else ", without ids"),
        "features": f"{m.width:,} numbers each, {m.store_dtype}"
        + (f", {m.terms} checkpoints or steps" if m.terms > 1 else ""),
        "groups": listed(groups),
        "task": str(m.task["name"]),
    }
    return facts("Index", found)
