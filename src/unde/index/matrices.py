"""Matrices of the projection that are not drawn from the seed: pca directions and second moments.

They are kept beside the manifest in one file, which belongs to what they were made from; a resumed build reads
them back, so that all shards are projected alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch import Tensor

from unde import console
from unde.errors import UndeError
from unde.store.file_watch import copy_tensors
from unde.store.layout import FISHERS, MANIFEST, MATRICES
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, checksum, create_shard, read_shard, write_shard


def home(folder: StorePath) -> StorePath:
    """Where the matrices of an index are: gradients with other labels are projected as those that they belong to."""
    inside = folder.name in FISHERS.values() and (folder.parent / MANIFEST).exists()
    return folder.parent if inside else folder


def made_once(
    folder: StorePath, origin: str, there: Manifest | None, make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The matrices in the folder if they were made from `origin`, else new ones, which are kept there.

    Those of an index that was begun (`there`) are replaced by equal ones only: where its file is damaged or gone.
    """
    path, owner = folder / MATRICES, hashlib.blake2b(origin.encode(), digest_size=16).hexdigest()
    try:
        return copy_tensors(read_shard(path, owner))
    except ShardError as e:
        damage = e
    if there is None:
        path.unlink(missing_ok=True)  # of an index that was never begun
    matrices = make()
    if there is None:
        if not create_shard(path, owner, matrices):  # another process begins the same index at the same time
            return read_shard(path, owner)
    elif fingerprint(matrices) == there.matrices:
        console.note(f"{damage}: made anew, as it was")
        write_shard(path, owner, matrices)
    return matrices  # else they are of another index, which is refused for what differs


def fingerprint(matrices: dict[str, Tensor]) -> str:
    return checksum(matrices) if matrices else ""


def read(folder: StorePath, manifest: Manifest) -> dict[str, Tensor]:
    """The matrices that an index was built with."""
    if not manifest.matrices:
        return {}
    path = folder / MATRICES
    advice = f"delete {path} and run the same Index.build again, which makes it anew as it was"
    try:
        matrices = copy_tensors(read_shard(path, None, verify=False))
    except ShardError as e:
        raise UndeError(f"{e}: queries cannot be projected as the index was; {advice}") from None
    if fingerprint(matrices) != manifest.matrices:
        raise UndeError(f"{path} is damaged, or of another index: queries cannot be projected; {advice}")
    return matrices
