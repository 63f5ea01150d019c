"""What an open index is: its files, method, groups, ids, model and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from unde import methods
from unde.data import Rows
from unde.default_device import host_default
from unde.groups import Groups
from unde.index.state import IndexState
from unde.markup import Child, facts, list_names
from unde.methods import Method
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.tasks.base import Task, kind_of

R = TypeVar("R", bound="IndexProperties")


@host_default
class IndexProperties:
    """The part of `Index` that says what it is."""

    def __init__(self, state: IndexState) -> None:
        self._state = state

    def __len__(self) -> int:
        return self.manifest.examples

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes of the index; the next question starts new ones."""
        self._state.executor.close()

    def __repr__(self) -> str:
        m, groups = self.manifest, len(self.groups)
        changes = "" if m.changes is None else f"; {m.changes.summary}"
        return (
            f"Index({str(self.folder)!r}, {self.method}, {m.examples} × {m.width}, {groups} groups{changes})"
        )

    def _repr_html_(self) -> str:
        m = self.manifest
        checkpoints = f", {m.terms} checkpoints or steps" if m.terms > 1 else ""
        rows: dict[str, Child] = {
            "folder": str(self.folder),
            "method": str(self.method),
            "training examples": f"{m.examples:,}" + ("" if m.ids else ", without ids"),
            "features": f"{m.width:,} numbers each, {m.store_dtype}{checkpoints}",
            "groups": list_names(self.groups.names),
            "task": str(m.task["name"]),
        }
        return facts("Index", rows)

    @property
    def folder(self) -> StorePath:
        return self._state.stored.folder

    @property
    def manifest(self) -> Manifest:
        """What the index holds, what it was made from, and its recorded settings."""
        return self._state.stored.manifest

    @property
    def method(self) -> Method:
        """The method that the index was built for."""
        return self._state.stored.method

    def method_for(self, method: str | Method | None = None) -> Method:
        """The method as this index scores with it: with the projection of the index and damping="auto" resolved."""
        if method is None:
            return self.method
        return methods.on_index(method, self.method, kind_of(self.manifest.task), self.manifest.examples)

    @property
    def groups(self) -> Groups:
        return self._state.groups

    @property
    def ids(self) -> Sequence[Any] | None:
        """The user's ids of the training examples, or None."""
        return self._state.ids

    @property
    def memory(self) -> int:
        """The memory budget in bytes."""
        return self._state.stored.memory

    @property
    def model(self) -> nn.Module | None:
        return self._state.model

    @property
    def task(self) -> Task | None:
        return self._state.task

    @property
    def train_data(self) -> Rows | None:
        return self._state.rows

    @property
    def unfinished(self) -> int:
        """Shards that other workers of an array had not written when this one ended."""
        return self._state.unfinished

    @property
    def skipped(self) -> Tensor:
        """(N,) bool: examples left out because of NaN gradients."""
        return self._state.stored.skipped
