"""Copy an index or a file between this machine and an object store, verified and resumable.

The manifest is copied first and claims the target, shards last: an index that can be opened is complete.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from unde import console
from unde.errors import UndeError
from unde.store import layout
from unde.store.cache import delete, delete_folder, download
from unde.store.files import clear_partial, create_bytes, read_start, write_bytes
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import Remote, StorePath, is_local
from unde.store.shards import ShardError, is_valid_shard, map_shard, read_shard

_HEAD = 2**16  # bytes at the beginning of a file of tensors that tell it from another: its checksum is there
_TENSORS = ".safetensors"
_ON_DEMAND = (f"{layout.KERNELS}/", f"{layout.QUERIES}/")


@dataclass(frozen=True)
class CopyCount:
    """Number of files of a copy, and how many of them the target had already."""

    files: int
    unchanged: int


def copy_index(source: StorePath, target: StorePath) -> CopyCount:
    """Copy all files of an index, finished or not; other files in its folder are not copied."""
    manifest, sizes = Manifest.read(source), _sizes(source)
    known = {name for name in sizes if layout.is_index_path(name)}
    if foreign := sorted(name for name in {*sizes} - known if Path(name).name != layout.LOCK):
        more = ", …" if foreign[3:] else ""
        console.note(f"left where it is, as not of the index: {', '.join(foreign[:3])}{more}")
    homes = {"": manifest}
    for inside in layout.FISHERS.values():
        present = f"{inside}/{layout.MANIFEST}" in sizes
        homes[f"{inside}/"] = Manifest.read(source / inside) if present else manifest
    names = sorted((name for name in known if _is_current(name, homes)), key=_order)
    layout.prepare(target)
    with locked(target, doing="writing"):
        clear_partial(target)
        existing, unchanged = _sizes(target), 0
        with console.progress("copying", len(names), unit="files") as advance:
            for name in names:
                at, to, same_size = source / name, target / name, sizes[name] == existing.get(name)
                to.parent.mkdir(parents=True, exist_ok=True)
                if at.name == layout.MANIFEST:
                    copied = _copy_manifest(at, to)
                elif name.endswith(_TENSORS):
                    recorded = _owner_and_place(*_home(name, homes))
                    copied = _copy_tensors(at, to, *recorded, same_size, name.startswith(_ON_DEMAND))
                else:
                    copied = _copy_text(at, to, same_size)
                unchanged += not copied
                advance(1)
    return CopyCount(len(names), unchanged)


def copy_file(content: bytes, target: StorePath) -> CopyCount:
    """Write a checked file, unless the target holds another."""
    if target.is_dir():
        raise UndeError(f"{target} is a folder: name the file that is to be written")
    target.parent.mkdir(parents=True, exist_ok=True)
    if create_bytes(target, content):
        return CopyCount(1, 0)
    if target.read_bytes() != content:
        raise UndeError(f"{target} holds something else: choose another place, or delete it")
    return CopyCount(1, 1)


def delete_index(folder: StorePath, keep: Collection[str] = ()) -> None:
    """Delete all files of an index but its lock, what processes share, and those to `keep`; the manifest goes last."""
    keep = {*keep, layout.LOCK, layout.SCRATCH, layout.MANIFEST, layout.CARD}
    for name in sorted(filter(layout.is_index_name, layout.list_names(folder))):
        if name not in keep:
            path = folder / name
            (delete_folder if path.is_dir() else delete)(path)
    delete(folder / layout.MANIFEST)


def _order(name: str) -> tuple[bool, bool, bool, str]:
    shards = name.startswith(f"{layout.SHARDS}/")
    fisher = name.startswith(tuple(f"{inside}/" for inside in layout.FISHERS.values()))
    return shards, fisher, not name.endswith(layout.MANIFEST), name


def _copy_manifest(at: StorePath, to: StorePath) -> bool:
    """Write a manifest if there is none; refuse a target that holds another index."""
    if create_bytes(to, at.read_bytes()):
        return True
    if Manifest.read(to.parent).id != Manifest.read(at.parent).id:
        raise UndeError(
            f"{to.parent} holds another index than {at.parent}: choose another place, or delete it"
        )
    return False


def _copy_text(at: StorePath, to: StorePath, same_size: bool) -> bool:
    content = at.read_bytes()
    if same_size and to.read_bytes() == content:
        return False
    write_bytes(to, content)
    return True


def _copy_tensors(
    at: StorePath, to: StorePath, owner: str | None, place: str, same_size: bool, on_demand: bool
) -> bool:
    """Copy a file of tensors after checking its checksum; return whether it was copied. Existing local files are
    verified, too."""
    same = same_size and read_start(at, _HEAD) == read_start(to, _HEAD)
    if same and (not is_local(to) or is_valid_shard(to, owner, place)):
        return False
    try:
        if not is_local(at) and is_local(to):
            _fetch(at, to, owner, place)
        else:
            read_shard(at, owner, place=place)
            _send(at, to)
    except ShardError as e:
        if not on_demand:
            raise UndeError(f"{e}. Run the same Index.build again to repair it, then copy it") from None
        console.note(f"{e}: left out, it is made anew when it is needed")
    return True


def _fetch(at: Remote, to: Path, owner: str | None, place: str) -> None:
    try:
        with download(at, to) as temporary:
            map_shard(temporary, at, owner, True, place)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
    except UndeError:
        raise
    except OSError as e:
        raise UndeError(
            f"cannot write {to} ({e.strerror}): make room there and run the same again, it goes on where it stopped"
        ) from e


def _send(at: StorePath, to: StorePath) -> None:
    if not is_local(at) or is_local(to):
        write_bytes(to, at.read_bytes())
        return
    to.upload(at)
    sent, arrived = at.stat().st_size, to.stat().st_size
    if sent != arrived:
        raise UndeError(f"{to} has {arrived:,} of {sent:,} bytes: run the same again, it is sent anew")


def _home(name: str, homes: Mapping[str, Manifest]) -> tuple[str, Manifest]:
    """Name of a file in the index it belongs to (the index itself or a Fisher index inside), and its manifest."""
    inside = next((home for home in homes if home and name.startswith(home)), "")
    return name.removeprefix(inside), homes[inside]


def _is_current(name: str, homes: Mapping[str, Manifest]) -> bool:
    """Whether a file belongs to the current state of the index, not to an earlier or unfinished one."""
    inside, of = _home(name, homes)
    at = layout.parse_shard_name(inside.removeprefix(f"{layout.SHARDS}/"))
    if at is not None and of.changes is not None:
        return at[1] in {number for number, _ in of.files}
    return not layout.is_versioned(inside) or inside in layout.current_names(of.generation)


def _owner_and_place(inside: str, of: Manifest) -> tuple[str | None, str]:
    """Owner and place that a file of tensors records."""
    folder, _, file = inside.rpartition("/")
    if file == layout.MATRICES:
        return None, file
    if folder == layout.QUERIES:
        return of.lineage, layout.QUERIES
    if folder == layout.SHARDS:
        at = layout.parse_shard_name(file)
        return dict(of.files).get(-1 if at is None else at[1], of.id), file
    return (folder.rpartition("/")[2] if folder.startswith(f"{layout.KERNELS}/") else of.id), file


def _sizes(folder: StorePath) -> dict[str, int]:
    """Sizes of all files below a folder, by relative path. Links are not followed."""
    if not is_local(folder):
        return folder.sizes()
    paths = (Path(where) / name for where, _, names in os.walk(folder) for name in names)
    files = (path for path in paths if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
