"""Shards: immutable safetensors files, each with a checksum, the index it belongs to and its place there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unde.devices import download
from unde.errors import UndeError
from unde.store.cache import Cache, delete_folder
from unde.store.files import check_header, create_bytes, write_bytes
from unde.store.layout import SCRATCH
from unde.store.remote import StorePath, is_local

_META = "unde"
_BLOCK = 2**20  # bytes that have a sum of their own
MAPPED = 2**30  # bytes from which on results are mapped from a temporary file
_TYPES = {  # as they are called in a file, in the order that they have there
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


Stamp = tuple[int, int, int, int, int]


class FileWatch:
    """Detect files that other programs change while an index is open.

    Shards are mapped, not read. Size, times and inode of a verified file are recorded; a file that still has them is
    trusted, otherwise its checksum is compared again.
    """

    def __init__(self) -> None:
        self._stamps: dict[StorePath, Stamp | None] = {}

    def record(self, paths: Iterable[StorePath]) -> None:
        """Record files that were verified just now."""
        for path in paths:
            with suppress(OSError):
                self._stamps[path] = _stamp(path)

    def changed(self, path: StorePath) -> bool:
        """Whether a file differs from its record; records it if it has none."""
        try:
            stamp = _stamp(path)
        except OSError:
            return True
        return self._stamps.setdefault(path, stamp) != stamp


def _stamp(path: StorePath) -> Stamp | None:
    """None for objects: their local copies are verified when they are made."""
    if not is_local(path):
        return None
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def copy_tensors(mapped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors one by one, so that they do not depend on the file they were mapped from."""
    left = dict(mapped)
    return {name: left.pop(name).clone() for name in list(left)}


class ShardError(UndeError):
    """A shard that is missing, damaged, or belongs to another index."""


@contextmanager
def report_damage(path: StorePath) -> Generator[None]:
    """Raise a ValueError about the tensors of a shard as a ShardError that names its file."""
    try:
        yield
    except ValueError as e:
        raise ShardError(f"shard {path} is damaged: {e}") from None


def write_shard(path: StorePath, owner: str, tensors: Mapping[str, Tensor], place: str | None = None) -> None:
    """Write tensors that belong to `owner` and to one place in it, by default the file's name."""
    content = _packed(tensors, owner, place or path.name)
    if not is_local(path):
        copy = b"".join(content)
        write_bytes(path, copy)
        Cache.for_user().keep(path, copy)
    else:
        write_bytes(path, content)


def create_shard(path: StorePath, owner: str, tensors: Mapping[str, Tensor]) -> bool:
    """The same, unless a file is there; whether it was written."""
    return create_bytes(path, _packed(tensors, owner, path.name))


def _packed(tensors: Mapping[str, Tensor], owner: str, place: str) -> list[bytes | memoryview]:
    """The content of a safetensors file, without copies of the tensors (the library's writer copies each)."""
    tensors = download({k: v.contiguous() for k, v in tensors.items()})
    meta = {"checksum": checksum(tensors, block_sums), "index": owner, "name": place}
    header, order = _header(tensors, meta)
    return [header, *(_buffer(tensors[name]) for name in order if tensors[name].numel())]


def _header(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The start of a file, and the order of the tensors that follow."""
    # One metadata entry only: the order of several is not fixed in the format's writer.
    header: dict[str, Any] = {"__metadata__": {_META: json.dumps(meta)}}
    types, at = list(_TYPES), 0
    for name, t in sorted(tensors.items(), key=lambda item: (types.index(item[1].dtype), item[0])):
        header[name] = {"dtype": _TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [name for name in header if name != "__metadata__"]


def _buffer(t: Tensor) -> memoryview:
    return t.flatten().view(torch.uint8).numpy().data


def read_shard(
    path: StorePath, owner: str | None, verify: bool = True, place: str | None = None
) -> dict[str, Tensor]:
    """Map the tensors of a shard, after checking that it is whole and belongs to `owner` (None: to anyone).

    A remote shard is mapped from a copy on this machine, which is checked when it is made.
    """
    if is_local(path):
        return map_shard(path, path, owner, verify, place)
    cache = Cache.for_user()
    # What belongs to an index has one content, so a sound copy of it is as good as the object: the store is not asked.
    copy = None if verify or owner is None else cache.newest(path)
    try:
        copy = copy or cache.path_of(path)
        if copy.exists():
            cache.touch(copy)
            with suppress(ShardError):  # a copy that is damaged, or was removed this moment, is replaced
                return map_shard(copy, path, owner, verify, place)
            copy = cache.path_of(path)
        with cache.download(path, copy) as file:
            return map_shard(file, path, owner, True, place)
    except FileNotFoundError:
        raise ShardError(f"shard {path.name} is missing from {path.parent}") from None


def map_shard(
    file: Path, path: StorePath, owner: str | None, verify: bool, place: str | None
) -> dict[str, Tensor]:
    """Map the tensors of a file that holds the content of `path`."""
    try:
        check_header(file)
        with safe_open(file, framework="pt") as f:
            meta = json.loads((f.metadata() or {}).get(_META, "{}"))
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ShardError(f"shard {path.name} is missing from {path.parent}") from None
    except OSError as e:
        raise ShardError(f"shard {path} is unreadable ({e.strerror or e})") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as e:
        raise ShardError(f"shard {path} is truncated or damaged ({e})") from None
    owned = isinstance(meta, dict) and owner in (None, meta.get("index"))
    if not owned or meta.get("name") != (place or path.name):
        raise ShardError(f"shard {path} is foreign: it was written for another index or another place in it")
    if verify and meta.get("checksum") != checksum(tensors, block_sums):
        raise ShardError(f"shard {path} is damaged: its content does not match its checksum")
    return tensors


def reread_shard(path: StorePath, owner: str, watch: FileWatch) -> dict[str, Tensor]:
    """Read a shard that was valid before; its checksum is compared only if the file has changed since."""
    changed = watch.changed(path)
    tensors = read_shard(path, owner, verify=changed)
    if changed:
        watch.record([path])
    elif watch.changed(path):
        raise ShardError(f"shard {path} is being changed by another program: it cannot be relied on")
    return tensors


def is_valid_shard(path: StorePath, owner: str | None, place: str | None = None) -> bool:
    """Whether there is a valid shard of `owner`."""
    try:
        read_shard(path, owner, place=place)
    except ShardError:
        return False
    return True


def file_bytes(tensors: Mapping[str, Tensor], place: str) -> int:
    """Bytes of the file that `write_shard` makes of tensors like these, which may be on the meta device.

    >>> file_bytes({"loss": torch.empty(10, device="meta")}, "c00-000000.safetensors")
    312
    """
    meta = {"checksum": "0" * 64, "index": "0" * 32, "name": place}
    return len(_header(tensors, meta)[0]) + sum(t.nbytes for t in tensors.values())


def checksum(
    tensors: Mapping[str, Tensor], of: Callable[[memoryview], bytes | memoryview] = memoryview
) -> str:
    """SHA-256 of names, types, shapes and content, or of a function `of` the content."""
    h = hashlib.sha256()  # processors have instructions for it
    for name in sorted(tensors):
        t = tensors[name]
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(of(_buffer(t)) if t.numel() else b"")
    return h.hexdigest()


def block_sums(data: memoryview) -> bytes:
    """CRC-32 of every block: enough to find damage, in 0.4 of the time of a hash of all."""
    parts = (zlib.crc32(data[i : i + _BLOCK]) for i in range(0, len(data), _BLOCK))
    return b"".join(part.to_bytes(4, "little") for part in parts)


_ABANDONED = 86_400.0  # seconds after which files of a killed process are deleted


@contextmanager
def scratch(folder: StorePath | None) -> Generator[StorePath]:
    """A temporary folder in that of an index, which all workers see; a local one if none can be written."""
    try:
        if folder is None:
            raise FileNotFoundError
        _clear(folder / SCRATCH)
        shared = folder / SCRATCH / secrets.token_hex(8)
        shared.mkdir(parents=True)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="unde-") as temporary:
            yield Path(temporary)
        return
    try:
        yield shared
    finally:
        with suppress(OSError):
            delete_folder(shared)
        with suppress(OSError):
            shared.parent.rmdir()  # unless other processes use it


def _clear(folder: StorePath) -> None:
    """Delete what killed processes left in a local folder; object stores expire old objects by their own rules."""
    for old in folder.glob("*") if is_local(folder) else ():
        if time.time() - old.stat().st_mtime > _ABANDONED:
            shutil.rmtree(old, ignore_errors=True)


def empty_tensor(*shape: int) -> Tensor:
    """A float32 tensor for results; a large one is mapped from a temporary file, so that it need not fit in memory.

    Whole gradients of many queries take more than the memory budget of an index, and are read block by block.
    """
    count = math.prod(shape)
    if 4 * count <= MAPPED or os.name != "posix":  # elsewhere a mapped file cannot be removed
        return torch.empty(shape)
    descriptor, name = tempfile.mkstemp(prefix="unde-")
    try:
        os.posix_fallocate(descriptor, 0, 4 * count) if hasattr(os, "posix_fallocate") else None
        return torch.from_file(name, shared=True, size=count, dtype=torch.float32).view(shape)
    except (OSError, RuntimeError) as e:
        raise UndeError(
            f"no room for {4 * count / 2**30:.3g} GiB of features in {tempfile.gettempdir()} ({e}): ask fewer queries "
            "at once, or set TMPDIR to a folder on a larger disk"
        ) from None
    finally:
        os.close(descriptor)
        os.unlink(name)  # it stays mapped


class Results:
    """Results of jobs by number: in memory if `folder` is None, else in files."""

    def __init__(self, owner: str, folder: StorePath | None = None) -> None:
        self.owner, self.folder = owner, folder
        self._memory: dict[tuple[int, ...], Mapping[str, Tensor]] = {}

    def put(self, job: tuple[int, ...], result: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            self._memory[job] = result
        else:
            write_shard(self._file(job), self.owner, result)

    def take(self, job: tuple[int, ...]) -> Mapping[str, Tensor]:
        """Return a result and delete it."""
        if self.folder is None:
            return self._memory.pop(job)
        result = read_shard(self._file(job), self.owner)
        self._file(job).unlink()  # mapped tensors stay valid
        return result

    def _file(self, job: tuple[int, ...]) -> StorePath:
        assert self.folder is not None
        return self.folder / ("-".join(map(str, job)) + ".safetensors")
