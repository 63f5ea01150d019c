"""Append and remove: changes of an index in place, as transactions.

New files are written beside the old ones, the manifest is replaced, then the old files are deleted. `change.json` names
the transaction from its first write to its last deletion. After a kill the same call resumes it; any other change
deletes what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.data import Rows, choose_collate
from unde.errors import UndeError
from unde.fingerprints import ids_fingerprint, plain_ids
from unde.index.reader import IndexReader, parse_ids, read_ids
from unde.index.segments import Source, make_entry, make_token, rewrite_all, today
from unde.index.shard_writer import ShardsFailed, ShardWriter, compute_missing
from unde.index.state import IndexState
from unde.parallel.model_transport import BuildInputs, recipe_for_data
from unde.store import layout
from unde.store.cache import delete, delete_folder
from unde.store.files import LONGEST, clear_partial, create_bytes, read_json, write_bytes
from unde.store.locks import locked
from unde.store.manifest import APPEND, REMOVE, Changes, Manifest, Segment
from unde.store.remote import StorePath, Unreachable, exists, is_local

_NAMED = 3  # ids in a message


# --- append and remove ------------------------------------------------------------------------------------


def append(state: IndexState, data: Any, ids: Sequence[Any] | None, progress: bool) -> IndexState:
    """Compute the features of more examples as a new segment."""
    m = _check_changeable(state)
    given = state.inputs("appended examples go through the model")
    rows = Rows(data, state.collate or choose_collate(given.task.collate, data))
    new_ids = parse_ids(rows, ids) if state.ids is not None or ids is not None else None
    digests = rows.digests()
    token = partial(make_token, APPEND, digests, ids_fingerprint(new_ids))
    with transaction(state.stored.folder, m, token) as change:
        if change.earlier_commit is None:
            _check_new_ids(state.ids, new_ids, len(rows))
            if twins := state.stored.find_digests(digests):
                console.note(
                    f"{len(twins)} of the {len(rows)} new examples have the content of examples that are in the "
                    f"index (the first is {twins[0]}): they count twice from now on"
                )
            state.runner.check_model(full=True)
            change.begin(f"{APPEND} {len(rows)}")
            recipe = recipe_for_data(state.recipe, rows.data, rows.collate)
            inputs = BuildInputs(given.model, given.task, rows, given.checkpoints, recipe, given.device)
            if not state.executor.in_process:
                inputs = inputs.portable(change.folder / layout.SCRATCH, rows)

            sources = {}
            for home, manifest in homes(change.folder, m):
                segment = _new_segment(manifest, change.token, inputs, new_ids)
                compute_missing(ShardWriter(home, segment, inputs, ids=new_ids), state.executor, progress)
                sources[home] = [Source(IndexReader(home, of, 0)) for of in (manifest, segment)]
            ids = None if new_ids is None else [*(state.ids or ()), *new_ids]
            entry = make_entry(APPEND, len(rows), m.examples + len(rows), change.token, m.id)
            change.commit(rewrite_all(change.folder, sources, entry, ids))
        whole = state.rows
        if whole is not None and change.applies_to(m):
            whole = whole.concat(rows)
    return _reopen(state, whole)


def remove(state: IndexState, ids: Sequence[Any] | None, indices: Sequence[int] | None) -> IndexState:
    """Rewrite the shards that hold some examples without them, and delete the old files."""
    m = _check_changeable(state)
    if (ids is None) == (indices is None):
        raise UndeError("say which examples to remove: ids, or indices, one of the two")
    named: Any = ids if ids is not None else indices
    which = plain_ids([named] if isinstance(named, (str, bytes)) or not hasattr(named, "__iter__") else named)
    if not which:
        raise UndeError("nothing to remove: the list of examples is empty")
    by_id = ids is not None and state.ids is not None
    token = partial(make_token, REMOVE, by_id, sorted(map(str, which)))
    with transaction(state.stored.folder, m, token) as change:
        rows = state.rows
        if change.applies_to(m):
            removed = _find_ids(state.ids, which) if by_id and state.ids else _find_positions(state, which)
            left = (~removed).nonzero()[:, 0].tolist()
            if not left:
                raise UndeError(f"that would remove all {m.examples} examples: delete the index instead")
            if change.earlier_commit is None:
                _remove(state, change, removed, left)
            rows = None if rows is None else rows.subset(left)
    return _reopen(state, rows)


def _remove(state: IndexState, change: Transaction, removed: Tensor, left: list[int]) -> None:
    m, count = change.before, int(removed.sum())
    partly = any(removed[rows].any() and not removed[rows].all() for rows in m.shards)
    inputs = None
    if m.factors and partly:
        inputs = state.build_inputs(
            "the covariances of EKFAC are sums over examples: removed ones are run through the model once more"
        )
        state.runner.check_model(full=True)
    change.begin(f"{REMOVE} {count}")
    ids = None if state.ids is None else [state.ids[i] for i in left]
    entry = make_entry(REMOVE, count, len(left), change.token, m.id)
    readers = [IndexReader(home, manifest, 0) for home, manifest in homes(change.folder, m)]
    sources = {reader.folder: [Source(reader, removed)] for reader in readers}
    change.commit(rewrite_all(change.folder, sources, entry, ids, inputs=inputs))


def _new_segment(m: Manifest, owner: str, inputs: BuildInputs, ids: Sequence[Any] | None) -> Manifest:
    """New examples as an index in the same folder; the first of them fill up the last shard."""
    count, size = len(inputs.rows), m.resolved.shard_size
    head = min(size - m.segments[-1].rows[-1], count)
    rows = [head] * bool(head) + [min(size, count - start) for start in range(head, count, size)]
    first = 1 + max(number for number, _ in m.files)
    segment = Segment(owner, first, rows, [1 + max(m.numbers), count])
    changes = Changes(m.lineage, m.examples, [segment], m.history)
    return replace(m, examples=count, data=inputs.data, ids=ids_fingerprint(ids), changes=changes)


def _reopen(state: IndexState, rows: Rows | None) -> IndexState:
    folder = state.stored.folder
    manifest = Manifest.read(folder)
    stored = IndexReader(folder, manifest, state.stored.memory)
    return replace(state, stored=stored, ids=read_ids(folder, manifest), rows=rows)


def _check_changeable(state: IndexState) -> Manifest:
    state.check_finished()
    if not state.executor.exclusive:
        raise UndeError(
            f"{state.executor} does a share of a build: open the index with another executor to change it"
        )
    return state.stored.manifest


def _check_new_ids(known: Sequence[Any] | None, new: list[Any] | None, count: int) -> None:
    if known is None and new is not None:
        raise UndeError("the index has no ids: leave ids= out, or build it again with ids")
    if known is not None and new is None:
        raise UndeError(
            f"the index has ids ({_some(known)}): pass ids=, one for each of the {count} new examples"
        )
    taken = [i for i, n in Counter([*set(known or ()), *(new or ())]).items() if n > 1]
    if taken:
        raise UndeError(
            f"{len(taken)} of the ids are given twice, or in the index already: {_some(taken)}. Give others, or remove "
            "those first"
        )


def _find_ids(ids: Sequence[Any], which: list[Any]) -> Tensor:
    """(N,) bool: the examples of these ids; the name of a document, "doc-10", stands for "doc-10:1", "doc-10:2", …"""
    wanted, names = set(which), [_document(i) for i in ids]
    documents = wanted - set(ids)
    unknown = documents - set(names)
    if unknown:
        numbers = all(isinstance(i, int) for i in unknown)
        raise UndeError(
            f"{len(unknown)} of the ids are not in the index: {_some(sorted(unknown, key=str))}. Its ids are such as "
            f"{_some(ids)}{'; to remove by position, pass indices=' if numbers else ''}"
        )
    return torch.tensor([i in wanted or name in documents for i, name in zip(ids, names)])


def _document(example_id: Any) -> str | None:
    """The document that an id such as "doc-10:3" names a part of."""
    name, _, part = str(example_id).rpartition(":")
    return name if part.isascii() and part.isdigit() else None


def _find_positions(state: IndexState, which: list[Any]) -> Tensor:
    """(N,) bool"""
    count = state.stored.manifest.examples
    odd = [i for i in which if type(i) is not int or not 0 <= i < count]
    if odd:
        raise UndeError(
            f"no example {odd[0]!r} in the index: expected positions from 0 to {count - 1}"
            + (" (it has no ids)" if state.ids is None else "")
        )
    return torch.zeros(count, dtype=torch.bool).index_fill_(0, torch.tensor(which), True)


def _some(ids: Sequence[Any]) -> str:
    return ", ".join(repr(i) for i in ids[:_NAMED]) + (", …" if len(ids) > _NAMED else "")


# --- transactions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transaction:
    """One change of an index, under the locks of its folders."""

    folder: StorePath
    before: Manifest
    token: str  # owner of the new files
    earlier_commit: Manifest | None = None  # by a process that was killed before it deleted the old files

    def applies_to(self, manifest: Manifest) -> bool:
        """Whether an index opened with this manifest is still to follow the change."""
        return self.earlier_commit is None or self.earlier_commit.history[-1]["before"] == manifest.id

    def begin(self, what: str) -> None:
        """Write `change.json`; clear what an unfinished transaction of another kind wrote."""
        note = {"what": what, "token": self.token, "on": today(), "by": f"{os.getpid()} on {platform.node()}"}
        content, path = (json.dumps(note) + "\n").encode(), self.folder / layout.CHANGE
        if create_bytes(path, content):
            return
        other = read_note(self.folder)
        if other is None or other["token"] == self.token:
            return
        if not is_local(self.folder):
            raise UndeError(
                f"a change of {self.folder} ({other['what']}, begun {other['on']} by {other['by']}) is not finished: "
                f"wait for it, or run the same again. If it was given up, delete {path}"
            )
        clear(self.folder, self.before, kernels=False)
        write_bytes(path, content)

    def commit(self, after: Manifest) -> None:
        """Replace the manifest, then delete all files that it does not name."""
        content = after.text()
        if len(content) > LONGEST:
            raise UndeError(
                f"the manifest of {self.folder} would have {len(content):,} bytes, too many to be read: the removed "
                "examples are too scattered. Build the index again from the data that is left"
            )
        _check_unchanged(self.folder, self.before)  # object stores have no locks
        write_bytes(self.folder / layout.MANIFEST, content)
        clear(self.folder, after)

    def roll_back(self) -> None:
        """Delete what this transaction wrote; leave the files of another."""
        with contextlib.suppress(OSError):
            note = read_note(self.folder)
            ours = note is not None and note["token"] == self.token
            if ours and Manifest.read(self.folder).id == self.before.id:
                clear(self.folder, self.before, kernels=False)


@contextmanager
def transaction(
    folder: StorePath, manifest: Manifest, token_after: Callable[[str], str]
) -> Generator[Transaction]:
    """Lock an index, finish or refuse what others began, and roll back on errors.

    `manifest` is what the caller opened; `token_after` makes the token of the change from the id before it.
    """
    with ExitStack() as locks:
        for home, _ in homes(folder, manifest):
            locks.enter_context(locked(home, doing="changing"))
            clear_partial(home)
            clear_partial(home / layout.SHARDS)
        now, note = Manifest.read(folder), read_note(folder)
        if note is not None and is_committed(now, note):
            clear(folder, now)
            if token_after(now.history[-1]["before"]) == note["token"]:
                yield Transaction(folder, manifest, note["token"], now)
                return
        _check_unchanged(folder, manifest)
        change = Transaction(folder, manifest, token_after(manifest.id))
        try:
            yield change
        except UndeError as e:
            if not isinstance(
                e, (OSError, ShardsFailed)
            ):  # those may succeed on the next call, which resumes
                change.roll_back()
            raise


def read_note(folder: StorePath) -> dict[str, str] | None:
    """Content of `change.json`, with "?" where it cannot be read; None without one."""
    path = folder / layout.CHANGE
    if not exists(path, links=True):
        return None
    try:
        note = read_json(path, 2**16)
    except Unreachable:
        raise
    except (OSError, ValueError):
        note = None
    fields = note if isinstance(note, dict) else {}
    return {name: str(fields.get(name, "?")) for name in ("what", "token", "on", "by")}


def is_committed(now: Manifest, note: dict[str, str]) -> bool:
    """Whether only the deletion of old files is left of a transaction."""
    return bool(now.history) and now.history[-1].get("token") == note["token"]


def finish(folder: StorePath) -> bool:
    """Delete what a committed transaction left; whether there was one."""
    with locked(folder, doing="changing"):
        now, note = Manifest.read(folder), read_note(folder)
        unfinished = note is not None and is_committed(now, note)
        if unfinished:
            clear(folder, now)
    return unfinished


def clear(folder: StorePath, now: Manifest, kernels: bool = True) -> None:
    """Delete all files that the manifest does not name, and what was fitted to other examples."""
    for home, of in homes(folder, now):
        numbers = {number for number, _ in of.files}
        for path in _files(home / layout.SHARDS):
            place = layout.parse_shard_name(path.name)
            if place is not None and place[1] not in numbers:
                delete(path)
        for path in _files(home):
            if layout.is_versioned(path.name) and path.name not in layout.current_names(now.generation):
                delete(path)
        if home != folder:
            write_bytes(home / layout.MANIFEST, of.text())
    if kernels:
        delete_folder(folder / layout.KERNELS)
        delete(folder / layout.RUN)  # the same options build another index
    delete(folder / layout.CHANGE)


def homes(folder: StorePath, manifest: Manifest) -> Iterator[tuple[StorePath, Manifest]]:
    """The index, and the gradients with other labels inside it."""
    yield folder, manifest
    for inside in (folder / name for name in layout.FISHERS.values()):
        if exists(inside / layout.MANIFEST):
            yield inside, Manifest.read(inside)


def _files(folder: StorePath) -> list[StorePath]:
    return [folder / name for name in sorted(layout.list_names(folder))]


def _check_unchanged(folder: StorePath, manifest: Manifest) -> None:
    error = IndexReader(folder, manifest, 0).changed()
    if error is not None:
        raise error
