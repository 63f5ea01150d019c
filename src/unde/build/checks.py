"""Whether an index is whole: every shard there, sound, and of this index."""

from __future__ import annotations

import json
from typing import Any

from unde.build.fingerprints import ids_fingerprint
from unde.errors import UndeError
from unde.store import layout
from unde.store.manifest import Manifest
from unde.store.remote import Place, Remote, Unreachable
from unde.store.shards import ShardError, read_shard


def check_shards(folder: Place, manifest: Manifest, verify: bool) -> None:
    """Every shard there, whole and at its place; one is in memory at a time. Remote ones are fetched for it, unless
    checksums are not asked for: then each is checked when it is first read."""
    count = len(manifest.shards)
    paths = [layout.shard(folder, c, s) for c in range(manifest.terms) for s in range(count)]
    there = layout.listed(folder / layout.SHARDS)
    missing = [p.name for p in paths if p.name not in there]
    if missing:
        raise ShardError(
            f"{folder} is not finished: {len(missing)} of {len(paths)} shards are missing "
            f"({', '.join(missing[:5])}{', …' if missing[5:] else ''}). "
            "Run the same Index.build again to finish it"
        )
    problems = []
    for path in paths if verify or not isinstance(folder, Remote) else ():
        try:
            read_shard(path, manifest.id, verify)
        except ShardError as e:
            problems.append(str(e))
    if problems:
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ShardError(
            f"{'; '.join(problems[:5])}{more}. Run the same Index.build again to repair the index"
        )


def read_ids(folder: Place, manifest: Manifest) -> list[Any] | None:
    if not manifest.ids:
        return None
    path = folder / layout.IDS
    try:
        ids = json.loads(path.read_text())
    except Unreachable:
        raise
    except (OSError, ValueError):
        ids = []
    if ids_fingerprint(ids) != manifest.ids:
        raise UndeError(f"{path} is missing or damaged: run the same Index.build again to repair it")
    return ids
