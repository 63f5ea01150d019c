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
from typing import Any, TypeVar

from safetensors.torch import load_model, save_model
from torch import nn

from unde import devices
from unde.checkpoints import Checkpoint, fingerprints
from unde.data import Collate, Rows
from unde.devices import device_of
from unde.errors import UndeError, explain
from unde.fingerprints import data_fingerprint
from unde.setup import Recipe, Setup
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, is_local
from unde.tasks.base import Task


@dataclass(frozen=True)
class PackedModel:
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
        kind = getattr(importlib.import_module(module), name)
        model = kind(self.config) if hasattr(kind, "config_class") else kind.from_config(self.config)
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.data = tensor.data.to(self.dtypes[key])
        with _local_copy(self.file) as file:
            load_model(model, file)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key not in self.frozen)
        return Setup(model.eval(), self.task, self.data, collate=self.collate)


AnyRecipe = Recipe | PackedModel
Inputs = TypeVar("Inputs", bound="ModelInputs")


def recipe_for_data(recipe: AnyRecipe | None, data: Any, collate: Collate | None) -> AnyRecipe | None:
    """A recipe for the same model with other data, which travel with it."""
    return None if recipe is None else replace(recipe, data=data, collate=collate)


def pack_model(
    model: nn.Module, task: Task, data: Any, collate: Collate | None, folder: StorePath
) -> PackedModel:
    """A bare model, made ready to be sent. Its weights wait in `folder` as long as the result lives."""
    kind = type(model)
    found = getattr(importlib.import_module(kind.__module__), kind.__qualname__, None)
    config = getattr(model, "config", None)
    of_library = hasattr(kind, "config_class") or hasattr(kind, "from_config")  # transformers, diffusers
    if found is not kind or kind.__module__ == "__main__" or not of_library or config is None:
        raise not_portable(model)
    file = folder / f"model-{id(model):x}.safetensors"
    message = (
        f"cannot write {file} ({{why}}), from which other processes would read the model: make room there"
    )
    with explain(message, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _save(model, file)
    made = PackedModel(
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


def not_portable(model: nn.Module) -> UndeError:
    return UndeError(
        f"this {type(model).__name__} cannot be sent to another process: name a function that makes "
        "it, as in recipe='my_project.setup:make', or build with executor='serial'"
    )


def _save(model: nn.Module, file: StorePath) -> None:
    if is_local(file):
        save_model(model, str(file))
        return
    with tempfile.TemporaryDirectory(prefix="unde-") as folder:
        save_model(model, f"{folder}/model.safetensors")
        file.upload(Path(folder, "model.safetensors"))


@contextmanager
def _local_copy(file: StorePath) -> Generator[Path]:
    """The file, or a copy of what is elsewhere."""
    if is_local(file):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="unde-") as folder:
        copy = Path(folder, "model.safetensors")
        file.download(copy)
        yield copy


@dataclass(frozen=True)
class ModelInputs:
    """The user's model, task and checkpoints; `recipe` says how another process makes the same, and `device` where it
    puts it, by default on a device of the same kind."""

    model: nn.Module
    task: Task
    rows: Rows | None = None
    checkpoints: Sequence[Checkpoint] | None = None
    recipe: AnyRecipe | None = None
    device: str | None = None

    @cached_property
    def models(self) -> list[str]:
        """Fingerprints of the weights, one for each checkpoint."""
        return fingerprints(self.model, self.checkpoints)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.recipe is None:
            raise not_portable(self.model)
        kind = device_of(self.model).type
        return make_inputs, (self.recipe, self.checkpoints, self.device or (None if kind == "cpu" else kind))

    def portable(self: Inputs, folder: StorePath, rows: Rows) -> Inputs:
        """The same with a recipe; without one of the user's, the model is packed into `folder` with `rows`."""
        if self.recipe is not None:
            return self
        return replace(self, recipe=pack_model(self.model, self.task, rows.data, rows.collate, folder))

    def check_model(self, manifest: Manifest, folder: StorePath) -> None:
        """Raise if the recipe does not give the model that an index was begun with."""
        if self.models != manifest.models:
            raise UndeError(
                f"{self._maker} makes a model with other weights here than where {folder} was "
                "begun: it must give the same model every time, such as one that is read from a file"
            )

    @property
    def _maker(self) -> str:
        return "the recipe" if self.recipe is None else self.recipe.function


@dataclass(frozen=True)
class BuildInputs(ModelInputs):
    """The same with the training data."""

    rows: Rows  # type: ignore[assignment]

    @cached_property
    def data(self) -> str:
        """A fingerprint of the examples; raises if they read differently each time."""
        return data_fingerprint(self.rows)

    def check_data(self, manifest: Manifest, folder: StorePath) -> None:
        """Raise if the recipe does not give the data that an index was begun with."""
        if len(self.rows) != manifest.examples or self.data != manifest.data:
            raise UndeError(
                f"{self._maker} gives other data here than where {folder} was begun: it must give the same"
            )


def make_inputs(
    recipe: AnyRecipe, checkpoints: Sequence[Checkpoint] | None, device: str | None
) -> BuildInputs:
    """What was pickled elsewhere, made by its recipe."""
    setup = _setup(pickle.dumps((recipe, device)))
    return BuildInputs(setup.model, setup.task, setup.rows(setup.train_data), checkpoints, recipe, device)


@lru_cache(maxsize=1)
def _setup(payload: bytes) -> Setup:
    """Made once by a process, however many kinds of jobs it is given."""
    recipe, device = pickle.loads(payload)
    if device is not None:
        devices.local(device)  # before the recipe chooses one
    setup = recipe.make()
    if device is not None:
        devices.move(setup.model, devices.local(device))
    return setup
