"""A change of an index, in one moment: new files beside the old ones, then the manifest, then the old ones go.

Whenever the process is killed, the index is what it was before or what it is after. `change.json` says what was begun.
The same change again goes on where it stopped; another one clears what the first has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from unde.errors import UndeError
from unde.index.shard_writer import GivenUp
from unde.store import layout
from unde.store.cache import Cache
from unde.store.files import clear_partial, create_bytes, write_bytes
from unde.store.living import told
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import Remote, StorePath, Unreachable, exists
from unde.store.safe_io import LONGEST, read_json


@dataclass(frozen=True)
class Change:
    """`done` is the manifest where this very change was made before, and only its end was missing."""

    folder: StorePath
    before: Manifest
    token: str  # whose new files are
    done: Manifest | None = None

    @property
    def first(self) -> int:
        """The number of the first new file."""
        return 1 + max(number for _, of in homes(self.folder, self.before) for number, _ in of.files)

    def from_here(self, opened: Manifest) -> bool:
        """Whether an index that was opened as this is changed now, or was by a process that did not come to its end;
        else it was opened after the change."""
        last = None if self.done is None or self.done.living is None else self.done.living.history[-1]
        return last is None or last["before"] == opened.id

    def begin(self, what: str) -> None:
        """Before the first file is written. What another change has left, which was not made, is cleared."""
        noted = {
            "what": what,
            "token": self.token,
            "on": today(),
            "by": f"{os.getpid()} on {platform.node()}",
        }
        content = (json.dumps(noted) + "\n").encode()
        path = self.folder / layout.CHANGE
        if create_bytes(path, content):
            return
        found = begun(self.folder)
        if found is not None and found["token"] != self.token:
            _give_up(self.folder, self.before, found)
            write_bytes(path, content)

    def entry(self, what: str, examples: int, left: int) -> dict[str, Any]:
        """For the history."""
        return {"what": what, "examples": examples, "left": left, "on": today()} | {
            "before": self.before.id,
            "token": self.token,
        }

    def commit(self, after: Manifest) -> None:
        """From here on the index is another one."""
        content = after.text()
        if len(content) > LONGEST:
            raise UndeError(
                f"the manifest of {self.folder} would have {len(content):,} bytes, too many to be read: what was "
                "removed is too scattered. Build the index anew from the data that is left"
            )
        if Manifest.read(self.folder).id != self.before.id:  # in a store of objects nobody holds a lock
            raise _changed(self.folder, self.before)
        write_bytes(self.folder / layout.MANIFEST, content)
        clear(self.folder, after)


def token(*what: Any) -> str:
    """Of a change: the same one gives the same."""
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


@contextmanager
def changing(folder: StorePath, before: Manifest, token_of: Callable[[str], str]) -> Generator[Change]:
    """Inside, nobody else writes. `token_of` gives the token of the change, from the id of the index before it."""
    with ExitStack() as held:
        for home, _ in homes(folder, before):
            held.enter_context(locked(home, doing="changing"))
            clear_partial(home)
            clear_partial(home / layout.SHARDS)
        now, found = Manifest.read(folder), begun(folder)
        if found is not None and committed(now, found):
            clear(folder, now)
            assert now.living is not None
            if token_of(now.living.history[-1]["before"]) == found["token"]:
                yield Change(folder, before, found["token"], now)
                return
        if now.id != before.id:
            raise _changed(folder, before)
        change = Change(folder, before, token_of(before.id))
        try:
            yield change
        except UndeError as e:
            if not isinstance(e, (OSError, GivenUp)):  # else the same again goes on: there may be room then
                _withdraw(change)
            raise


def begun(folder: StorePath) -> dict[str, Any] | None:
    """What `change.json` says, if it is there and can be read."""
    path = folder / layout.CHANGE
    if not exists(path, links=True):
        return None
    try:
        found = read_json(path, 2**16)
    except Unreachable:
        raise
    except (OSError, ValueError):
        found = None
    known = isinstance(found, dict) and all(
        isinstance(found.get(k), str) for k in ("what", "token", "on", "by")
    )
    return found if known else {"what": "change", "token": "", "on": "?", "by": "?"}


def committed(now: Manifest, found: dict[str, Any]) -> bool:
    """Whether a change that was begun is made, and only old files are still to be cleared."""
    return now.living is not None and now.living.history[-1].get("token") == found["token"]


def ended(folder: StorePath) -> bool:
    """Clear what a change has left that was made and not brought to its end; whether there was one."""
    with locked(folder, doing="changing"):
        now, found = Manifest.read(folder), begun(folder)
        made = found is not None and committed(now, found)
        if made:
            clear(folder, now)
    return made


def _withdraw(change: Change) -> None:
    """Nothing stays of a change that cannot be made; what another has begun does."""
    with contextlib.suppress(OSError):
        found = begun(change.folder)
        ours = found is not None and found["token"] == change.token
        if ours and Manifest.read(change.folder).id == change.before.id:
            clear(change.folder, change.before, kernels=False)


def clear(folder: StorePath, now: Manifest, kernels: bool = True) -> None:
    """All files that the index as it is now does not have."""
    for home, of in homes(folder, now):
        numbers = {number for number, _ in of.files}
        for path in _in(home / layout.SHARDS):
            at = layout.numbers(path.name)
            if at is not None and at[1] not in numbers:
                forget(path)
        current = {layout.version(name, now.generation) for name in (layout.IDS, layout.PROBE)}
        for path in _in(home):
            if layout.versioned(path.name) and path.name not in current:
                forget(path)
        if home != folder:
            write_bytes(home / layout.MANIFEST, of.text())
    if kernels:  # they were fitted to other examples, and another index was built with these options
        _drop(folder / layout.KERNELS)
        forget(folder / layout.RUN)
    forget(folder / layout.CHANGE)


def homes(folder: StorePath, manifest: Manifest) -> Iterator[tuple[StorePath, Manifest]]:
    """The index, and the gradients with other labels where it has them."""
    yield folder, manifest
    for inside in (folder / name for name in layout.FISHERS.values()):
        if exists(inside / layout.MANIFEST):
            yield inside, Manifest.read(inside)


def forget(path: StorePath) -> None:
    """Delete a file, and its copies on this machine where it is remote."""
    path.unlink(missing_ok=True)
    if isinstance(path, Remote):
        Cache.here().forget(path)


def _in(folder: StorePath) -> list[StorePath]:
    return [folder / name for name in sorted(layout.listed(folder))]


def _drop(folder: StorePath) -> None:
    if not isinstance(folder, Remote):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        for name in folder.sizes():
            forget(folder / name)


def _give_up(folder: StorePath, now: Manifest, found: dict[str, Any]) -> None:
    """Another change was begun and not made. Here its process is dead, or we would not have the lock."""
    if isinstance(folder, Remote):
        raise UndeError(
            f"a change of {folder} ({found['what']}, begun {found['on']} by {found['by']}) is not finished: wait for "
            f"it, or run the same again. If it was given up, delete {folder / layout.CHANGE}"
        )
    clear(folder, now, kernels=False)


def _changed(folder: StorePath, before: Manifest) -> UndeError:
    now = Manifest.read(folder)
    last = "" if now.living is None else f" ({told(now.living.history[-1])})"
    return UndeError(
        f"{folder} has changed since it was opened{last}: open it again, and see whether this is still to do"
    )
