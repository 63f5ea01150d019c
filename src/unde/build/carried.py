"""A model object on its way to other processes: its weights in a file, and the class and settings that make it."""

from __future__ import annotations

import importlib
import tempfile
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from torch import nn

from unde.data import Collate
from unde.errors import UndeError
from unde.recipe import Recipe, Setup
from unde.store.remote import Place, Remote, Unreachable
from unde.tasks.base import Task


@dataclass(frozen=True)
class Carried:
    """As a `Recipe` is, for models of transformers and diffusers, whose settings say how to make them again."""

    file: Place
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


def carried(model: nn.Module, task: Task, data: Any, collate: Collate | None, folder: Place) -> Carried:
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


def _save(model: nn.Module, file: Place) -> None:
    if not isinstance(file, Remote):
        save_model(model, str(file))
        return
    with tempfile.TemporaryDirectory(prefix="unde-") as folder:
        save_model(model, f"{folder}/model.safetensors")
        file.upload(Path(folder, "model.safetensors"))


@contextmanager
def _here(file: Place) -> Generator[Path]:
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
