"""One index from several that were measured alike, or from one, in another precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unde import methods
from unde.errors import UndeError
from unde.index import pca as matrices
from unde.index import repack
from unde.index.changing import today, token
from unde.index.reader import Stored
from unde.index.renewed import written
from unde.index.repack import Origin
from unde.index.validation import brief, check_shards, list_differences, read_ids
from unde.store import factored, layout
from unde.store.files import clear_partial, create_bytes, write_bytes
from unde.store.living import MERGE, REPACK
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, exists
from unde.tasks import identity

_OTHER = "in the other"


def merged(sources: Sequence[StorePath], target: StorePath) -> None:
    """All examples of several indexes, in their order, as a new one; the same call again goes on where it stopped."""
    if len(sources) < 2:
        raise UndeError(f"{len(sources)} index to merge: expected two or more")
    found = [Origin(folder, _finished(folder)) for folder in sources]
    _check_alike(found)
    made = token(MERGE, [origin.manifest.id for origin in found])
    _made(found, target, made, {"what": MERGE}, None)


def repacked(source: StorePath, target: StorePath, store_dtype: str) -> None:
    """All examples of an index as a new one, whose features are stored in another way."""
    origin = Origin(source, _finished(source))
    m = origin.manifest
    factored.check(store_dtype, str(m.method["projection"]))
    if store_dtype == m.store_dtype:
        raise UndeError(
            f"{source} is stored in {store_dtype} already: name another store_dtype, or copy the folder"
        )
    sizes = [of.codec.nbytes(1, of.columns) for of in (m, replace(m, store_dtype=store_dtype))]
    if m.codec.rounding and sizes[1] >= sizes[0]:
        raise UndeError(
            f"{source} is stored in {m.store_dtype}: in {store_dtype} it would take more and be no more exact. Build "
            "it anew, or repack the index that it came from"
        )
    made = token(REPACK, m.id, store_dtype)
    _made([origin], target, made, {"what": REPACK, "dtype": m.store_dtype}, store_dtype)


def _made(
    found: Sequence[Origin], target: StorePath, made: str, entry: dict[str, Any], store_dtype: str | None
) -> None:
    """The new index, unless this very one is there."""
    ids = _ids(found)
    if exists(target / layout.MANIFEST):
        now = Manifest.read(target)
        if now.living is not None and now.living.history[-1].get("token") == made:
            return
        raise UndeError(f"{target} holds an index already: choose an empty or new folder for the new one")
    layout.prepare(target)
    with locked(target, doing="merging" if store_dtype is None else "repacking"):
        clear_partial(target)
        clear_partial(target / layout.SHARDS)
        history = [entry | {"from": [_told(o) for o in found], "on": today(), "token": made}]
        fishers = _fishers(found, target, made, history, ids, store_dtype)
        _copy_matrices(found[0], target)
        after = _written(found, target, made, history, ids, fishers, store_dtype)
        create_bytes(target / layout.MANIFEST, after.text())


def _finished(folder: StorePath) -> Manifest:
    manifest = Manifest.read(folder)
    check_shards(folder, manifest, verify=False)  # every shard is checked when it is copied
    return manifest


def _check_alike(found: Sequence[Origin]) -> None:
    [first, *others] = found
    a = first.manifest
    for other in others:
        b = other.manifest
        if other.folder == first.folder or a.id == b.id:
            raise UndeError(f"{first.folder} and {other.folder} are one index: expected different ones")
        differ = list_differences(a, replace(b, examples=a.examples, data=a.data, ids=a.ids), _OTHER)
        differ += identity.differences(a.task, b.task)
        differ += _coverage(a, b)
        if bool(a.ids) != bool(b.ids):
            differ.append(
                f"the ids ({'some' if a.ids else 'none'} there, {'some' if b.ids else 'none'} {_OTHER})"
            )
        if differ:
            raise UndeError(
                f"{other.folder} cannot be merged with {first.folder}, they were not measured alike. What differs: "
                f"{'; '.join(differ)}. {_instead(a, b, differ)}"
            )


def _instead(a: Manifest, b: Manifest, differ: Sequence[str]) -> str:
    if a.store_dtype == b.store_dtype or len(differ) > 1:
        return "Append the examples of one to the other instead"
    larger, smaller = sorted((a, b), key=lambda m: -m.codec.nbytes(1, m.columns))
    return f"Repack the one in {larger.store_dtype} first: index.repack(folder, {smaller.store_dtype!r}), `unde repack`"


def _coverage(a: Manifest, b: Manifest) -> list[str]:
    """Which way parameters go: features of one way and queries of another agree within a tolerance only."""
    for one, other in zip(a.settled.coverage or (), b.settled.coverage or ()):
        if one != other:
            ways = ({**one["uses"], **one["expanded"]}, {**other["uses"], **other["expanded"]})
            return [f"which way parameters go ({brief(*ways, _OTHER)})"]
    return []


def _ids(found: Sequence[Origin]) -> list[Any] | None:
    parts = [read_ids(origin.folder, origin.manifest) for origin in found]
    ids = [i for part in parts for i in part or ()]
    twice = [i for i, n in Counter(ids).items() if n > 1]
    if twice:
        raise UndeError(
            f"{len(twice)} ids are in more than one of the indexes, such as {twice[0]!r}: remove them from one of them"
        )
    return ids or None


def _told(origin: Origin) -> tuple[str, int]:
    """The name of an index, with what became of it before, and how many examples it gives."""
    lived = origin.manifest.living
    return origin.folder.name + (f" ({lived.told})" if lived is not None else ""), origin.manifest.examples


def _written(
    found: Sequence[Origin],
    home: StorePath,
    made: str,
    history: list[dict[str, Any]],
    ids: list[Any] | None,
    fishers: Mapping[str, Manifest],
    store_dtype: str | None,
) -> Manifest:
    plan = repack.numbered([p for origin in found for p in repack.all_of(origin)], home, made, 0)
    first = found[0]
    packed = None if store_dtype is None else replace(first.manifest, store_dtype=store_dtype)
    repack.write(plan, home, first.manifest.terms, packed=packed)
    return written(home, first, plan, history, ids, fishers, packed)


def _fishers(
    found: Sequence[Origin],
    target: StorePath,
    made: str,
    history: list[dict[str, Any]],
    ids: list[Any] | None,
    store_dtype: str | None,
) -> dict[str, Manifest]:
    """The gradients with other labels, those that the method has and those that all indexes have."""
    stored, out = [Stored(origin.folder, origin.manifest, 0) for origin in found], {}
    probe = methods.parse(found[0].manifest.method).probe
    kinds = {kind for kind in layout.FISHERS if all(kind in s.fishers for s in stored)}
    for kind in sorted(kinds | ({probe.kind} if isinstance(probe, methods.Fisher) else set())):
        inside = [s.fisher(kind) for s in stored]
        for one in inside:
            check_shards(one.folder, one.manifest, verify=False)
        home = target / layout.FISHERS[kind]
        home.mkdir(parents=True, exist_ok=True)
        origins = [Origin(s.folder, s.manifest) for s in inside]
        after = _written(origins, home, made, history, ids, {}, store_dtype)
        write_bytes(home / layout.MANIFEST, after.text())
        out[home.name] = after
    return out


def _copy_matrices(origin: Origin, target: StorePath) -> None:
    if matrices.read(origin.folder, origin.manifest):
        write_bytes(target / layout.MATRICES, (origin.folder / layout.MATRICES).read_bytes())
