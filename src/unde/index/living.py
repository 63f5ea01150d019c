"""Indexes that live: examples are appended and removed without computing the rest again.

Features stay as they are stored. What depends on all examples together, kernels, K g(n) and leverages, is fitted anew
from stored features when it is next asked for. pca directions stay those of the examples that the index was built on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.data import Rows, own_collate
from unde.errors import UndeError
from unde.fingerprints import ids_fingerprint, plain_ids
from unde.index import builder as making
from unde.index import repack
from unde.index.changing import Change, changing, token
from unde.index.reader import Stored
from unde.index.renewed import part, renew
from unde.index.repack import Origin, Planned
from unde.index.shard_writer import ShardWriter
from unde.index.state import IndexState
from unde.index.validation import read_ids
from unde.index.views import Joined, Picked
from unde.parallel.model_transport import BuildInputs, recipe_for_data
from unde.store import layout
from unde.store.living import APPEND, REMOVE
from unde.store.manifest import Manifest
from unde.store.remote import StorePath

_NAMED = 3  # ids in a message


def appended(at: IndexState, data: Any, ids: Sequence[Any] | None, progress: bool) -> IndexState:
    """The index with more examples: their features are computed as those of the others were."""
    m, rows = _checked(at).manifest, _rows(at, data)
    new = None if ids is None else plain_ids(ids)
    digests = rows.digests()

    def token_of(before: str) -> str:
        return token(before, APPEND, digests, ids_fingerprint(new))

    with changing(at.stored.folder, m, token_of) as change:
        if change.done is None:
            _check_new_ids(at.ids, new, len(rows))
            _note_twins(at.stored, digests)
            at.query_runner.check_model(full=True)
            change.begin(f"{APPEND} {len(rows)}")
            given = _given(at, rows, change)

            def plan(home: StorePath, of: Manifest) -> list[Planned]:
                new_ones = part(of, change, given, new)
                making.compute(ShardWriter(home, new_ones, given, ids=new), at.executor, progress)
                both = (repack.all_of(Origin(home, m)) for m in (of, new_ones))
                return repack.joined(*both, of.settled.shard_size)

            entry = change.entry(APPEND, len(rows), m.examples + len(rows))
            renew(change, entry, None if new is None else [*(at.ids or ()), *new], plan, None)
        whole = at.rows
        if whole is not None and change.from_here(m):
            whole = Rows(Joined(whole, rows), whole.collate)
    return _reopened(at, whole)


def removed(at: IndexState, ids: Sequence[Any] | None, indices: Sequence[int] | None) -> IndexState:
    """The index without some examples. Their bytes are gone from the folder when this returns."""
    m = _checked(at).manifest
    if (ids is None) == (indices is None):
        raise UndeError("say which examples to remove: ids, or indices, one of the two")
    which = plain_ids(_listed(ids if ids is not None else indices))
    by_id = ids is not None and at.ids is not None

    def token_of(before: str) -> str:
        return token(before, REMOVE, by_id, sorted(map(str, which)))

    with changing(at.stored.folder, m, token_of) as change:
        rows = at.rows
        if change.from_here(m):
            gone = _gone(at, which, by_id)
            left = (~gone).nonzero()[:, 0]
            if change.done is None:
                _remove(at, change, gone, left)
            rows = None if rows is None else Rows(Picked(rows, left), rows.collate)
    return _reopened(at, rows)


def _remove(at: IndexState, change: Change, gone: Tensor, left: Tensor) -> None:
    m, given = at.stored.manifest, None
    if m.factors and any(gone[rows].any() and not gone[rows].all() for rows in m.shards):
        given = _for_covariances(at)
    change.begin(f"{REMOVE} {int(gone.sum())}")
    ids = None if at.ids is None else [at.ids[i] for i in left.tolist()]
    entry = change.entry(REMOVE, int(gone.sum()), len(left))
    renew(change, entry, ids, lambda home, of: repack.without(Origin(home, of), gone), given)


def _checked(at: IndexState) -> Stored:
    at.check_finished()
    if not at.executor.alone:
        raise UndeError(
            f"{at.executor} does a share of a build: open the index with another executor to change it"
        )
    return at.stored


def _rows(at: IndexState, data: Any) -> Rows:
    if at.model is None or at.task is None:
        raise UndeError(
            "this index was opened without its model and task: pass both to Index.open to append examples"
        )
    return Rows(data, at.collate or own_collate(at.task.collate, data))


def _given(at: IndexState, rows: Rows, change: Change) -> BuildInputs:
    """The new examples, and how other processes come by them."""
    assert at.model is not None
    assert at.task is not None
    recipe = recipe_for_data(at.recipe, rows.data, rows.collate)
    inputs = BuildInputs(at.model, at.task, rows, at.checkpoints, recipe, at.device)
    return inputs if at.executor.here else inputs.portable(change.folder / layout.SCRATCH, rows)


def _reopened(at: IndexState, rows: Rows | None) -> IndexState:
    """The index as it is now, with what was at hand. Its files were checked or written just now."""
    folder = at.stored.folder
    manifest = Manifest.read(folder)
    return replace(
        at, stored=Stored(folder, manifest, at.stored.memory), ids=read_ids(folder, manifest), rows=rows
    )


# --- which examples -------------------------------------------------------------------------------------


def _check_new_ids(there: Sequence[Any] | None, new: list[Any] | None, count: int) -> None:
    if (there is None) != (new is None):
        raise UndeError(
            "the index has no ids: leave ids= out, or build it anew with ids"
            if there is None
            else f"the index has ids ({_some(there)}): pass ids=, one for each of the {count} new examples"
        )
    if there is None or new is None:
        return
    if len(new) != count:
        raise UndeError(f"{len(new)} ids for {count} examples: expected one for each")
    twice = [i for i, n in Counter(new).items() if n > 1]
    if twice:
        raise UndeError(
            f"ids that are given twice: {_some(twice)}. Expected a different one for each example"
        )
    known = set(there)
    known_too = [i for i in new if i in known]
    if known_too:
        raise UndeError(
            f"{len(known_too)} of the ids are in the index already: {_some(known_too)}. Give others, or remove those "
            "first"
        )


def held(stored: Stored, rows: Rows) -> Tensor:
    """(n,) bool: which examples have the content of one in the index."""
    found = torch.zeros(len(rows), dtype=torch.bool)
    found[stored.holding(rows.digests())] = True
    return found


def _note_twins(stored: Stored, digests: list[str]) -> None:
    twins = stored.holding(digests)
    if twins:
        console.note(
            f"{len(twins)} of the {len(digests)} new examples have the content of examples that are in the index "
            f"(the first is {twins[0]}): they count twice from now on"
        )


def _listed(ids: Any) -> list[Any]:
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        ids = [ids]
    return list(ids)


def _gone(at: IndexState, which: list[Any], by_id: bool) -> Tensor:
    """(N,) bool"""
    count = at.stored.manifest.examples
    if not which:
        raise UndeError("nothing to remove: the list of examples is empty")
    if by_id:
        assert at.ids is not None
        wanted = set(which)
        gone = torch.tensor([i in wanted for i in at.ids])
        unknown = wanted - set(at.ids)
        if unknown:
            hint = (
                "; to remove by position, pass indices=" if all(isinstance(i, int) for i in unknown) else ""
            )
            raise UndeError(
                f"{len(unknown)} of the ids are not in the index: {_some(sorted(unknown, key=str))}. Its ids are such "
                f"as {_some(at.ids)}{hint}"
            )
    else:
        odd = [i for i in which if type(i) is not int or not 0 <= i < count]
        if odd:
            raise UndeError(
                f"no example {odd[0]!r} in the index: expected positions from 0 to {count - 1}"
                + (" (it has no ids)" if at.ids is None else "")
            )
        gone = torch.zeros(count, dtype=torch.bool)
        gone[torch.tensor(which)] = True
    if gone.all():
        raise UndeError(f"that would remove all {count} examples: delete the folder of the index instead")
    return gone


def _for_covariances(at: IndexState) -> BuildInputs:
    """What the covariances of some examples are computed from once more."""
    missing = [n for n, x in (("model", at.model), ("task", at.task), ("train_data", at.rows)) if x is None]
    if missing:
        raise UndeError(
            "the covariances of EKFAC are sums over examples: to take some out, these are run through the model once "
            f"more, but the index was opened without its {', '.join(missing)}: pass "
            f"{', '.join(f'{n}=' for n in missing)} to Index.open"
        )
    assert at.model is not None
    assert at.task is not None
    assert at.rows is not None
    at.query_runner.check_model(full=True)
    return BuildInputs(at.model, at.task, at.rows, at.checkpoints)


def _some(ids: Sequence[Any]) -> str:
    return ", ".join(repr(i) for i in ids[:_NAMED]) + (", …" if len(ids) > _NAMED else "")
