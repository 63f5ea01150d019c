"""A file of weights against its checksum."""

from __future__ import annotations

from pathlib import Path

from unde.errors import UndeError
from unde.store.reading import read_json
from unde.store.verified import DAMAGED, Verified
from unde.weights.weights import Weights


def verify(path: Path) -> Verified:
    found = Verified(path, "weights")
    if not path.exists():
        raise UndeError(f"no weights file at '{path}': expected a file written by Weights.save")
    try:
        Weights.load(path)
        found.found(path)
        if "checksum" not in read_json(path, follow=True):
            found.notes.append("it has no checksum, as releases before 0.2 wrote none")
    except UndeError as e:
        why = str(e).removeprefix(f"'{path}' is damaged")
        found.report(path, DAMAGED, why, "learn and save them again")
    return found
