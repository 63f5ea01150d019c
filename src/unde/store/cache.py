"""Copies of remote files on this machine, from which tensors are mapped.

$UNDE_CACHE        the folder, by default unde/ in the user's folder of caches
$UNDE_CACHE_BYTES  how large it may grow, by default 20GB: what was not used for longest goes first

A copy is called after its URL and the version of the object, so one of an object that was replaced is not found again.
It gets its name once it was checked. Copies that others have mapped meanwhile may be removed: the system keeps their
bytes until they are closed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from unde.data import parse_bytes
from unde.errors import UndeError
from unde.store.files import PARTIAL, temporary_for, write_atomically
from unde.store.remote import Remote, StorePath, Unreachable

SHARE = 100  # the folder is looked through whenever one in so many of its bytes are new
ABANDONED = 24 * 3600  # seconds after which a download that did not end was killed
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id")  # as drivers call them


class Cache:
    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._new = limit  # bytes since the folder was last looked through

    @staticmethod
    def here() -> Cache:
        """That of this user, as the environment says now."""
        folder = Path(os.environ.get("UNDE_CACHE") or _user_caches() / "unde").expanduser()
        return _cache(folder, parse_bytes(os.environ.get("UNDE_CACHE_BYTES") or "20GB"))

    def at(self, remote: Remote) -> Path:
        """Where a copy of the object as it is now would be. A FileNotFoundError if there is no such object."""
        info = remote.info()
        version = next((info[name] for name in _VERSIONS if info.get(name)), info)
        return self._stem(remote, f"{info['size']} {version}")

    def newest(self, remote: Remote) -> Path | None:
        """A copy of any version; the store is not asked."""
        stem = self._stem(remote, "")
        found = [p for p in stem.parent.glob(f"{stem.name[:32]}-*") if not p.name.endswith(PARTIAL)]
        return max(found, key=_used, default=None)

    def touch(self, copy: Path) -> None:
        with suppress(OSError):
            os.utime(copy)

    @contextmanager
    def fetched(self, remote: Remote, at: Path) -> Generator[Path]:
        """The object in a temporary file, which gets its name if the block ends well."""
        temporary = temporary_for(at)
        try:
            self._make(at.parent)
            remote.download(temporary)
            yield temporary
            os.replace(temporary, at)
        except (UndeError, FileNotFoundError):
            raise
        except OSError as e:
            raise self._full(remote, e) from e
        finally:
            with suppress(OSError):
                temporary.unlink()
        self._grown(at)

    def keep(self, remote: Remote, content: bytes) -> None:
        """A copy of what was just written there, if there is room."""
        with suppress(OSError):
            at = self.at(remote)
            self._make(at.parent)
            write_atomically(at, content)
            self._grown(at)

    def forget(self, remote: Remote) -> None:
        """Remove all copies of an object."""
        stem = self._stem(remote, "")
        for copy in stem.parent.glob(f"{stem.name[:32]}-*"):
            with suppress(OSError):
                copy.unlink()

    def _stem(self, remote: Remote, version: str) -> Path:
        url, which = (hashlib.blake2b(t.encode(), digest_size=16).hexdigest() for t in (remote.url, version))
        return self.folder / url[:2] / f"{url}-{which}"

    def _make(self, folder: Path) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)

    def _grown(self, by: Path) -> None:
        with suppress(OSError):
            self._new += by.stat().st_size
        if self._new > self.limit // SHARE:
            self._new = 0
            self._trim(by)

    def _trim(self, keep: Path) -> None:
        found = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total, now = sum(size for _, size, _ in found), time.time()
        for used, size, path in sorted(found):
            running = path.name.endswith(PARTIAL) and now - used < ABANDONED
            if path != keep and not running and (total > self.limit or path.name.endswith(PARTIAL)):
                with suppress(OSError):
                    path.unlink()
                    total -= size

    def _full(self, remote: Remote, e: OSError) -> Unreachable:
        return Unreachable(
            e.errno or 0,
            f"cannot keep a copy of {remote} in {self.folder} ({e.strerror}): make room there, or set UNDE_CACHE to "
            "another folder",
        )


@lru_cache(maxsize=4)
def _cache(folder: Path, limit: int) -> Cache:
    return Cache(folder, limit)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _user_caches() -> Path:
    if sys.platform == "darwin":
        return Path("~/Library/Caches")
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def delete(path: StorePath) -> None:
    """Delete a file, and its cached copies on this machine where it is remote."""
    path.unlink(missing_ok=True)
    if isinstance(path, Remote):
        Cache.here().forget(path)


def delete_folder(folder: StorePath) -> None:
    """Delete a folder with all files in it."""
    if not isinstance(folder, Remote):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        for name in folder.sizes():
            delete(folder / name)
