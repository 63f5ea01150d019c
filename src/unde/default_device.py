"""`torch.set_default_device`: tensors of the package come to the host all the same, those of a model do not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from unde.devices import CPU

T = TypeVar("T")
_default: torch.device | None = None  # of the program, inside what `host_default` wraps


@contextmanager
def _host_default() -> Generator[None]:
    global _default
    before = torch.get_default_device()
    if before.type == "cpu":
        yield
        return
    outer, _default = _default, before
    try:
        with CPU:
            yield
    finally:
        _default = outer


@contextmanager
def program_default() -> Generator[None]:
    """Inside, tensors come to the default device of the program again: around calls of the user's model."""
    if _default is None:
        yield
        return
    with _default:
        yield


def host_default(public: T) -> T:
    """Make a function, or each public method of a class, create tensors on the host whatever
    `torch.set_default_device` said."""
    if not isinstance(public, type):
        function: Any = public
        return _host_default()(function)
    for name, value in list(vars(public).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            setattr(public, name, type(value)(_host_default()(value.__func__)))
        elif isinstance(value, property):
            setattr(public, name, property(_host_default()(value.fget), doc=value.__doc__))
        elif isinstance(value, functools.cached_property):
            value.func = _host_default()(value.func)
        elif inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
            setattr(public, name, _host_default()(value))
    return public
