"""Verify an index: read every byte, compare checksums, name what is damaged or foreign and what restores it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from unde import methods
from unde.errors import UndeError
from unde.evaluate.bank.bank_io import PARTS, verify_bank
from unde.index import projection_matrices as matrices
from unde.index.calibration import Calibration
from unde.index.query_features import PLACE as QUERIES
from unde.index.reader import IndexReader, belongs, read_ids
from unde.index.updates import is_committed, read_note
from unde.store import layout
from unde.store.files import PARTIAL, check_plain, check_settings, checksum, read_bounded, read_json
from unde.store.layout import DAMAGED, FOREIGN, MISSING, VerifyReport
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.shards import ShardError, read_shard

_NOT_OURS = "nothing here reads it: move it elsewhere"


def verify(folder: StorePath) -> VerifyReport:
    """Read everything that the layout knows; an unfinished index is checked as far as it goes."""
    if not folder.is_dir():
        raise UndeError(f"no folder {folder}: expected that of an index")
    report = VerifyReport(folder, "index")
    try:
        _verify_index(folder, report)
    except Unreachable:
        raise
    except OSError as e:
        raise UndeError(
            f"cannot look into {e.filename or folder} ({e.strerror}): nothing is known about it"
        ) from None
    return report


def _verify_index(folder: StorePath, report: VerifyReport, parent: Manifest | None = None) -> None:
    """Of the index, or of gradients with other labels in it, whose index is the `parent`."""
    manifest = _verify_manifest(folder, report, parent)
    is_changing = read_note(folder if parent is None else folder.parent) is not None
    _verify_names(folder, report, manifest, is_changing)
    if manifest is not None and parent is None:
        _verify_history(folder, manifest, report)
    _verify_companions(folder, manifest, report)
    _verify_calibration_models(folder, report)
    _verify_shards(folder, manifest, report, is_changing)
    for path in _files(folder / layout.QUERIES, report):
        with _counted(path, layout.QUERIES, report):
            read_shard(path, None if manifest is None else manifest.lineage, place=QUERIES)
    for home in _folders(folder / layout.KERNELS, report):
        for path in _files(home, report):
            with _counted(path, layout.KERNELS, report):
                read_shard(path, home.name)
    _verify_fishers(folder, manifest, report)


@contextmanager
def _counted(path: StorePath, entry: str, report: VerifyReport) -> Generator[None]:
    """Count a file that is read inside; report it if that fails."""
    try:
        yield
    except Unreachable:
        raise
    except (UndeError, OSError, ValueError) as e:
        kind, reason = DAMAGED, str(e).removeprefix(f"shard {path} is ")
        if reason.startswith(f"{path} is "):  # up to the way out
            reason = reason.removeprefix(f"{path} is ").partition(": ")[0]
            reason = reason.removeprefix(f"{DAMAGED} (").removesuffix(")")
        if not exists(path, links=True):
            kind, reason = MISSING, ""
        elif reason.startswith((f"{DAMAGED}: ", f"{FOREIGN}: ")):
            kind, _, reason = reason.partition(": ")
        report.report(path, kind, reason, layout.repair_advice(entry))
    else:
        report.count(path)


def _verify_manifest(folder: StorePath, report: VerifyReport, parent: Manifest | None) -> Manifest | None:
    path = folder / layout.MANIFEST
    if not exists(path, links=True):
        if any((folder / layout.SHARDS).glob("*.safetensors")):
            report.report(path, MISSING, "there are shards", layout.BUILT_AGAIN)
        else:
            report.add_unfinished(f"{folder} was not begun")
        return None
    manifest = None
    with _counted(path, layout.MANIFEST, report):
        manifest = Manifest.read(folder)
    if manifest is not None and parent is not None and not belongs(manifest, parent):
        report.report(folder, FOREIGN, "it is of another index", layout.repair_advice(folder.name))
        return None
    return manifest


def _verify_history(folder: StorePath, manifest: Manifest, report: VerifyReport) -> None:
    """Note how the index was changed; report an unfinished change."""
    if manifest.changes is not None:
        report.notes += manifest.changes.lines
        if manifest.resolved.directions is not None:
            built = manifest.changes.build_examples
            report.notes.append(f"the whitening is that of the {built} examples it was built on")
    note = read_note(folder)
    if note is None:
        return
    state = "not made yet: the same again resumes it, any other deletes what it wrote"
    if is_committed(manifest, note):
        state = "made, but old files are still there: the same again, or any other change, deletes them"
    report.add_unfinished(f"a change ({note['what']}, begun {note['on']} by {note['by']}) is {state}")


def _verify_names(
    folder: StorePath, report: VerifyReport, manifest: Manifest | None, is_changing: bool
) -> None:
    """Report files that no index writes, and links, which are not followed."""
    generation = None if manifest is None else manifest.generation
    for path in sorted(folder.iterdir(), key=str):
        if not layout.is_index_name(path.name):
            report.report(path, FOREIGN, "no index has such a file", _NOT_OURS)
        elif layout.is_versioned(path.name) and not is_changing and generation is not None:
            if path.name not in layout.current_names(generation):
                report.report(path, FOREIGN, "it is of another state of the index", _NOT_OURS)
        elif path.name.endswith(PARTIAL):
            report.notes.append(
                f"{path.name} was left by a writer that was killed; the next writer deletes it"
            )
        elif path.is_symlink():
            report.report(
                path, FOREIGN, "it is a link, which is not followed", layout.repair_advice(path.name)
            )
    for path in (folder / layout.LOG, folder / layout.LOCK):
        if path.exists() and not path.is_symlink():
            try:
                check_plain(path)
            except Unreachable:
                raise
            except OSError as e:
                report.report(path, FOREIGN, e.strerror, layout.repair_advice(path.name))


def _verify_companions(folder: StorePath, manifest: Manifest | None, report: VerifyReport) -> None:
    """The single files: what the command line wrote, the calibration, ids, matrices of the projection and probe."""
    source, run, calibration = folder / layout.SOURCE, folder / layout.RUN, folder / layout.CALIBRATION
    checks = {source: _check_source, run: _check_run, calibration: Calibration.load}
    for path, check in checks.items():
        if exists(path, links=True) and not path.is_symlink():
            with _counted(path, path.name, report):
                check(path)
    if manifest is None:
        return
    ids, probe = (folder / name for name in layout.current_names(manifest.generation))
    projection = folder / layout.MATRICES
    if manifest.ids:
        with _counted(ids, layout.IDS, report):
            read_ids(folder, manifest)
    elif exists(ids, links=True):
        report.report(ids, FOREIGN, "the index was built without ids", _NOT_OURS)
    if manifest.matrices and matrices.home(folder) == folder:
        with _counted(projection, layout.MATRICES, report):
            if matrices.fingerprint(read_shard(projection, None)) != manifest.matrices:
                raise ShardError(f"shard {projection} is foreign: it is of another index")
    elif exists(projection, links=True):
        report.report(projection, FOREIGN, "the index was built without such matrices", _NOT_OURS)
    with _counted(probe, layout.PROBE, report):
        read_shard(probe, manifest.id)


def _check_source(path: StorePath) -> None:
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"a {type(settings).__name__}")
    check_settings(settings)


def _check_run(path: StorePath) -> None:
    text, _, noted = read_bounded(path).decode().rpartition(layout.CHECKSUM)
    if noted != f"{checksum(text)}\n":
        raise ValueError("its content does not match its checksum")


def _verify_calibration_models(folder: StorePath, report: VerifyReport) -> None:
    for home in _folders(folder / layout.CALIBRATION_HALVES, report):
        if home.suffix != PARTS:
            report.report(home, FOREIGN, "expected the folder of a training", _NOT_OURS)
            continue
        models = verify_bank(home.with_suffix(""))
        report.bytes, report.files = report.bytes + models.bytes, report.files + models.files
        for problem in models.problems:
            file = home / problem.name.rpartition("/")[2]
            report.report(file, problem.kind, problem.why, layout.repair_advice(layout.CALIBRATION_HALVES))


def _verify_shards(
    folder: StorePath, manifest: Manifest | None, report: VerifyReport, is_changing: bool
) -> None:
    """Without a manifest, the checksum of each file alone."""
    reader = None if manifest is None else IndexReader(folder, manifest, 0)
    missing = {} if reader is None else {path.name: job for job, path in reader.paths.items()}
    for path in _files(folder / layout.SHARDS, report):
        job = missing.pop(path.name, None)
        if reader is not None and job is None:
            if not is_changing:
                report.report(path, FOREIGN, "the index has no such shard", _NOT_OURS)
            continue
        with _counted(path, layout.SHARDS, report):
            read_shard(path, None) if reader is None or job is None else reader.read_checked(*job)
    if reader is not None and missing:
        report.add_unfinished(
            f"{len(missing)} of {len(reader.paths)} shards are missing from {folder / layout.SHARDS} "
            f"({next(iter(missing))}{', …' if len(missing) > 1 else ''}); {layout.BUILT_AGAIN}"
        )


def _verify_fishers(folder: StorePath, manifest: Manifest | None, report: VerifyReport) -> None:
    probe = None if manifest is None else methods.parse(manifest.method).probe
    for kind, name in layout.FISHERS.items():
        inside = folder / name
        if inside.is_symlink():
            continue  # reported by its name
        if inside.is_dir():
            _verify_index(inside, report, manifest)
        elif isinstance(probe, methods.Fisher) and probe.kind == kind:
            report.add_unfinished(f"{inside} is missing; {layout.BUILT_AGAIN}")


def _files(folder: StorePath, report: VerifyReport) -> Iterator[StorePath]:
    """Files of tensors in a folder of the index."""
    for path in _entries(folder):
        if path.suffix == ".safetensors":
            yield path
        elif path.name != layout.LOCK and not path.name.endswith(PARTIAL):
            report.report(path, FOREIGN, "no index has such a file", _NOT_OURS)


def _folders(folder: StorePath, report: VerifyReport) -> Iterator[StorePath]:
    for path in _entries(folder):
        if path.is_dir() and not path.is_symlink():
            yield path
        else:
            report.report(path, FOREIGN, "expected the folder of a kernel", _NOT_OURS)


def _entries(folder: StorePath) -> list[StorePath]:
    is_folder = folder.is_dir() and not folder.is_symlink()
    return sorted(folder.iterdir(), key=str) if is_folder else []
