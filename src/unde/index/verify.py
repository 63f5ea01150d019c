"""Every byte of an index against its checksum: what is damaged, what is foreign, and what restores it."""

from __future__ import annotations

from collections.abc import Iterator

from unde import methods
from unde.errors import UndeError
from unde.evaluate.bank.bank_io import PARTS
from unde.evaluate.bank.verify import verify as verify_bank
from unde.index import pca as matrices
from unde.index.calibration import Calibration
from unde.index.changing import begun, committed
from unde.index.query_features import PLACE as QUERIES
from unde.index.reader import belongs
from unde.index.shard_writer import Shapes
from unde.index.validation import probe_of, read_ids
from unde.store import layout
from unde.store.files import PARTIAL
from unde.store.living import told
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.safe_io import check_plain, check_settings, checksum, read_bounded, read_json
from unde.store.shards import ShardError, read_shard
from unde.store.verify_report import DAMAGED, FOREIGN, MISSING, Verified

_NOT_OURS = "nothing here reads it: move it elsewhere"


def verify(folder: StorePath) -> Verified:
    """Reads everything that the layout knows; an index that is not finished is looked at as far as it goes."""
    if not folder.is_dir():
        raise UndeError(f"no folder {folder}: expected that of an index")
    found = Verified(folder, "index")
    try:
        _index(folder, found)
    except Unreachable:
        raise
    except OSError as e:
        raise UndeError(
            f"cannot look into {e.filename or folder} ({e.strerror}): nothing is known about it"
        ) from None
    return found


def _index(folder: StorePath, found: Verified, of: Manifest | None = None) -> None:
    manifest = _manifest(folder, found, of)
    changing = begun(folder if of is None else folder.parent) is not None
    _names(folder, found, manifest, changing)
    if of is None and manifest is not None:
        _history(folder, manifest, found)
    owner = None if manifest is None else manifest.lineage
    if manifest is not None:
        _beside(folder, manifest, found)
        _missing_shards(folder, manifest, found)
    shapes = None if manifest is None else Shapes(manifest)
    for path in _files(folder / layout.SHARDS, found):
        if shapes is None or shapes.has(path) or not changing:
            _shard(path, shapes, found)
    for path in _files(folder / layout.QUERIES, found):
        _query_features(path, owner, found)
    kernels = folder / layout.KERNELS
    for place in _folders(kernels, found):
        for path in _files(place, found):
            _tensors(path, place.name, layout.KERNELS, found)
    _fisher(folder, manifest, found)


def _manifest(folder: StorePath, found: Verified, of: Manifest | None) -> Manifest | None:
    path = folder / layout.MANIFEST
    if not exists(path, links=True):
        if any((folder / layout.SHARDS).glob("*.safetensors")):
            found.report(path, MISSING, "there are shards", layout.BUILT_AGAIN)
        else:
            _unfinished(found, f"{folder} was not begun")
        return None
    try:
        manifest = Manifest.read(folder)
    except Unreachable:
        raise
    except UndeError as e:
        why = str(e).partition(": ")[0].removeprefix(f"{path} is damaged (").removesuffix(")")
        found.report(path, DAMAGED, why, layout.restored(layout.MANIFEST))
        return None
    found.found(path)
    if of is not None and not belongs(manifest, of):
        found.report(folder, FOREIGN, "it is of another index", layout.restored(folder.name))
        return None
    return manifest


def _history(folder: StorePath, manifest: Manifest, found: Verified) -> None:
    """What became of the index, and whether a change of it is not finished."""
    if manifest.living is not None:
        found.notes += [told(entry) for entry in manifest.living.history]
        if manifest.settled.directions is not None:
            found.notes.append(
                f"pca directions are those of the {manifest.living.built} examples it was built on"
            )
    change = begun(folder)
    if change is not None and committed(manifest, change):
        _unfinished(
            found,
            f"a change ({change['what']}, begun {change['on']}) is made, but files of before are still there: run the "
            "same again, or any other change, and they are cleared",
        )
    elif change is not None:
        _unfinished(
            found,
            f"a change ({change['what']}, begun {change['on']} by {change['by']}) is not made yet: the same again goes "
            "on with it, any other clears what it wrote",
        )


def _names(folder: StorePath, found: Verified, manifest: Manifest | None, changing: bool) -> None:
    """What no index has written is named, and so are links, which nobody follows."""
    current = None if manifest is None else manifest.generation
    for path in sorted(folder.iterdir(), key=str):
        if not layout.ours(path.name):
            found.report(path, FOREIGN, "no index has such a file", _NOT_OURS)
        elif layout.versioned(path.name) and not changing and current is not None:
            if path.name not in (layout.version(layout.IDS, current), layout.version(layout.PROBE, current)):
                found.report(path, FOREIGN, "it is of another state of the index", _NOT_OURS)
        elif path.name.endswith(PARTIAL):
            found.notes.append(
                f"{path.name} was left by a writer that was killed, and is cleared by the next"
            )
        elif path.is_symlink():
            found.report(path, FOREIGN, "it is a link, which is not followed", layout.restored(path.name))
    for name in (layout.LOG, layout.LOCK):
        if (folder / name).exists() and not (folder / name).is_symlink():
            try:
                check_plain(folder / name)
            except Unreachable:
                raise
            except OSError as e:
                found.report(folder / name, FOREIGN, e.strerror, layout.restored(name))
    _source(folder / layout.SOURCE, found)
    _run(folder / layout.RUN, found)
    _calibration(folder, found)


def _calibration(folder: StorePath, found: Verified) -> None:
    """The calibration, and the models that were trained for it."""
    path = folder / layout.CALIBRATION
    if exists(path, links=True) and not path.is_symlink():
        try:
            Calibration.load(path)
            found.found(path)
        except Unreachable:
            raise
        except UndeError as e:
            found.report(path, DAMAGED, str(e), layout.restored(layout.CALIBRATION))
    for home in _folders(folder / layout.CALIBRATION_HALVES, found):
        if home.suffix != PARTS:
            found.report(home, FOREIGN, "expected the folder of a training", _NOT_OURS)
            continue
        models = verify_bank(home.with_suffix(""))
        found.bytes, found.files = found.bytes + models.bytes, found.files + models.files
        for problem in models.problems:
            file = home / problem.name.rpartition("/")[2]
            found.report(file, problem.kind, problem.why, layout.restored(layout.CALIBRATION_HALVES))


def _run(path: StorePath, found: Verified) -> None:
    if not exists(path, links=True) or path.is_symlink():
        return
    try:
        text, _, noted = read_bounded(path).decode().rpartition(layout.CHECKSUM)
        if noted != f"{checksum(text)}\n":
            raise ValueError("its content does not match its checksum")
    except Unreachable:
        raise
    except (OSError, ValueError) as e:
        found.report(path, DAMAGED, e, layout.restored(layout.RUN))
        return
    found.found(path)


def _source(path: StorePath, found: Verified) -> None:
    if not exists(path, links=True) or path.is_symlink():
        return
    try:
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise ValueError(f"a {type(settings).__name__}")
        check_settings(settings)
    except Unreachable:
        raise
    except (OSError, ValueError) as e:
        found.report(path, DAMAGED, e, layout.restored(layout.SOURCE))
        return
    found.found(path)


def _beside(folder: StorePath, manifest: Manifest, found: Verified) -> None:
    """The ids, the matrices and the probe."""
    ids, drawn = folder / layout.version(layout.IDS, manifest.generation), folder / layout.MATRICES
    if manifest.ids:
        try:
            read_ids(folder, manifest)
            found.found(ids)
        except Unreachable:
            raise
        except UndeError:
            found.report(
                ids, *_absent(ids, "they are not those of the manifest"), layout.restored(layout.IDS)
            )
    elif exists(ids, links=True):
        found.report(ids, FOREIGN, "the index was built without ids", _NOT_OURS)
    if manifest.matrices and matrices.home(folder) == folder:
        _tensors(drawn, None, layout.MATRICES, found, manifest.matrices)
    elif exists(drawn, links=True):
        found.report(drawn, FOREIGN, "the index was built without such matrices", _NOT_OURS)
    probe = probe_of(folder, manifest)
    _tensors(probe, manifest.id, layout.PROBE, found)


def _missing_shards(folder: StorePath, manifest: Manifest, found: Verified) -> None:
    count = len(manifest.shards)
    paths = [manifest.shard(folder, c, s) for c in range(manifest.terms) for s in range(count)]
    written = layout.listed(folder / layout.SHARDS)
    missing = [path for path in paths if path.name not in written]
    if missing:
        _unfinished(
            found,
            f"{len(missing)} of {len(paths)} shards are missing from {folder / layout.SHARDS} "
            f"({missing[0].name}{', …' if missing[1:] else ''}); {layout.BUILT_AGAIN}",
        )


def _shard(path: StorePath, shapes: Shapes | None, found: Verified) -> None:
    """Its own checksum is looked at even where no manifest says whose it should be."""
    if shapes is not None and not shapes.has(path):
        found.report(path, FOREIGN, "the index has no such shard", _NOT_OURS)
        return
    try:
        if shapes is not None:
            shapes.read(path)
        else:
            read_shard(path, None)
        found.found(path)
    except ShardError as e:
        found.report(path, *_told(path, e), layout.restored(layout.SHARDS))


def _query_features(path: StorePath, owner: str | None, found: Verified) -> None:
    try:
        read_shard(path, owner, place=QUERIES)
        found.found(path)
    except ShardError as e:
        found.report(path, *_told(path, e), layout.restored(layout.QUERIES))


def _tensors(
    path: StorePath, owner: str | None, entry: str, found: Verified, matches: str | None = None
) -> None:
    """`matches` is the fingerprint that the manifest has of them."""
    try:
        tensors = read_shard(path, owner)
        if matches is not None and matrices.fingerprint(tensors) != matches:
            raise ShardError(f"shard {path} is foreign: it is of another index")
        found.found(path)
    except ShardError as e:
        found.report(path, *_told(path, e), layout.restored(entry))


def _fisher(folder: StorePath, manifest: Manifest | None, found: Verified) -> None:
    probe = None if manifest is None else methods.parse(manifest.method).probe
    for kind, name in layout.FISHERS.items():
        inside = folder / name
        if inside.is_symlink():
            continue  # reported by its name
        if inside.is_dir():
            _index(inside, found, manifest)
        elif isinstance(probe, methods.Fisher) and probe.kind == kind:
            _unfinished(found, f"{inside} is missing; {layout.BUILT_AGAIN}")


def _files(folder: StorePath, found: Verified) -> Iterator[StorePath]:
    """The files of tensors in a folder of the index, but for links to it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir(), key=str):
        if path.suffix == ".safetensors":
            yield path
        elif path.name != layout.LOCK and not path.name.endswith(PARTIAL):
            found.report(path, FOREIGN, "no index has such a file", _NOT_OURS)


def _folders(folder: StorePath, found: Verified) -> Iterator[StorePath]:
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir(), key=str):
        if path.is_dir() and not path.is_symlink():
            yield path
        else:
            found.report(path, FOREIGN, "expected the folder of a kernel", _NOT_OURS)


def _absent(path: StorePath, why: str) -> tuple[str, str]:
    return (DAMAGED, why) if exists(path, links=True) else (MISSING, "")


def _told(path: StorePath, error: ShardError) -> tuple[str, str]:
    """What kind of problem it is, and why, in the words of the error."""
    kind, why = _absent(path, str(error).removeprefix(f"shard {path} is "))
    for known in (DAMAGED, FOREIGN):
        if why.startswith(f"{known}: "):
            return known, why.removeprefix(f"{known}: ")
    return kind, why


def _unfinished(found: Verified, what: str) -> None:
    found.unfinished = f"{found.unfinished}; {what}" if found.unfinished else what
