"""A file of weights against its checksum."""

from __future__ import annotations

from unde.errors import UndeError
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.verify_report import DAMAGED, Verified
from unde.weights.weights import Weights


def verify(path: StorePath) -> Verified:
    found = Verified(path, "weights")
    if not exists(path):
        raise UndeError(f"no weights file at '{path}': expected a file written by Weights.save")
    try:
        Weights.load(path)
        found.found(path)
    except Unreachable:
        raise
    except UndeError as e:
        why = str(e).removeprefix(f"'{path}' is damaged")
        found.report(path, DAMAGED, why, "learn and save them again")
    return found
