"""Store paths: local paths, and URLs of object stores that fsspec has a driver for.

Object stores have no rename and no folders: a put is atomic, and a folder is a prefix of names.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import fsspec

from unde.errors import UndeError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL | re.IGNORECASE)
_LOCAL = ("file", "local")
_EXTRAS = {"s3": "unde[s3]", "s3a": "unde[s3]"}
_DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_NO_BUCKET = "there is no such bucket or container, make it or choose another"
_NO_CREDENTIALS = re.compile("Credentials|Token", re.IGNORECASE)


class Unreachable(OSError, UndeError):
    """An object store that cannot be used: no driver, no network, no such bucket, access denied."""

    def __str__(self) -> str:
        return str(self.strerror)


class Size(NamedTuple):
    st_size: int


class Remote:
    """A URL with the part of the interface of `pathlib.Path` that an index needs. It can be pickled: other processes
    and machines look up drivers and credentials themselves.

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

    # --- reading ----------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """Current metadata of the object, by the names of its driver."""
        with self._driver() as (fs, path):
            fs.invalidate_cache(path)  # other machines write too
            return fs.info(path)

    def exists(self) -> bool:
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return self._has_type("directory")

    def is_file(self) -> bool:
        return self._has_type("file")

    def _has_type(self, kind: str) -> bool:
        try:
            return self.info()["type"] == kind
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> Size:
        return Size(self.info()["size"])

    def iterdir(self) -> Iterator[Remote]:
        """Objects and folders directly below; none if nothing exists."""
        try:
            with self._driver() as (fs, path):
                fs.invalidate_cache(path)
                names = [name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)]
        except FileNotFoundError:
            return
        yield from (self / name for name in sorted({*names} - {self.name, ""}))

    def sizes(self) -> dict[str, int]:
        """Sizes of all objects below, by relative path."""
        with self._driver() as (fs, path):
            fs.invalidate_cache(path)
            objects = fs.find(path, detail=True)
        prefix = f"{path}/"
        return {n.removeprefix(prefix): info["size"] for n, info in objects.items() if n.startswith(prefix)}

    def glob(self, pattern: str) -> Iterator[Remote]:
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def read_bytes(self, first: int | None = None) -> bytes:
        """All bytes, or the `first` ones."""
        with self._driver() as (fs, path):
            return fs.cat_file(path) if first is None else fs.cat_file(path, start=0, end=first)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def download(self, file: Path) -> None:
        """Copy the object to a new file."""
        file.open("xb").close()
        with self._driver() as (fs, path):
            fs.get_file(path, str(file))

    # --- writing ----------------------------------------------------------------------------------------

    def write_bytes(self, content: bytes) -> None:
        """Write the object by one put, which is atomic."""
        with self._driver(writing=True) as (fs, path):
            fs.pipe_file(path, content)

    def create(self, content: bytes, tries: int = 3) -> bool:
        """Write the object unless it exists; return whether it was written. Of concurrent calls one returns True where
        the store has conditional writes (S3, Google Cloud Storage), at least one otherwise."""
        try:
            with self._driver(writing=True) as (fs, path):
                fs.pipe_file(path, content, mode="create")
            return True
        except OSError as e:  # drivers differ in what they raise if it exists
            if self.exists():
                return False
            if tries == 1 or "Conflict" not in str(e):
                raise
        time.sleep(1)  # S3 asks concurrent writers to retry
        return self.create(content, tries - 1)

    def upload(self, file: Path) -> None:
        with self._driver(writing=True) as (fs, path):
            fs.put_file(str(file), path)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._driver() as (fs, path):
                fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists as long as it holds objects."""

    def rmdir(self) -> None:
        """Do nothing, for the same reason."""

    @contextmanager
    def _driver(self, writing: bool = False) -> Generator[tuple[Any, str]]:
        """Yield the driver and its path; raise its errors as Unreachable, except FileNotFoundError of objects."""
        try:
            fs_and_path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as e:
            raise Unreachable(errno.ENOSYS, self._no_driver(e)) from None
        except Exception as e:
            raise self._unreachable(e, "write" if writing else "read") from e
        try:
            yield fs_and_path
        except FileNotFoundError as e:
            if writing or "bucket does not exist" in str(e):
                raise Unreachable(errno.ENOENT, f"{self}: {_NO_BUCKET} ({_brief(e)})") from e
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url) from e
        except (FileExistsError, IsADirectoryError, UndeError):
            raise
        except Exception as e:  # every driver has classes of its own
            if isinstance(e, OSError) and e.errno in _DISK_FULL:
                raise  # the local disk
            raise self._unreachable(e, "write" if writing else "read") from e

    def _no_driver(self, e: Exception) -> str:
        if isinstance(e, ImportError):
            extra = _EXTRAS.get(self.protocol)
            how = f"install {extra}" if extra else str(e)
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
    """Parse a path or a URL of a user.

    >>> place("s3://bucket/idx"), place("runs/idx").name
    (Remote('s3://bucket/idx'), 'idx')
    """
    if isinstance(path, Remote):
        return path
    text = os.fspath(path)
    match = _URL.fullmatch(text)
    if match is not None and match[1].lower() not in _LOCAL:
        return Remote(text)
    collapsed = re.match(r"([a-z][a-z0-9+.-]+):/[^/]", text)
    if isinstance(path, PurePath) and collapsed and collapsed[1] in fsspec.available_protocols():
        raise UndeError(f"{text} was a URL, of which Path has removed a slash: give it as a str")
    return Path(text if match is None else match[2]).expanduser()


def is_local(path: StorePath) -> TypeIs[Path]:
    """Whether a path is of a local file system: it can be mapped and locked, and may hold links."""
    return not isinstance(path, Remote)


def exists(path: StorePath, links: bool = False) -> bool:
    """Whether a path exists; False if it cannot (too long, below a file). `links`: broken links exist too."""
    if not is_local(path):
        return path.exists()
    return os.path.lexists(path) if links else os.path.exists(path)


def _brief(e: Exception) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())[:300]
