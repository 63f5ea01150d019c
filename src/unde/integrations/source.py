"""What an index was built from, stored with it, and whether its MODULE:FUNCTION may be run."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torch import nn

from unde import console
from unde.checkpoints import Checkpoint
from unde.errors import UndeError, explain
from unde.integrations.documents import Texts
from unde.integrations.language import hf_setup
from unde.integrations.trainer import checkpoints_in, newest
from unde.setup import Recipe, Setup
from unde.store.files import check_settings, read_json, settings_checksum, write_atomically, write_bytes
from unde.store.layout import SOURCE
from unde.store.remote import StorePath, exists, is_local

_LONGEST = 2**20  # bytes of a file
_TRUST = "trust_remote_code"


@dataclass(frozen=True)
class ModelSource:
    """Where a model and its training data come from; stored with an index, so that no flag is given twice.

    Either a Hugging Face model, its texts and how they are read, or MODULE:FUNCTION, the `target`.
    """

    model: str | None = None
    data: str | None = None
    text_field: str | None = None
    seq_len: int | None = None
    target: str | None = None
    target_field: str | None = None
    checkpoints: str | None = None  # a folder of them; with either way of naming a model
    loss_on: str | None = None
    beta: float | None = None
    trust_remote_code: bool = False  # never stored

    @property
    def options(self) -> dict[str, str | float]:
        """The fields that are set and may be stored."""
        return {k: v for k, v in asdict(self).items() if k != _TRUST and v is not None}

    @property
    def text_options(self) -> dict[str, str | float]:
        """The options of a Hugging Face model and its texts."""
        return {k: v for k, v in self.options.items() if k not in ("target", "checkpoints")}

    def complete(self, index: StorePath | None) -> ModelSource:
        """Fill in what the index stores for all that is not set; raise if that is not enough to make a setup."""
        if index is not None and not index.is_dir():
            raise UndeError(f"no folder {index}: make an index with unde build")
        stored = _read(index) if index is not None else ModelSource()
        for flag, value, path in (("hf-model", self.model, stored.model), ("data", self.data, stored.data)):
            if value is None and _missing(path):
                raise UndeError(
                    f"{index} was built from {path}, which is gone: say where it is now (--{flag})"
                )
        if self.trust_remote_code and self.model is None and stored.model is not None:
            raise UndeError(
                f"--trust-remote-code without --hf-model: code is not run because {index} names a model. Give "
                f"--hf-model {stored.model} if that is what you trust"
            )
        options: dict[str, Any] = self.options
        source = replace(stored, target=None, trust_remote_code=self.trust_remote_code, **options)
        if source.model is None or source.data is None:
            raise _incomplete(source, index)
        source = replace(source, model=newest(os.path.expanduser(source.model)))
        names = {f"the model {source.model}": self.model, f"the texts {source.data}": self.data}
        defaults = [name for name, value in names.items() if value is None]
        if defaults:
            console.note(f"using {' and '.join(defaults)}, as remembered by {index}")
        return source

    def setup(
        self, learn: Texts | None = None, evaluate: Texts | None = None, query_field: str | None = None
    ) -> Setup:
        """The model and its texts, after `complete`, with texts of queries."""
        options: dict[str, Any] = {**self.text_options, _TRUST: self.trust_remote_code}
        return hf_setup(learn_queries=learn, eval_queries=evaluate, query_field=query_field, **options)

    def checkpoints_of(
        self, model: nn.Module, index: StorePath | None = None
    ) -> tuple[list[Checkpoint] | None, list[float] | None]:
        """The checkpoints that are named here or by the index, and their learning rates; None for the model alone."""
        folder = self.checkpoints
        if folder is None and index is not None and index.is_dir():
            folder = _read(index).checkpoints
            if _missing(folder):
                raise UndeError(
                    f"{index} was built from checkpoints in {folder}, which is gone: put them back there"
                )
        return (None, None) if folder is None else checkpoints_in(Path(folder).expanduser(), model)

    @property
    def recipe(self) -> Recipe:
        """How another process makes the same setup, after `complete`."""
        trust = {_TRUST: True} if self.trust_remote_code else {}
        return Recipe("unde.integrations.source:make_setup", self.options | trust)

    def absolute(self) -> dict[str, Any]:
        """All fields that may be stored, with paths that hold from any working folder."""
        settings: dict[str, Any] = {k: v for k, v in asdict(self).items() if k != _TRUST}
        for name in ("model", "data", "checkpoints"):
            path = Path(settings[name] or "").expanduser()
            if settings[name] is not None and path.exists():
                settings[name] = str(path.absolute())
        return settings

    def save(self, index: StorePath) -> None:
        """Write this into the folder of an index; list the index as this user's if it names a function."""
        settings = self.absolute()
        settings["checksum"] = settings_checksum(settings)
        write_bytes(index / SOURCE, (json.dumps(settings, indent=1) + "\n").encode())
        if self.target is not None:
            _list_index(index, self.target)


def _incomplete(source: ModelSource, index: StorePath | None) -> UndeError:
    if source.model is not None:
        return UndeError(f"--hf-model {source.model} needs --data FILE: the texts that it was trained on")
    if source.data is not None:
        return UndeError(f"--data {source.data} needs --hf-model DIR: the model that was trained on it")
    why = f". {index} remembers none: it is not finished, or was not built with `unde build`"
    return UndeError(
        "name a model and its training data: MODULE:FUNCTION (a function that returns an unde.Setup), or --hf-model "
        f"DIR with --data FILE.jsonl{'' if index is None else why}"
    )


def make_setup(**options: Any) -> Setup:
    """The function that `ModelSource.recipe` names."""
    return ModelSource(**options).setup()


def trusted_target(index: StorePath) -> str | None:
    """The MODULE:FUNCTION that an index was built from; None if it names none.

    An index may come from somebody else: the function is returned only if this user has built this index with it,
    according to a list in the user's home folder, and if the module lies outside of the index.

    Raises:
        UndeError: The index names a function that may not be run.
    """
    target = _read(index).target if index.is_dir() else None
    if target is None:
        return None
    module, _, function = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise _foreign(index, target, "it is no MODULE:FUNCTION")
    if is_local(index) and _lies_in(index.resolve(), module.split(".")):
        raise _foreign(index, target, f"{module} lies in the index itself")
    if _read_list().get(_name(index)) != target:
        raise _foreign(index, target, "the index was built by somebody else, or elsewhere")
    return target


def _list_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "unde" / "indexes.json"


def _read_list() -> dict[str, str]:
    """MODULE:FUNCTION by path of the indexes that this user has built; empty if the list cannot be read."""
    try:
        targets = read_json(_list_file(), _LONGEST)
    except (OSError, ValueError):
        return {}
    return targets if isinstance(targets, dict) else {}


def _list_index(index: StorePath, target: str) -> None:
    targets = {name: value for name, value in _read_list().items() if not _missing(name)}
    targets[_name(index)] = target
    file = _list_file()
    with suppress(OSError):  # without a home folder, the function is typed each time
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, (json.dumps(targets, indent=1) + "\n").encode())


def _name(index: StorePath) -> str:
    return str(index.resolve() if is_local(index) else index)


def _lies_in(home: Path, parts: list[str]) -> bool:
    """Whether a module, or a package around it, could be imported from inside a folder. Nothing is run."""
    for start in ("", *sys.path):
        for depth, name in enumerate(parts):
            folder = Path(start).joinpath(*parts[:depth]).resolve()
            if folder.is_relative_to(home) and PathFinder.find_spec(name, [str(folder)]) is not None:
                return True
    return False


def _foreign(index: StorePath, target: str, why: str) -> UndeError:
    return UndeError(
        f"{index / SOURCE} names {target!r}, which is not run without being asked for ({why}): give MODULE:FUNCTION"
    )


def _missing(path: str | None) -> bool:
    return path is not None and Path(path).is_absolute() and not Path(path).exists()


def _read(index: StorePath) -> ModelSource:
    """What `ModelSource.save` wrote."""
    path = index / SOURCE
    if not exists(path, links=True):
        return ModelSource()
    names = {field.name for field in fields(ModelSource)} - {_TRUST}
    message = f"{path} is damaged ({{e}}): delete it, and give --hf-model and --data, or MODULE:FUNCTION"
    with explain(message, UndeError, OSError, ValueError, TypeError, AttributeError):
        settings = read_json(path, _LONGEST)
        check_settings(settings)
        source = ModelSource(**{k: v for k, v in settings.items() if k in names})
        types = {"seq_len": int, "beta": float}
        if not all(type(v) is types.get(k, str) for k, v in source.options.items()):
            raise TypeError("a value of another type")
    return source
