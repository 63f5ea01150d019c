"""Values and code described in JSON, so that two of them can be compared in another process.

Entries that begin with $ mark what was not written out: $tensor and $module by the digest of their content, $code by
the digest of its syntax and of all that it uses, $name for what another module defines, $type for what cannot be told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde.data import digest
from unde.errors import UndeError
from unde.tasks.syntax import bytecode, names, syntax

LONG = 64  # entries of a list, and more: by their digest
_NO_NUMBERS = {"training", "gradient_checkpointing", "name_or_path"}  # of modules: what changes no result


class Reader:
    """Describes a value or a function, and all that it leads to. One reader for each digest.

    `home` is the module whose functions and classes are followed; what others define counts by its name. `elsewhere`
    are objects that are described on their own.
    """

    def __init__(self, elsewhere: Iterable[Any] = ()) -> None:
        self.source = True  # whether all code was read from its source
        self.attributes: set[str] = set()  # that the functions read look up on objects
        self._within = [id(thing) for thing in elsewhere]  # and what is being described
        self._read: dict[int, int] = {}  # functions and classes, in the order in which they were met
        self._kept: list[Any] = []  # so that an id stays what it is

    def value(self, value: Any, home: str) -> Any:
        """As JSON; equal for equal content in every process."""
        if id(value) in self._within:
            return {"$type": type(value).__name__, "again": True}
        self._within.append(id(value))
        try:
            for kinds, describe in _KINDS:
                if isinstance(value, kinds):
                    return describe(self, value, home)
            return self._object(value, home)
        finally:
            self._within.pop()

    def function(self, function: FunctionType) -> dict[str, Any]:
        """Its syntax, its defaults, and the globals and closed-over values that it names."""
        if id(function) in self._read:
            return {"again": self._read[id(function)]}
        self._note(function)
        code, home = function.__code__, _home(function)
        text = syntax(function)
        if text is None:
            self.source, text = False, bytecode(code)
        given, looked_up = function.__globals__, names(code)
        self.attributes |= looked_up.attributes
        return {
            "text": text,
            "defaults": self.value([function.__defaults__, function.__kwdefaults__], home),
            "globals": {n: self.value(given[n], home) for n in sorted(looked_up.globals) if n in given},
            "closed": {n: self.value(v, home) for n, v in _closed(function)},
        }

    def members(self, cls: type) -> dict[str, Any]:
        """The bases of a class and all that it defines."""
        if id(cls) in self._read:
            return {"again": self._read[id(cls)]}
        self._note(cls)
        home = cls.__module__
        bases = [self.value(b, home) for b in cls.__bases__ if b is not object]
        if issubclass(cls, Enum):
            return {"bases": bases, "members": {m.name: self.value(m.value, home) for m in cls}}
        found: dict[str, Any] = {"bases": bases}
        if dataclasses.is_dataclass(cls):
            fields = dataclasses.fields(cls)
            found["fields"] = {f.name: self.value([f.default, f.default_factory], home) for f in fields}
        return found | {n: self._member(v, home) for n, v in sorted(vars(cls).items()) if _written(cls, n, v)}

    def _member(self, member: Any, home: str) -> Any:
        inside = underlying(member)
        return self.value(member if inside is None else inside, home)

    def _note(self, thing: Any) -> None:
        self._read[id(thing)] = len(self._read)
        self._kept.append(thing)

    # --- kinds of values --------------------------------------------------------------------------------

    def _plain(self, value: Any, home: str) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int):
            if isinstance(value, kind):
                return kind(value)
        # JSON has no NaN, which is not even equal to itself
        return float(value) if isinstance(value, float) and math.isfinite(value) else {"$number": repr(value)}

    def _member_of(self, value: Enum, home: str) -> Any:
        return {"$name": f"{type(value).__name__}.{value.name}", "value": self.value(value.value, home)}

    def _mapping(self, value: Mapping[Any, Any], home: str) -> Any:
        named = {k if isinstance(k, str) else repr(k): v for k, v in value.items()}
        return {k: self.value(named[k], home) for k in sorted(named)}

    def _list(self, value: Any, home: str) -> Any:
        found = [self.value(v, home) for v in value]
        return found if len(found) < LONG else {"$list": sealed(found), "of": len(found)}

    def _set(self, value: Any, home: str) -> Any:
        found = sorted((self.value(v, home) for v in value), key=json.dumps)
        return found if len(found) < LONG else {"$list": sealed(found), "of": len(found)}

    def _tensor(self, value: Any, home: str) -> Any:
        of = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        try:
            return {"$tensor": tensor_digest(value), "of": of}
        except (UndeError, RuntimeError, TypeError):  # of objects; without storage, as on the meta device
            return {"$type": f"{type(value).__name__}, {of}"}

    def _module(self, value: nn.Module, home: str) -> Any:
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        content = {name: self._tensor(t.detach(), home) for name, t in tensors.items()}
        parts = {name: [type(m).__name__, _settings(m)] for name, m in value.named_modules()}
        found = {"$module": sealed([content, parts]), "of": type(value).__name__}
        own = {type(m).__name__: type(m) for m in value.modules() if type(m).__module__ == home}
        return found | ({"$code": [self.members(own[n]) for n in sorted(own)]} if own else {})

    def _function(self, value: FunctionType, home: str) -> Any:
        wrapped = getattr(value, "__wrapped__", None)
        if _home(value) == home or (
            wrapped is None and "<" in value.__qualname__
        ):  # a lambda has no other name
            return {"$code": self.function(value)}
        if wrapped is not None:
            return {"$name": f"{_home(value)}.{value.__code__.co_name}", "of": self.value(wrapped, home)}
        return {"$name": f"{_home(value)}.{value.__qualname__}"}

    def _method(self, value: MethodType, home: str) -> Any:
        return {"function": self.value(value.__func__, home), "of": self.value(value.__self__, home)}

    def _partial(self, value: functools.partial, home: str) -> Any:
        given = {"args": self.value(value.args, home), "keywords": self.value(value.keywords, home)}
        return {"$type": "partial", "function": self.value(value.func, home), **given}

    def _class(self, value: type, home: str) -> Any:
        if value.__module__ == home or "<locals>" in value.__qualname__:
            return {"$code": self.members(value)}
        return {"$name": f"{value.__module__}.{value.__qualname__}"}

    def _object(self, value: Any, home: str) -> Any:
        """By its config or its attributes, if these can be expected to be all there is to it."""
        cls = type(value)
        if hasattr(value, "__wrapped__"):  # functools.cache, say
            return self.value(value.__wrapped__, home)
        if isinstance(getattr(value, "config", None), Mapping):  # a scheduler of diffusers
            config = {k: v for k, v in value.config.items() if not k.startswith("_")}
            return {"$type": cls.__name__, **self._mapping(config, home)}
        own, ours = cls.__module__ == home or "<locals>" in cls.__qualname__, package(cls) == "unde"
        plain = dataclasses.is_dataclass(value) or isinstance(value, (SimpleNamespace, Namespace))
        if not (own or ours or plain):
            return {"$type": f"{cls.__module__}.{cls.__qualname__}"}
        code = {"$code": self.members(cls)} if own else {}
        return {"$type": cls.__name__, **code, **self._mapping(attributes(value), home)}


_Describe = Callable[[Any, Any, str], Any]
_KINDS: list[tuple[Any, _Describe]] = [
    (Enum, Reader._member_of),
    ((bool, int, float, complex, str, type(None), np.generic), Reader._plain),
    ((Tensor, np.ndarray), Reader._tensor),
    (nn.Module, Reader._module),
    (Mapping, Reader._mapping),
    ((list, tuple, range), Reader._list),
    ((set, frozenset), Reader._set),
    ((bytes, bytearray), lambda reader, value, home: {"$bytes": sealed(value.hex()), "of": len(value)}),
    ((torch.dtype, Path, slice), lambda reader, value, home: str(value)),
    (ModuleType, lambda reader, value, home: {"$name": value.__name__}),
    (FunctionType, Reader._function),
    (MethodType, Reader._method),
    (functools.partial, Reader._partial),
    ((BuiltinFunctionType, np.ufunc), lambda reader, value, home: {"$name": _builtin(value)}),
    (type, Reader._class),
]


def tensor_digest(value: Any) -> str:
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        value = value.to_dense()
    return digest(value)


def sealed(tree: Any) -> str:
    """A digest of a description."""
    text = json.dumps(tree, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def closed_code(tree: Any) -> Any:
    """A description with the code in it replaced by its digest."""
    if isinstance(tree, list):
        return [closed_code(v) for v in tree]
    if not isinstance(tree, dict):
        return tree
    return {k: sealed(v) if k == "$code" else closed_code(v) for k, v in tree.items()}


def underlying(member: Any) -> Any:
    """The function of a method, a property or the like; None if there is none."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, (functools.cached_property, functools.partialmethod)):
        return member.func
    return member if isinstance(member, FunctionType) else None


def attributes(value: Any) -> dict[str, Any]:
    """Of an instance, those in slots too."""
    slots = [n for cls in type(value).__mro__ for n in _slots(cls) if hasattr(value, n)]
    return {n: getattr(value, n) for n in slots} | dict(getattr(value, "__dict__", {}))


def package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(n for n in found if n != "__weakref__")


def _settings(module: nn.Module) -> dict[str, str]:
    """The plain attributes of a module, such as the smoothing of a loss."""
    plain = (bool, int, float, str, type(None))
    kept = {k: v for k, v in vars(module).items() if isinstance(v, plain) and not k.startswith("_")}
    return {k: repr(v) for k, v in sorted(kept.items()) if k not in _NO_NUMBERS}


def _written(cls: type, name: str, member: Any) -> bool:
    """Whether somebody wrote this member of a class: not Python itself, nor what makes data classes."""
    if not (name.startswith("__") and name.endswith("__")):
        return not name.startswith("_abc_")
    function = inspect.unwrap(f) if (f := underlying(member)) else None
    if not isinstance(function, FunctionType) or name.startswith("__annotat"):
        return False
    made = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
    return not (made and function.__code__.co_filename.startswith("<"))


def _closed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The values of a closure by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def _home(function: FunctionType) -> str:
    """Where it was written, whatever a decorator says."""
    return function.__globals__.get("__name__", "")


def _builtin(value: Any) -> str:
    return (
        f"{getattr(value, '__module__', None) or 'builtins'}.{getattr(value, '__qualname__', value.__name__)}"
    )
