"""Samples in a folder: samples.json, which names the file of tensors beside it and holds its checksum.

The JSON file is written last and all at once, and what it names is never changed: a folder holds the samples that were
saved into it last, whole, whatever happened on the way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unde.errors import UndeError
from unde.store.files import (
    check_plain,
    clear_partial,
    read_bounded,
    read_json,
    settings_checksum,
    write_bytes,
)

FORMAT, VERSION = "unde samples", 1
NAME = "samples.json"
GIVEN = "given."  # before the names of what the model was conditioned on
_TENSORS = "samples-*.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """A new folder, or one that holds samples already, which these replace."""
    if folder.exists() and not folder.is_dir():
        raise UndeError(f"{folder} is a file: samples are saved in a folder, choose another path")
    if folder.is_dir() and not (folder / NAME).is_file():
        others = sorted(p.name for p in folder.iterdir() if not p.match(_TENSORS))
        if others:
            raise UndeError(
                f"{folder} holds {others[0]!r} and no samples: choose a new folder, or one that samples were saved in"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UndeError(f"cannot make the folder {folder} ({e.strerror}): choose another path") from None
    content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    file = folder / f"samples-{digest[:12]}.safetensors"
    write_bytes(file, content)
    settings = {"format": FORMAT, "version": VERSION, "tensors": file.name, "digest": digest, **about}
    settings["checksum"] = settings_checksum(settings)
    write_bytes(folder / NAME, (json.dumps(settings, indent=1) + "\n").encode())
    for old in folder.glob(_TENSORS):  # of samples that were here before
        if old.name != file.name:
            with contextlib.suppress(OSError):
                old.unlink()
    clear_partial(folder)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and what is known about them, after checking that they are what was saved."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise UndeError(f"no samples at {folder}, which {what}: expected a folder that Samples.save has made")
    if not (folder / NAME).exists():
        raise UndeError(f"{folder} holds no {NAME}: expected a folder that Samples.save has made")
    try:
        about = read_json(folder / NAME)
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError("it is no file of samples")
        if about.get("version") != VERSION:
            raise ValueError(f"it has the version {about.get('version')!r}, expected {VERSION}")
        if about.get("checksum") != settings_checksum(about):
            raise ValueError("its content does not match its checksum")
        file = folder / str(about["tensors"])
        if file.parent != folder or not file.match(_TENSORS):
            raise ValueError(f"it names {about['tensors']!r} as its tensors")
        content = read_bounded(file, check_plain(file))
        if hashlib.blake2b(content, digest_size=16).hexdigest() != about["digest"]:
            raise ValueError(f"{file.name} does not match its checksum")
        return load(content), about
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
        raise UndeError(f"the samples in {folder} are damaged ({e}): sample and save them again") from None
