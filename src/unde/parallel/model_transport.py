"""A model object on its way to other processes: its weights in a file, and the class and settings that make it."""

from __future__ import annotations

import importlib
import pickle
import tempfile
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from torch import nn

from unde.checkpoints import Checkpoint, fingerprints
from unde.data import Collate, Rows
from unde.errors import UndeError
from unde.fingerprints import data_fingerprint
from unde.setup import Recipe, Setup
from unde.store.manifest import Manifest
from unde.store.remote import Remote, StorePath, Unreachable
from unde.tasks.base import Task


@dataclass(frozen=True)
class Carried:
    """As a `Recipe` is, for models of transformers and diffusers, whose settings say how to make them again."""

    file: StorePath
    function: str  # module:class
    config: Any
    dtypes: Mapping[str, Any]  # of parameters and buffers
    frozen: tuple[str, ...]
    task: Task
    data: Any
    collate: Collate | None

    def make(self) -> Setup:
        module, _, name = self.function.partition(":")
        model = _constructed(getattr(importlib.import_module(module), name), self.config)
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.data = tensor.data.to(self.dtypes[key])
        with _here(self.file) as file:
            load_model(model, file)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key not in self.frozen)
        return Setup(model.eval(), self.task, self.data, collate=self.collate)


@dataclass(frozen=True)
class Elsewhere:
    """A recipe for the same model on other data, which travels with it."""

    recipe: Recipe
    data: Any
    collate: Collate | None

    @property
    def function(self) -> str:
        return self.recipe.function

    def make(self) -> Setup:
        return replace(self.recipe.make(), train_data=self.data, collate=self.collate)


def on_other_data(
    recipe: Recipe | Carried | Elsewhere | None, data: Any, collate: Collate | None
) -> Carried | Elsewhere | None:
    """How another process makes the same model, and is given this data."""
    if isinstance(recipe, (Carried, Elsewhere)):
        return replace(recipe, data=data, collate=collate)
    return None if recipe is None else Elsewhere(recipe, data, collate)


def carried(model: nn.Module, task: Task, data: Any, collate: Collate | None, folder: StorePath) -> Carried:
    """A bare model, made ready to be sent. Its weights wait in `folder` as long as the result lives."""
    kind = type(model)
    found = getattr(importlib.import_module(kind.__module__), kind.__qualname__, None)
    config = getattr(model, "config", None)
    if found is not kind or kind.__module__ == "__main__" or not _constructible(kind) or config is None:
        raise cannot_travel(model)
    file = folder / f"model-{id(model):x}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save(model, file)
    except Unreachable:
        raise
    except OSError as e:
        raise UndeError(
            f"cannot write {file} ({e.strerror}), from which other processes would read the model: make room there"
        ) from None
    made = Carried(
        file,
        f"{kind.__module__}:{kind.__qualname__}",
        config if hasattr(config, "to_dict") else dict(config),
        {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]},
        tuple(name for name, p in model.named_parameters() if not p.requires_grad),
        task,
        data,
        collate,
    )
    weakref.finalize(made, file.unlink, missing_ok=True)
    return made


def cannot_travel(model: nn.Module) -> UndeError:
    return UndeError(
        f"this {type(model).__name__} cannot be sent to another process: name a function that makes "
        "it, as in recipe='my_project.setup:make', or build with executor='serial'"
    )


def _save(model: nn.Module, file: StorePath) -> None:
    if not isinstance(file, Remote):
        save_model(model, str(file))
        return
    with tempfile.TemporaryDirectory(prefix="unde-") as folder:
        save_model(model, f"{folder}/model.safetensors")
        file.upload(Path(folder, "model.safetensors"))


@contextmanager
def _here(file: StorePath) -> Generator[Path]:
    """The file, or a copy of what is elsewhere."""
    if not isinstance(file, Remote):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="unde-") as folder:
        copy = Path(folder, "model.safetensors")
        file.download(copy)
        yield copy


def _constructible(kind: type) -> bool:
    """Whether it is a model class of transformers (made from its config) or of diffusers."""
    return hasattr(kind, "config_class") or hasattr(kind, "from_config")


def _constructed(kind: Any, config: Any) -> nn.Module:
    return kind(config) if hasattr(kind, "config_class") else kind.from_config(config)


@dataclass(frozen=True)
class BuildInputs:
    """What a user hands over; `recipe` says how another process makes the same, and `device` where it puts it."""

    model: nn.Module
    task: Task
    rows: Rows
    checkpoints: Sequence[Checkpoint] | None = None
    recipe: Recipe | Carried | Elsewhere | None = None
    device: str | None = None

    @cached_property
    def models(self) -> list[str]:
        """Fingerprints of the weights, for each checkpoint."""
        return fingerprints(self.model, self.checkpoints)

    @cached_property
    def data(self) -> str:
        """A fingerprint of the examples; raises where they read differently each time."""
        return data_fingerprint(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.recipe is None:
            raise cannot_travel(self.model)
        return made, (self.recipe, self.checkpoints, self.device)

    def must_be(self, manifest: Manifest, folder: StorePath, data: bool = False) -> None:
        """Raises if this is not the model, or the data, that an index was begun with."""
        name = "the recipe" if self.recipe is None else self.recipe.function
        if self.models != manifest.models:
            raise UndeError(
                f"{name} makes a model with other weights here than where {folder} was "
                "begun: it must give the same model every time, such as one that is read from a file"
            )
        if data and (len(self.rows) != manifest.examples or self.data != manifest.data):
            raise UndeError(
                f"{name} gives other data here than where {folder} was begun: it must give the same"
            )


def made(
    recipe: Recipe | Carried | Elsewhere, checkpoints: Sequence[Checkpoint] | None, device: str | None
) -> BuildInputs:
    """As it was given elsewhere."""
    setup = _setup(pickle.dumps((recipe, device)))
    return BuildInputs(setup.model, setup.task, setup.rows(setup.train_data), checkpoints, recipe, device)


@lru_cache(maxsize=1)
def _setup(sent: bytes) -> Setup:
    """Made once by a process, however many kinds of jobs it is given."""
    recipe, device = pickle.loads(sent)
    setup = recipe.make()
    if device is not None:
        setup.model.to(device)
    return setup
