"""Names of all files in the folder of an index (`ENTRIES`), and the report of a verification of them."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unde.errors import UndeError
from unde.store.files import PARTIAL
from unde.store.remote import StorePath, Unreachable, exists, is_local

MANIFEST, IDS, MATRICES, PROBE = "manifest.json", "ids.json", "projection.safetensors", "probe.safetensors"
SHARDS, FISHER, KERNELS, QUERIES, SCRATCH = "shards", "fisher", "kernels", "queries", "scratch"
FISHERS = {"sampled": FISHER, "true": "fisher-true"}  # by the kind of labels
CHANGE, SOURCE, RUN, LOG, LOCK = "change.json", "source.json", "run.toml", "log.jsonl", ".lock"
CARD = "README.md"  # what `unde push` writes for people
CALIBRATION, CALIBRATION_HALVES = "calibration.json", "halves"
CHECKSUM = "# Checksum of the lines above: "  # the last line of RUN


@dataclass(frozen=True)
class Entry:
    """A name in the folder; `deleted` tells what happens after somebody deleted it."""

    name: str
    holds: str
    deleted: str
    writer: str


BUILT_AGAIN = "the same Index.build makes it again, exactly as it was"
ADDED_AGAIN = "index.add_fisher makes it again, exactly as it was"
MADE_ON_DEMAND = "it is made again when it is needed"
_ALL = "build, append, remove, merge"
ENTRIES = (
    Entry(MANIFEST, "what the index is and its resolved settings", BUILT_AGAIN, _ALL),
    Entry(IDS, "the user's names of examples", BUILT_AGAIN, _ALL),
    Entry(MATRICES, "whitening and second moments", BUILT_AGAIN, "build, merge"),
    Entry(PROBE, "features of a few examples, to tell changed code by", BUILT_AGAIN, _ALL),
    Entry(SHARDS, "the features", BUILT_AGAIN + ", shard by shard", _ALL),
    Entry(FISHERS["sampled"], "gradients with sampled labels", BUILT_AGAIN, _ALL),
    Entry(FISHERS["true"], "gradients with every label", ADDED_AGAIN, _ALL),
    Entry(KERNELS, "fitted kernels and K g(n)", MADE_ON_DEMAND, "whoever scores first"),
    Entry(QUERIES, "features of queries", MADE_ON_DEMAND, "commands that ask"),
    Entry(CALIBRATION, "the setting and weights that retrained models chose", "calibrate again", "calibrate"),
    Entry(
        CALIBRATION_HALVES, "how well its models did", "the next calibration trains them again", "calibrate"
    ),
    Entry(
        SCRATCH, "files that processes share", "nothing, if nobody is at work", "whoever has worker processes"
    ),
    Entry(CHANGE, "a change that was begun", "it is forgotten; the next clears its files", "append, remove"),
    Entry(
        SOURCE, "what it was built from", "name model and data to the next command", "unde build, unde append"
    ),
    Entry(RUN, "the options it was built with", "the same `unde build` writes it anew", "unde build"),
    Entry(CARD, "what the index is, for people", "the next push writes it", "unde push"),
    Entry(LOG, "how long builds took", "nothing is lost but the times", "build, append"),
    Entry(LOCK, "who is writing", "nothing, if nobody is", "whoever writes"),
)
_NAMES = {e.name: e for e in ENTRIES}
_VERSIONED = r"ids(-[1-9]\d{0,8})?\.json|probe(-[1-9]\d{0,8})?\.safetensors"
_TENSORS = r"\w[\w.-]*\.safetensors"
_INSIDE = f"({'|'.join(FISHERS.values())})"
_FILES = re.compile(
    rf"({_INSIDE}/)?({'|'.join(map(re.escape, (MANIFEST, MATRICES, LOG)))}|{_VERSIONED}|{SHARDS}/c\d+-\d+\.safetensors)"
    rf"|{re.escape(CALIBRATION)}|{re.escape(SOURCE)}|{re.escape(RUN)}|{re.escape(CARD)}|{KERNELS}/[0-9a-f]{{32}}/{_TENSORS}|{QUERIES}/{_TENSORS}",
    re.ASCII,
)


def repair_advice(name: str) -> str:
    """What to do about a damaged file, by its entry.

    >>> repair_advice("queries")
    'delete it, it is made again when it is needed'
    """
    return f"delete it, {_NAMES[name].deleted}"


def versioned_name(name: str, generation: int) -> str:
    """Name of a file that every change of an index replaces.

    >>> versioned_name(IDS, 0), versioned_name(PROBE, 3)
    ('ids.json', 'probe-3.safetensors')
    """
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{generation}{dot}{suffix}" if generation else name


def current_names(generation: int) -> tuple[str, str]:
    """Names of the ids and the probe after so many changes."""
    return versioned_name(IDS, generation), versioned_name(PROBE, generation)


def is_versioned(name: str) -> bool:
    """Whether every change of an index replaces the file of this name."""
    return re.fullmatch(_VERSIONED, name, re.ASCII) is not None


def shard_path(folder: StorePath, checkpoint: int, number: int) -> StorePath:
    return folder / SHARDS / f"c{checkpoint:02d}-{number:06d}.safetensors"


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """The checkpoint and the number of a shard, by the name of its file.

    >>> parse_shard_name("c00-000012.safetensors"), parse_shard_name("c0-12.safetensors")
    ((0, 12), None)
    """
    match = re.fullmatch(r"c(\d{2,9})-(\d{6,9})\.safetensors", name)
    numbers = None if match is None else (int(match[1]), int(match[2]))
    return numbers if numbers is not None and shard_path(Path(), *numbers).name == name else None


def list_names(folder: StorePath) -> set[str]:
    """Names in a folder, by one request; none if it does not exist."""
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except Unreachable:
        raise
    except OSError as e:
        raise UndeError(
            f"cannot look into the folder {folder} ({e.strerror}): let it be read, or choose another place"
        ) from None


def is_index_path(name: str) -> bool:
    """Whether an index may have a file of this path.

    >>> is_index_path("shards/c00-000001.safetensors"), is_index_path("shards/../x"), is_index_path("model.pt")
    (True, False, False)
    """
    return _FILES.fullmatch(name) is not None


def prepare(folder: StorePath) -> None:
    """Make the folder, unless it holds other files than those of an index."""
    if exists(folder) and not folder.is_dir():
        raise UndeError(f"{folder} is a file: an index needs a folder")
    if exists(folder) and not exists(folder / MANIFEST):
        foreign = sorted(name for name in list_names(folder) if not is_index_name(name))
        if foreign:
            raise UndeError(
                f"{folder} holds something else ({', '.join(foreign[:3])}{', …' if foreign[3:] else ''}): "
                "choose an empty or new folder for the index"
            )
    refuse_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UndeError(f"cannot make the folder {folder} ({e.strerror}): choose another place") from None


def refuse_links(folder: StorePath) -> None:
    """Refuse links in the folder, which would lead out of it."""
    if not is_local(folder):
        return
    inside = [folder / name for name in (SHARDS, *FISHERS.values(), KERNELS, QUERIES, SCRATCH)]
    with contextlib.suppress(OSError):  # reading reports it
        inside += (folder / KERNELS).iterdir()
    for path in inside:
        if os.path.islink(path):
            raise UndeError(f"{path} is a link, which is not followed: put what it leads to in its place")


def is_index_name(name: str) -> bool:
    """Whether a name in the folder is of an index."""
    if name.endswith(PARTIAL):
        return any(map(name.startswith, _NAMES)) or re.match(_VERSIONED, name, re.ASCII) is not None
    return name in _NAMES or is_versioned(name)


DAMAGED, FOREIGN, MISSING = "damaged", "foreign", "missing"


@dataclass(frozen=True)
class Damage:
    """A file that is damaged, foreign or missing, and what restores it."""

    name: str  # relative to what was verified
    kind: str
    why: str
    advice: str

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.name} is {self.kind}{why}: {self.advice}"


@dataclass
class VerifyReport:
    """True if nothing is damaged. `unfinished` tells what is still to do."""

    path: StorePath
    what: str  # index, bank or weights
    files: int = 0
    bytes: int = 0
    unfinished: str = ""
    notes: list[str] = field(default_factory=list)  # what could not be checked, or does no harm
    problems: list[Damage] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        count = f"{self.files:,} file{'s' if self.files != 1 else ''}, {self.bytes:,} bytes"
        state = "whole" if self else f"{len(self.problems)} of its files are not as they were written"
        if self and self.unfinished:
            state = "sound as far as it goes"
        lines = [f"{self.path}: {self.what}, {state} ({count} checked)"]
        lines += [f"  {problem}" for problem in self.problems]
        lines += [f"  not finished: {self.unfinished}"] * bool(self.unfinished)
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def count(self, path: StorePath) -> None:
        """Count a file that was read to its end."""
        self.files += 1
        self.bytes += path.stat().st_size

    def report(self, path: StorePath, kind: str, why: object, advice: str) -> None:
        name = str(path).removeprefix(str(self.path)).lstrip(os.sep + "/") or str(path)
        self.problems.append(Damage(name, kind, str(why), advice))

    def add_unfinished(self, what: str) -> None:
        self.unfinished = f"{self.unfinished}; {what}" if self.unfinished else what

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"path": str(self.path), "sound": bool(self)}
