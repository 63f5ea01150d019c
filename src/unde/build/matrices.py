"""Matrices of the projection that are not drawn from the seed: pca directions and second moments.

They are kept beside the manifest in one file, which belongs to what they were made from; a resumed build reads
them back, so that all shards are projected alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from unde.errors import UndeError
from unde.index.folder import GIVEN, locked, prepare_folder
from unde.index.manifest import FILE, Manifest
from unde.index.store import ShardError, checksum, read_shard, write_shard


def made_once(folder: Path, origin: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The matrices in the folder if they were made from `origin`, else new ones, which are kept there."""
    path, owner = folder / GIVEN, hashlib.blake2b(origin.encode(), digest_size=16).hexdigest()
    if path.exists():
        try:
            return read_shard(path, owner)
        except ShardError as e:
            if (folder / FILE).exists():
                raise UndeError(
                    f"{folder} already holds another index, or a damaged one ({e}). Choose another folder, or "
                    "delete this one"
                ) from None
    prepare_folder(folder)
    matrices = make()
    with locked(folder):
        write_shard(path, owner, matrices)
    return matrices


def fingerprint(matrices: dict[str, Tensor]) -> str:
    return checksum(matrices) if matrices else ""


def read(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The matrices that an index was built with."""
    if not manifest.given:
        return {}
    path = folder / GIVEN
    try:
        matrices = read_shard(path, None, verify=False)
    except ShardError as e:
        raise UndeError(f"{e}: queries cannot be projected as the index was. Rebuild it") from None
    if fingerprint(matrices) != manifest.given:
        raise UndeError(f"{path} is damaged, or of another index: queries cannot be projected. Rebuild it")
    return matrices
