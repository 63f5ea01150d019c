"""Local copies of remote files, from which tensors are mapped.

$UNDE_CACHE        the folder, by default unde/ in the user's folder of caches
$UNDE_CACHE_BYTES  its largest size, by default 20GB: the least recently used copies are deleted first

The name of a copy is a hash of the URL and the version of the object, so copies of replaced objects are not used. A
copy gets its name after it was verified. Copies that are mapped may be deleted: the system keeps their bytes.
"""

from __future__ import annotations

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
from unde.store.files import PARTIAL, checksum, temporary_for, write_atomically
from unde.store.remote import Remote, StorePath, Unreachable, is_local

SHARE = 100  # the folder is trimmed after every limit / SHARE new bytes
ABANDONED = 24 * 3600  # seconds after which an unfinished download counts as killed
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id")  # as drivers call them


@contextmanager
def download(remote: Remote, at: Path) -> Generator[Path]:
    """Download to a temporary file, which gets its name if the block ends without an error."""
    temporary = temporary_for(at)
    try:
        remote.download(temporary)
        yield temporary
        os.replace(temporary, at)
    finally:
        with suppress(OSError):
            temporary.unlink()


class Cache:
    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._new = limit  # bytes since the folder was last trimmed

    @staticmethod
    def for_user() -> Cache:
        """The cache of this user, as the environment sets it now."""
        folder = Path(os.environ.get("UNDE_CACHE") or _user_caches() / "unde").expanduser()
        return _cache(folder, parse_bytes(os.environ.get("UNDE_CACHE_BYTES") or "20GB"))

    def path_of(self, remote: Remote) -> Path:
        """Path of a copy of the current version; a FileNotFoundError if there is no such object."""
        info = remote.info()
        version = next((info[name] for name in _VERSIONS if info.get(name)), info)
        return self._stem(remote, f"{info['size']} {version}")

    def newest(self, remote: Remote) -> Path | None:
        """The last used copy of any version, without a request to the store."""
        stem = self._stem(remote, "")
        copies = [p for p in stem.parent.glob(f"{stem.name[:32]}-*") if not p.name.endswith(PARTIAL)]
        return max(copies, key=_used, default=None)

    def touch(self, copy: Path) -> None:
        with suppress(OSError):
            os.utime(copy)

    @contextmanager
    def download(self, remote: Remote, at: Path) -> Generator[Path]:
        """Download to a temporary file, which gets its name if the block ends without an error."""
        try:
            self._make(at.parent)
            with download(remote, at) as temporary:
                yield temporary
        except (UndeError, FileNotFoundError):
            raise
        except OSError as e:
            raise Unreachable(
                e.errno or 0,
                f"cannot keep a copy of {remote} in {self.folder} ({e.strerror}): make room there, or set UNDE_CACHE "
                "to another folder",
            ) from e
        self._account(at)

    def keep(self, remote: Remote, content: bytes) -> None:
        """Store a copy of what was just written, if there is room."""
        with suppress(OSError):
            at = self.path_of(remote)
            self._make(at.parent)
            write_atomically(at, content)
            self._account(at)

    def discard(self, remote: Remote) -> None:
        """Delete all copies of an object."""
        stem = self._stem(remote, "")
        for copy in stem.parent.glob(f"{stem.name[:32]}-*"):
            with suppress(OSError):
                copy.unlink()

    def _stem(self, remote: Remote, version: str) -> Path:
        url, which = checksum(remote.url), checksum(version)
        return self.folder / url[:2] / f"{url}-{which}"

    def _make(self, folder: Path) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)

    def _account(self, by: Path) -> None:
        with suppress(OSError):
            self._new += by.stat().st_size
        if self._new > self.limit // SHARE:
            self._new = 0
            self._trim(by)

    def _trim(self, keep: Path) -> None:
        files = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total, now = sum(size for _, size, _ in files), time.time()
        for used, size, path in sorted(files):
            running = path.name.endswith(PARTIAL) and now - used < ABANDONED
            if path != keep and not running and (total > self.limit or path.name.endswith(PARTIAL)):
                with suppress(OSError):
                    path.unlink()
                    total -= size


_cache = lru_cache(maxsize=4)(Cache)


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
    if not is_local(path):
        Cache.for_user().discard(path)


def delete_folder(folder: StorePath) -> None:
    """Delete a folder with all files in it."""
    if is_local(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        for name in folder.sizes():
            delete(folder / name)
