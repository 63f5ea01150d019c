"""Places: folders and files of this machine, and objects below a URL, of any store that fsspec has a driver for.

A store of objects has no rename and no folders. It does not need them: an object is put there whole or not at all, and
a folder is what names begin with.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

import fsspec

from unde.errors import UndeError

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL | re.IGNORECASE)
_LOCAL = ("file", "local")
_EXTRAS = {"s3": "unde[s3]", "s3a": "unde[s3]"}
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_NO_BUCKET = "there is no such bucket or container, make it or choose another"
_NO_CREDENTIALS = re.compile("Credentials|Token", re.IGNORECASE)


class Unreachable(OSError, UndeError):
    """A store that cannot be used: no driver, no network, no such bucket, access denied."""

    def __str__(self) -> str:
        return str(self.strerror)


class Size(NamedTuple):
    st_size: int


class Remote:
    """What begins with a URL, with as much of `pathlib.Path` as an index needs. It can be sent to other processes and
    machines, which find drivers and credentials for themselves.

    >>> Remote("s3://bucket/runs/") / "idx"
    Remote('s3://bucket/runs/idx')
    >>> (Remote("s3://bucket/runs") / "idx").parent.name
    'runs'
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        parts = [part for part in match[2].split("/") if part] if match is not None else []
        if match is None or not parts or "::" in url or {".", ".."} & set(parts):
            raise UndeError(f"cannot read the URL {url!r}: expected one such as s3://bucket/folder")
        self.protocol = match[1].lower()
        self.url = f"{self.protocol}://{'/'.join(parts)}"

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: Remote) -> bool:
        return self.url < other.url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return PurePath(self.name).suffix

    def with_name(self, name: str) -> Remote:
        return self.parent / name

    def with_suffix(self, suffix: str) -> Remote:
        return self.with_name(str(PurePath(self.name).with_suffix(suffix)))

    # --- what is there ----------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What the store says about the object, as it is now."""
        with self._reached() as (fs, path):
            fs.invalidate_cache(path)  # other machines write here too
            return fs.info(path)

    def exists(self) -> bool:
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        try:
            return self.info()["type"] == "directory"
        except FileNotFoundError:
            return False

    def is_file(self) -> bool:
        try:
            return self.info()["type"] == "file"
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> Size:
        return Size(self.info()["size"])

    def iterdir(self) -> Iterator[Remote]:
        """What is directly below; nothing where nothing is."""
        try:
            with self._reached() as (fs, path):
                fs.invalidate_cache(path)
                names = [found.rstrip("/").rpartition("/")[2] for found in fs.ls(path, detail=False)]
        except FileNotFoundError:
            return
        yield from (self / name for name in sorted({*names} - {self.name, ""}))

    def sizes(self) -> dict[str, int]:
        """Of all objects below, by what their names go on with."""
        with self._reached() as (fs, path):
            fs.invalidate_cache(path)
            found = fs.find(path, detail=True)
        return {
            name.removeprefix(path).lstrip("/"): info["size"]
            for name, info in found.items()
            if name.startswith(f"{path}/")
        }

    def glob(self, pattern: str) -> Iterator[Remote]:
        return (found for found in self.iterdir() if fnmatch.fnmatchcase(found.name, pattern))

    def read_bytes(self, first: int | None = None) -> bytes:
        """All bytes, or the `first` so many."""
        with self._reached() as (fs, path):
            return fs.cat_file(path) if first is None else fs.cat_file(path, start=0, end=first)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def download(self, file: Path) -> None:
        """To a new file."""
        file.open("xb").close()
        with self._reached() as (fs, path):
            fs.get_file(path, str(file))

    # --- changing it ------------------------------------------------------------------------------------

    def write_bytes(self, content: bytes) -> None:
        """One put: the object is there whole, or is what it was."""
        with self._reached(writing=True) as (fs, path):
            fs.pipe_file(path, content)

    def create(self, content: bytes, tries: int = 3) -> bool:
        """The same, if nothing is there; whether it was. Of several at once, one is answered yes where the store has
        conditional writes (S3, Google Cloud Storage), and at least one elsewhere."""
        try:
            with self._reached(writing=True) as (fs, path):
                fs.pipe_file(path, content, mode="create")
            return True
        except OSError as e:  # drivers say in different ways that it is there
            if self.exists():
                return False
            if tries == 1 or "Conflict" not in str(e):
                raise
        time.sleep(1)  # S3 asks those that come at the same moment to come again
        return self.create(content, tries - 1)

    def upload(self, file: Path) -> None:
        with self._reached(writing=True) as (fs, path):
            fs.put_file(str(file), path)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._reached() as (fs, path):
                fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there once something is in it, and gone with the last of it."""

    def rmdir(self) -> None:
        """Nothing, for the same reason."""

    @contextmanager
    def _reached(self, writing: bool = False) -> Generator[tuple[Any, str]]:
        """The driver and what it calls this place. What goes wrong is said in one way for all stores; an object that is
        not there stays a FileNotFoundError."""
        try:
            driver = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as e:
            raise Unreachable(errno.ENOSYS, self._no_driver(e)) from None
        except Exception as e:
            raise self._unreachable(e, "write" if writing else "read") from e
        try:
            yield driver
        except FileNotFoundError as e:
            if writing or "bucket does not exist" in str(e):
                raise Unreachable(errno.ENOENT, f"{self}: {_NO_BUCKET} ({_brief(e)})") from e
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url) from e
        except (FileExistsError, IsADirectoryError, UndeError):
            raise
        except Exception as e:  # of as many kinds as there are drivers
            if isinstance(e, OSError) and e.errno in _FULL:
                raise  # of this machine's own disk
            raise self._unreachable(e, "write" if writing else "read") from e

    def _no_driver(self, e: Exception) -> str:
        if isinstance(e, ImportError):
            wanted = _EXTRAS.get(self.protocol)
            how = f"install {wanted}" if wanted else str(e)
            return f"{self.protocol}:// needs a driver that is not installed ({e}): {how}"
        return f"no store is known by {self.protocol}:// ({e}): expected s3://, gs://, hf:// or another of fsspec's"

    def _unreachable(self, e: Exception, what: str) -> Unreachable:
        if isinstance(e, PermissionError) or _NO_CREDENTIALS.search(type(e).__name__):
            return Unreachable(
                errno.EACCES,
                f"cannot {what} {self}, access is denied ({_brief(e)}): check the credentials that the driver of "
                f"{self.protocol}:// finds, and what they allow",
            )
        if isinstance(e, NotImplementedError):
            return Unreachable(errno.EROFS, f"{self.protocol}:// cannot {what} {self}: choose another store")
        return Unreachable(
            errno.EIO,
            f"cannot {what} {self} ({_brief(e)}): check its name and the network, and run the same again; what is done "
            "is kept",
        )


StorePath: TypeAlias = Path | Remote


def place(path: str | os.PathLike[str] | Remote) -> StorePath:
    """A path or a URL as somebody wrote it.

    >>> place("s3://bucket/idx"), place("runs/idx").name
    (Remote('s3://bucket/idx'), 'idx')
    """
    if isinstance(path, Remote):
        return path
    text = os.fspath(path)
    match = _URL.fullmatch(text)
    if match is not None and match[1].lower() not in _LOCAL:
        return Remote(text)
    eaten = re.match(r"([a-z][a-z0-9+.-]+):/[^/]", text)
    if isinstance(path, PurePath) and eaten and eaten[1] in fsspec.available_protocols():
        raise UndeError(f"{text} was a URL, of which Path has taken a slash: give it as a str")
    return Path(text if match is None else match[2]).expanduser()


def exists(path: StorePath, links: bool = False) -> bool:
    """Whether anything is there; a path that cannot be one, too long or below a file, is not. With `links`, what leads
    nowhere is something too."""
    if isinstance(path, Remote):
        return path.exists()
    return os.path.lexists(path) if links else os.path.exists(path)


def _brief(e: Exception) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())[:300]
