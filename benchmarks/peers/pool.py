"""Processes of peers stay from one case to the next: loading their libraries takes longer than a round."""

from __future__ import annotations

import atexit
from collections.abc import Iterable

from benchmarks.peers import host
from benchmarks.rounds import Failed

_alive: dict[str, host.Peer] = {}


def start(names: Iterable[str], threads: int, errors: dict[str, str]) -> dict[str, host.Peer]:
    """Those that could be started, beside one another; of the others, why not."""
    for name in names:
        if name in _alive and not _alive[name].ended:
            continue
        try:
            _alive[name] = host.start(name, threads)
        except Failed as e:
            errors[name] = str(e)
    return {name: _alive[name] for name in names if name in _alive and name not in errors}


@atexit.register
def close() -> None:
    for name in list(_alive):
        _alive.pop(name).close()
