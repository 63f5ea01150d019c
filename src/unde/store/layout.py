"""The folder of an index: every name that may be in it, what it holds, and what becomes of it when it is deleted.

manifest.json                  what the index is and what was settled for it
ids.json                       the user's names of examples
projection.safetensors         matrices of the projection that are not drawn from the seed
probe.safetensors              features of a few examples: has the code of a task changed what it computes?
shards/c00-000000.safetensors  features of the examples of one shard under one checkpoint
fisher/                        an index of gradients with sampled labels, where fisher="sampled" asks for it
fisher-true/                   an index of gradients with every label, where fisher="true" asks for it
kernels/<key>/                 what kernels were fitted to, and K g(n) where that is stored
queries/                       features of queries that a command has computed
scratch/                       what processes that work together hand to one another
calibration.json               the setting and weights that retrained models chose
halves/                        how well the models did that a calibration has trained
change.json                    a change that was begun: examples are being appended or removed
source.json                    what the command line built it from
run.toml                       the options of that command, with which another index is built just so
log.jsonl                      how long builds took
.lock                          held by who writes

Of an index that was changed, ids and probe have the number of the change in their names: ids-2.json.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from unde.errors import UndeError
from unde.store.files import PARTIAL
from unde.store.remote import Remote, StorePath, Unreachable, exists

MANIFEST, IDS, MATRICES, PROBE = "manifest.json", "ids.json", "projection.safetensors", "probe.safetensors"
SHARDS, FISHER, KERNELS, QUERIES, SCRATCH = "shards", "fisher", "kernels", "queries", "scratch"
FISHERS = {"sampled": FISHER, "true": "fisher-true"}  # by the kind of labels
CHANGE, SOURCE, RUN, LOG, LOCK = "change.json", "source.json", "run.toml", "log.jsonl", ".lock"
CALIBRATION, CALIBRATION_HALVES = "calibration.json", "halves"
CHECKSUM = "# Checksum of the lines above: "  # the last line of RUN


@dataclass(frozen=True)
class Entry:
    """A name in the folder. `deleted` says what happens after somebody deleted it, `writer` who writes it."""

    name: str
    holds: str
    deleted: str
    writer: str


BUILT_AGAIN = "the same Index.build makes it anew, exactly as it was"
ADDED_AGAIN = "index.add_fisher makes it anew, exactly as it was"
MADE_ON_DEMAND = "it is made anew when it is needed"
_ALL = "build, append, remove, merge"
ENTRIES = (
    Entry(MANIFEST, "what the index is and what was settled for it", BUILT_AGAIN, _ALL),
    Entry(IDS, "the user's names of examples", BUILT_AGAIN, _ALL),
    Entry(MATRICES, "pca directions and second moments", BUILT_AGAIN, "build, merge"),
    Entry(PROBE, "features of a few examples, to tell changed code by", BUILT_AGAIN, _ALL),
    Entry(SHARDS, "the features", BUILT_AGAIN + ", shard by shard", _ALL),
    Entry(FISHERS["sampled"], "gradients with sampled labels", BUILT_AGAIN, _ALL),
    Entry(FISHERS["true"], "gradients with every label", ADDED_AGAIN, _ALL),
    Entry(KERNELS, "fitted kernels and K g(n)", MADE_ON_DEMAND, "whoever scores first"),
    Entry(QUERIES, "features of queries", MADE_ON_DEMAND, "commands that ask"),
    Entry(CALIBRATION, "the setting and weights that retrained models chose", "calibrate again", "calibrate"),
    Entry(
        CALIBRATION_HALVES,
        "how well the models did that a calibration has trained",
        "the next calibration trains them again",
        "calibrate",
    ),
    Entry(
        SCRATCH,
        "what processes that work together hand to one another",
        "nothing, if nobody is at work",
        "whoever has worker processes",
    ),
    Entry(
        CHANGE,
        "a change that was begun",
        "it is forgotten; what it wrote is cleared by the next",
        "append, remove",
    ),
    Entry(
        SOURCE,
        "what the command line built it from",
        "name model and data to the next command",
        "unde build, unde append",
    ),
    Entry(RUN, "the options it was built with", "the same `unde build` writes it anew", "unde build"),
    Entry(LOG, "how long builds took", "nothing is lost but the times", "build, append"),
    Entry(LOCK, "who is writing", "nothing, if nobody is", "whoever writes"),
)
_NAMES = {e.name: e for e in ENTRIES}
_VERSIONED = r"ids(-[1-9]\d{0,8})?\.json|probe(-[1-9]\d{0,8})?\.safetensors"
_TENSORS = r"\w[\w.-]*\.safetensors"
_INSIDE = f"({'|'.join(FISHERS.values())})"
_FILES = re.compile(
    rf"({_INSIDE}/)?({'|'.join(map(re.escape, (MANIFEST, MATRICES, LOG)))}|{_VERSIONED}|{SHARDS}/c\d+-\d+\.safetensors)"
    rf"|{re.escape(CALIBRATION)}|{re.escape(SOURCE)}|{re.escape(RUN)}|{KERNELS}/[0-9a-f]{{32}}/{_TENSORS}|{QUERIES}/{_TENSORS}",
    re.ASCII,
)


def table() -> str:
    """The entries as a page shows them."""
    names = (f"{e.name}/" if "." not in e.name else e.name for e in ENTRIES)
    rows = [f"| `{name}` | {e.holds} | {e.writer} | {e.deleted} |" for name, e in zip(names, ENTRIES)]
    return "\n".join(
        ["| name | what it holds | who writes it | if it is deleted |", "|---|---|---|---|", *rows]
    )


def restored(name: str) -> str:
    """What to do about a damaged file, by the name in the folder that it is or is under.

    >>> restored("queries")
    'delete it, it is made anew when it is needed'
    """
    return f"delete it, {_NAMES[name].deleted}"


def version(name: str, generation: int) -> str:
    """What a file is called that belongs to one state of an index.

    >>> version(IDS, 0), version(PROBE, 3)
    ('ids.json', 'probe-3.safetensors')
    """
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{generation}{dot}{suffix}" if generation else name


def versioned(name: str) -> bool:
    """Whether it is the name of a file that belongs to one state of an index."""
    return re.fullmatch(_VERSIONED, name, re.ASCII) is not None


def shard(folder: StorePath, checkpoint: int, number: int) -> StorePath:
    return folder / SHARDS / f"c{checkpoint:02d}-{number:06d}.safetensors"


def numbers(name: str) -> tuple[int, int] | None:
    """The checkpoint and the number of a shard, by the name of its file.

    >>> numbers("c00-000012.safetensors"), numbers("c0-12.safetensors")
    ((0, 12), None)
    """
    match = re.fullmatch(r"c(\d{2,9})-(\d{6,9})\.safetensors", name)
    found = None if match is None else (int(match[1]), int(match[2]))
    return found if found is not None and shard(Path(), *found).name == name else None


def listed(folder: StorePath) -> set[str]:
    """The names in a folder; none if it is not there. One question to a store, however many there are."""
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


def known(name: str) -> bool:
    """Whether a file of this name, with the folders it is in, is part of an index.

    >>> known("shards/c00-000001.safetensors"), known("shards/../../.ssh/config"), known("model.pt")
    (True, False, False)
    """
    return _FILES.fullmatch(name) is not None


def prepare(folder: StorePath) -> None:
    """Make the folder, unless it holds anything that is not of an index."""
    if exists(folder) and not folder.is_dir():
        raise UndeError(f"{folder} is a file: an index needs a folder")
    if exists(folder) and not exists(folder / MANIFEST):
        foreign = sorted(name for name in listed(folder) if not ours(name))
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
    """What is read and written in the folder is in the folder; stores have no links."""
    if isinstance(folder, Remote):
        return
    inside = [folder / name for name in (SHARDS, *FISHERS.values(), KERNELS, QUERIES, SCRATCH)]
    with contextlib.suppress(OSError):  # of what cannot be looked at, whoever reads it tells more
        inside += (folder / KERNELS).iterdir()
    for path in inside:
        if os.path.islink(path):
            raise UndeError(f"{path} is a link, which is not followed: put what it leads to in its place")


def ours(name: str) -> bool:
    """Whether a file in the folder is of an index."""
    if name.endswith(PARTIAL):
        return any(map(name.startswith, _NAMES)) or re.match(_VERSIONED, name, re.ASCII) is not None
    return name in _NAMES or versioned(name)
