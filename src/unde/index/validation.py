"""Whether an index is whole: every shard there, sound, and of this index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from unde.errors import UndeError
from unde.fingerprints import ids_fingerprint
from unde.index.shard_writer import Shapes
from unde.store import layout
from unde.store.manifest import Manifest
from unde.store.remote import Remote, StorePath, Unreachable
from unde.store.safe_io import read_json
from unde.store.shards import ShardError

_SMALL, _LONGEST_ID = 2**20, 2**12  # bytes of the ids of any index, and of an id on average


def check_shards(folder: StorePath, manifest: Manifest, verify: bool) -> None:
    """Every shard there, whole and at its place; one is in memory at a time. Remote ones are fetched for it, unless
    checksums are not asked for: then each is checked when it is first read."""
    count = len(manifest.shards)
    paths = [manifest.shard(folder, c, s) for c in range(manifest.terms) for s in range(count)]
    missing = _missing(paths)
    if missing:
        raise ShardError(
            f"{folder} is not finished: {len(missing)} of {len(paths)} shards are missing "
            f"({', '.join(missing[:5])}{', …' if missing[5:] else ''}). "
            "Run the same Index.build again to finish it"
        )
    problems, shapes = [], Shapes(manifest)
    for path in paths if verify or not isinstance(folder, Remote) else ():
        try:
            shapes.read(path, verify)
        except ShardError as e:
            problems.append(str(e))
    if problems:
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ShardError(
            f"{'; '.join(problems[:5])}{more}. Run the same Index.build again to repair the index"
        )


def _missing(paths: Sequence[StorePath]) -> list[str]:
    """Of this machine, what cannot be looked at may well be there: its error is told when it is read."""
    if isinstance(paths[0], Remote):
        there = layout.list_names(paths[0].parent)
        return [p.name for p in paths if p.name not in there]
    missing = []
    for path in paths:
        try:
            os.lstat(str(path))
        except FileNotFoundError:
            missing.append(path.name)
        except OSError:
            continue
    return missing


def read_ids(folder: StorePath, manifest: Manifest) -> list[Any] | None:
    """The user's names; a file that claims far more of them than there are examples is not even read."""
    if not manifest.ids:
        return None
    path = folder / layout.versioned_name(layout.IDS, manifest.generation)
    try:
        ids = read_json(path, max(_SMALL, _LONGEST_ID * manifest.examples))
        if not isinstance(ids, list) or len(ids) != manifest.examples:
            ids = []
    except Unreachable:
        raise
    except (OSError, ValueError):
        ids = []
    if ids_fingerprint(ids) != manifest.ids:
        raise UndeError(f"{path} is missing or damaged: run the same Index.build again to repair it")
    return ids
