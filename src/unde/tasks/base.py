"""Task: the loss and the measurements of each example; Batching: how batches go through the model; identity of a task.

Entries of an identity that begin with $ stand for values that are not written out, such as {"$tensor": digest}.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from unde.data import digest
from unde.errors import UndeError, unknown
from unde.tasks.perturb import InputNoise, Perturbation

KINDS = {
    "classification": ("Classification", "MultiLabel", "TokenClassification"),
    "language": ("CausalLM", "MaskedLM", "Seq2SeqLM", "Preference", "Reward"),
}
_LONG = 64  # longer lists are stored as a digest
_NO_SETTINGS = {"batching", "version"}  # `batching` changes no number, `version` has an entry
_NO_NUMBERS = {"training", "gradient_checkpointing", "name_or_path"}  # of modules: they change no result
_MISSING = "(nothing)"


AnyTask = TypeVar("AnyTask", bound=Any)


class Batching:
    """A batch is one pass. Subclass where an example is many rows to the model, as in diffusion."""

    def prepare(self, batch: Any) -> Any:
        """The batch with what the host computes from its content, before it goes to the device."""
        return batch

    def passes(self, batch: Any, ids: Sequence[int] | None) -> Iterator[Any]:
        """Batches to run for one batch of examples; measures and gradients add up over them."""
        yield batch

    def portions(self, batch: Any) -> Iterator[tuple[slice, Any]]:
        """Parts of the batch that go through the model one after the other, each with the examples that it holds."""
        yield slice(None), batch

    def fit_memory(self, memory: int, example: Any, peak: Callable[[Any, int], int]) -> Batching:
        """The same with passes that fit into `memory` bytes.

        `example` is a batch of one; `peak(part, B)` is how many bytes a pass of B examples takes.
        """
        return self

    @property
    def examples_per_pass(self) -> int:
        """Examples in one pass, where an example is many rows."""
        return 1

    @property
    def row_limit(self) -> int | None:
        """Rows in a pass if `fit_memory` decided it; a build that goes on passes it to `with_rows`."""
        return None

    def with_rows(self, rows: int) -> Batching:
        return self

    def reduced(self) -> Batching:
        """The same code on less of an example, for checks."""
        return self

    def shorten(self, batch: Any) -> Any | None:
        """A batch of shorter examples that go through the same code, for checks; None if there is none."""
        return None

    def step(self, c: int, steps: int) -> Batching:
        """One step of a trajectory of `steps`, for methods that sum over steps."""
        raise UndeError(
            "the method sums over the steps of a sampler, and examples of this task have none: expected "
            "unde.tasks.Diffusion. Choose another method"
        )


def with_batching(task: AnyTask, batching: Batching) -> AnyTask:
    """A copy of the task with another batching; the task itself if it has this one."""
    if batching is task.batching:
        return task
    other = copy.copy(task)
    other.batching = batching
    return other


def even_slices(count: int, most: int) -> Iterator[slice]:
    """As few slices of at most `most` as possible, equally long."""
    parts = -(-count // max(1, most))
    return (slice(count * i // parts, count * (i + 1) // parts) for i in range(parts))


class Task:
    """Subclass and define `loss`; override `measure` to differentiate something else, `collate` to batch otherwise.

    Losses are (B,) tensors: entry b depends on example b alone. Optional are `perturbations`, for weights learned from
    perturbed examples, `mask`, where batches are padded, and `check`, to refuse models.

    Attributes:
        version: Raise it when the code begins to compute other numbers: an index of another version is refused.

    >>> class Regression(Task):
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return (model(x).squeeze(-1) - y) ** 2
    """

    version = 1
    batching: Batching = Batching()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no loss(model, batch) -> (B,) tensor")

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        """What is differentiated; `name` is the method's choice, `ids` are the examples' positions."""
        if name != "loss":
            raise unknown(f"measure of {type(self).__name__}", name, ["loss"])
        return self.loss(model, batch)

    def outputs(self, model: nn.Module, batch: Any) -> int | None:
        """How many labels `measure` enumerates for fisher="true", as "true 0", "true 1", …; None: it cannot."""
        return None

    def collate(self, examples: list[Any]) -> Any:
        return default_collate(examples)

    def identity(self) -> dict[str, Any]:
        """Name, version, settings and tensors as JSON: an index refuses a task of another identity.

        All attributes count. Override it to leave out one that changes no number, such as a counter.
        """
        return identity(self)

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """One or two ways to perturb training examples, to learn weights from; `examples` are some of them."""
        return [InputNoise()]

    def mask(self, batch: Any) -> Tensor | Sequence[Tensor] | None:
        """(B, T), True at positions that are no padding; several for sequences of several lengths; None if all are."""
        return None

    def check(self, model: nn.Module, batch: Any) -> None:
        """Raise an UndeError if the loss of this model means nothing. Called before a build, on one batch."""


# --- identity: name, version, settings and digests of tensors; code is not part of it ---------------------


def check_task(task: Any, call: str) -> None:
    """Raise unless `task` is a task; `call` is the call that takes it, with all of its arguments."""
    if isinstance(task, type) and issubclass(task, Task):
        raise UndeError(f"the task is the class {task.__name__}: pass an object, such as {task.__name__}()")
    if not isinstance(task, Task):
        raise UndeError(
            f"the task is a {type(task).__name__}: expected one of unde.tasks, or a Task of your own, in {call}"
        )


def identity(task: Any) -> dict[str, Any]:
    """The name, settings and version of a task, in JSON."""
    settings = {name: describe(value, type(task).__module__) for name, value in _settings(task)}
    return {
        "name": type(task).__name__,
        "settings": dict(sorted(settings.items())),
        "version": task.version,
    }


def _settings(task: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of the user's classes, then of the task itself."""
    if not is_builtin(type(task.batching)):
        yield "batching", task.batching
    code = (type, FunctionType, staticmethod, classmethod, functools.cached_property)
    library = {"unde", "builtins", "abc", "typing", "torch"}
    for cls in reversed([c for c in type(task).__mro__ if c.__module__.partition(".")[0] not in library]):
        for name, value in vars(cls).items():
            skip = name in _NO_SETTINGS or name.startswith(("__", "_abc_"))
            if not (skip or isinstance(value, code) or inspect.isdatadescriptor(value)):
                yield name, value
    yield from ((name, value) for name, value in _attributes(task).items() if name not in _NO_SETTINGS)


def is_builtin(cls: type) -> bool:
    """Whether a class is defined in unde."""
    return cls.__module__.partition(".")[0] == "unde"


def kind_of(task: Mapping[str, Any]) -> str:
    """The kind of a task, by its identity: "classification", "language", "diffusion", or "" if unknown.

    >>> kind_of({"name": "CausalLM", "settings": {}})
    'language'
    >>> kind_of({"name": "Mine", "settings": {"alphas": "…", "timesteps": 10}})
    'diffusion'
    """
    if {"alphas", "timesteps"} <= set(task.get("settings", ())):
        return "diffusion"
    return next((kind for kind, names in KINDS.items() if task.get("name") in names), "")


# --- values as JSON --------------------------------------------------------------------------------------


def describe(value: Any, home: str, parents: tuple[int, ...] = ()) -> Any:
    """A value as JSON, equal for equal content in every process: digests of tensors, names of functions.

    Objects of the module `home` are described by their attributes, those of other libraries by their type.
    """
    if id(value) in parents:
        return {"$type": type(value).__name__}
    inside = functools.partial(describe, home=home, parents=(*parents, id(value)))
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Enum):
        return {"$name": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return _plain(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return _tensor(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, Mapping):
        return {str(k): inside(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple, range, set, frozenset)):
        items = [inside(v) for v in value]
        items = sorted(items, key=json.dumps) if isinstance(value, (set, frozenset)) else items
        return items if len(items) < _LONG else {"$list": digest_json(items), "of": f"{len(items)} items"}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": digest_json(value.hex()), "of": f"{len(value)} bytes"}
    if isinstance(value, (torch.dtype, Path, slice)):
        return str(value)
    if isinstance(value, MethodType):
        return {"$type": value.__qualname__, "of": inside(value.__self__)}
    if isinstance(value, functools.partial):
        arguments = {"args": inside(value.args), "keywords": inside(value.keywords)}
        return {"$type": "partial", "function": inside(value.func), **arguments}
    if hasattr(value, "__name__"):  # functions, classes and modules
        return {"$name": getattr(value, "__qualname__", value.__name__)}
    return _object(value, home, inside)


def _object(value: Any, home: str, inside: Any) -> Any:
    """An object by its config or attributes, where these can be expected to be all there is to it."""
    cls = type(value)
    if isinstance(getattr(value, "config", None), Mapping):  # a scheduler of diffusers
        config = {k: v for k, v in value.config.items() if not k.startswith("_")}
        return {"$type": cls.__name__, **inside(config)}
    plain = dataclasses.is_dataclass(value) or isinstance(value, (SimpleNamespace, Namespace))
    if plain or is_builtin(cls) or cls.__module__ == home:
        return {"$type": cls.__name__, **inside(_attributes(value))}
    return {"$type": f"{cls.__module__}.{cls.__qualname__}"}


def _plain(value: Any) -> Any:
    for kind in (bool, str, int):
        if isinstance(value, kind):
            return kind(value)
    if value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    return {"$number": repr(value)}  # JSON has neither NaN nor complex numbers


def _tensor(value: Any) -> dict[str, str]:
    of = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    dense = value.to_dense() if isinstance(value, Tensor) and value.layout is not torch.strided else value
    try:
        return {"$tensor": digest(dense), "of": of}
    except (UndeError, RuntimeError, TypeError):  # arrays of objects; tensors on the meta device
        return {"$type": f"{type(value).__name__}, {of}"}


def _module(value: nn.Module) -> dict[str, str]:
    tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    content = {name: _tensor(t.detach()) for name, t in tensors.items()}
    parts = {name: [type(m).__name__, _module_settings(m)] for name, m in value.named_modules()}
    return {"$module": digest_json([content, parts]), "of": type(value).__name__}


def _module_settings(module: nn.Module) -> dict[str, str]:
    """The plain attributes of a module, such as the smoothing of a loss."""
    plain = (bool, int, float, str, type(None))
    settings = {k: v for k, v in vars(module).items() if isinstance(v, plain) and not k.startswith("_")}
    return {k: repr(v) for k, v in sorted(settings.items()) if k not in _NO_NUMBERS}


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an instance, in __slots__ or not."""
    declared = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    in_slots = {n: getattr(value, n) for n in slots if hasattr(value, n) and not n.startswith("__")}
    return in_slots | getattr(value, "__dict__", {})


def digest_json(tree: Any) -> str:
    """A digest of what `describe` returns."""
    return blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=16).hexdigest()


# --- two identities --------------------------------------------------------------------------------------


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two identities, in words.

    >>> a = {"name": "Mine", "settings": {"alpha": 0.1}, "version": 1}
    >>> differences(a, a | {"settings": {"alpha": 0.2}, "version": 2})
    ['the version of Mine (1 there, 2 given)', 'setting alpha (0.1 there, 0.2 given)']
    """
    out = []
    if old["name"] != new["name"]:
        out.append(f"the task ({old['name']} there, {new['name']} given)")
    if old.get("version") != new.get("version"):
        out.append(f"the version of {new['name']} ({old.get('version')} there, {new.get('version')} given)")
    a, b = (_flatten({**x, **(x.get("settings") or {})}) for x in (old, new))
    for path in sorted({*a, *b}):
        if path.partition(".")[0] not in ("name", "version", "settings"):
            out += _compare(path, a.get(path, _MISSING), b.get(path, _MISSING))
    return out


def _flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path, as "scheduler.steps" or "layers[2].rate"; values that are not written out are leaves."""
    written = isinstance(tree, dict) and ("$type" in tree or not any(k.startswith("$") for k in tree))
    if written and (len(tree) > 1 or "$type" not in tree):
        return {k: v for name, x in tree.items() for k, v in _flatten(x, f"{path}.{name}").items()}
    if isinstance(tree, list) and any(isinstance(x, dict) for x in tree):
        return {k: v for i, x in enumerate(tree) for k, v in _flatten(x, f"{path}[{i}]").items()}
    return {path.removeprefix("."): tree}


def _compare(path: str, old: Any, new: Any) -> list[str]:
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):  # for Python, 1 == True
        return []
    marks = new if isinstance(new, dict) else {}
    word = "tensor" if "$tensor" in marks else "module" if "$module" in marks else "setting"
    a, b = _brief(old), _brief(new)
    return [f"{word} {path} ({'other content' if a == b else f'{a} there, {b} given'})"]


def _brief(value: Any) -> str:
    if value == _MISSING:
        return "none"
    if isinstance(value, dict):
        return str(next((value[k] for k in ("$number", "$name", "$type", "of") if k in value), "a dict"))
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
