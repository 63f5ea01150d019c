"""The state of an open index, and its checks: was it made from these inputs, does the task still compute the same?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.checkpoints import Checkpoint, fingerprints
from unde.data import Collate, Rows, choose_collate, evenly, to_device
from unde.default_device import host_default
from unde.devices import CPU, Compute, budget, device_of, find_device, model_bytes
from unde.errors import UndeError
from unde.fingerprints import ModelWatch, align_rows, changed_example
from unde.gradients.coverage_check import TOLERANCE
from unde.groups import Groups
from unde.index.feature_runner import FeatureRunner
from unde.index.reader import IndexReader, check_shards, read_ids
from unde.index.scorer import Scorer
from unde.kernels import Moments
from unde.markup import Child, facts, list_names
from unde.methods import Method
from unde.parallel import SERIAL, Executor
from unde.parallel.model_transport import AnyRecipe, BuildInputs, ModelInputs
from unde.store import layout
from unde.store.manifest import Manifest, request_fields
from unde.store.remote import StorePath
from unde.store.shards import ShardError, read_shard, write_shard
from unde.tasks.base import Task, differences, is_builtin, kind_of

R = TypeVar("R", bound="IndexProperties")
PROBE_SIZE = 2  # examples whose features are stored to compare with
_TRIES = 3  # readings of an index that others change meanwhile


@dataclass
class IndexState:
    stored: IndexReader
    ids: Sequence[Any] | None = None
    model: nn.Module | None = None
    task: Task | None = None
    checkpoints: Sequence[Checkpoint] | None = None
    collate: Collate | None = None
    rows: Rows | None = None  # the training data
    executor: Executor = SERIAL  # who computes what is asked
    recipe: AnyRecipe | None = None  # how others make the model
    device: str | None = None  # where they put it, and questions are computed; by default that of the model
    device_memory: int | None = None  # bytes that may be taken there
    watch: ModelWatch | None = None  # of the model since it was compared with the index; None: it was not
    unfinished: int = 0  # shards that other workers have not written yet
    gradient_moments: dict[tuple[str, int], Moments] = field(default_factory=dict, init=False, repr=False)
    diagnosis: list[str] | None = field(default=None, init=False, repr=False)  # of model and examples

    def __post_init__(self) -> None:
        self.stored.record_files()
        self.stored.compute = self._compute()
        self.stored.worker = self._worker(self.stored.compute)

    def _compute(self) -> Compute:
        """Where kernels, scores and self-influence are computed: the one place that decides."""
        here = CPU if self.model is None else device_of(self.model)
        device = here if self.device is None else find_device(self.device)
        return budget(device, self.stored.memory, self.device_memory)

    def _worker(self, there: Compute) -> tuple[str, int] | None:
        """The device of each worker process, of the same kind unless one is named, and its bytes there."""
        if there.device == CPU or self.executor.in_process:
            return None
        name = str(self.device or there.device.type)
        workers = self.executor.sharing(there.device, torch.device(name).index is not None)
        copies = 0 if self.model is None else workers * model_bytes(self.model)
        return name, budget(there.device, self.stored.memory, self.device_memory, workers, copies).memory

    @cached_property
    def groups(self) -> Groups:
        return self.stored.manifest.as_groups()

    def check_finished(self) -> None:
        if self.unfinished:
            raise UndeError(
                f"{self.stored.folder} is not finished: {self.unfinished} shards were not written yet when this worker "
                "ended. When all have ended, run the same build once more without the array (unde finish)"
            )

    @cached_property
    def scorer(self) -> Scorer:
        self.check_finished()
        return Scorer(self.stored, self.groups, self.ids, self.executor)

    @cached_property
    def runner(self) -> FeatureRunner:
        self.check_finished()
        inputs, stored = self.inputs("features of queries come from the model"), self.stored
        return FeatureRunner(stored.folder, stored.manifest, inputs, self.executor, self.watch)

    def inputs(self, why: str, **more: object) -> ModelInputs:
        """Model and task, with the data if there are any; `why` they are needed."""
        if self.model is None or self.task is None or None in more.values():
            needed = {"model": self.model, "task": self.task} | more
            names = [name for name, value in needed.items() if value is None]
            raise UndeError(
                f"{why}, but this index was opened without its {', '.join(names)}: pass "
                f"{', '.join(f'{name}=' for name in names)} to Index.open"
            )
        return ModelInputs(self.model, self.task, self.rows, self.checkpoints, self.recipe, self.device)

    def build_inputs(self, why: str) -> BuildInputs:
        """Model, task and data."""
        inputs = self.inputs(why, train_data=self.rows)
        assert inputs.rows is not None
        return BuildInputs(**{f.name: getattr(inputs, f.name) for f in fields(inputs)})


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


# --- checks ----------------------------------------------------------------------------------------------------


def open_store(folder: StorePath, memory: int, verify: bool) -> IndexReader:
    """Open an index after checking its shards; again if it was changed meanwhile."""
    for left in reversed(range(_TRIES)):
        reader = IndexReader(folder, Manifest.read(folder), memory)
        try:
            check_shards(reader, verify)
            break
        except ShardError:
            if not left or Manifest.read(folder).id == reader.manifest.id:
                raise
    return reader


def check_inputs(state: IndexState, train_data: Any, groups: Groups | None) -> IndexState:
    """The state with training data and ids; raises unless the index was made from model, task, data and groups."""
    folder, manifest = state.stored.folder, state.stored.manifest
    if state.model is not None:
        note_device(folder, manifest, state.model)
    if state.task is not None and state.collate is None:
        state = replace(state, collate=choose_collate(state.task.collate, train_data))
    rows = None if train_data is None else Rows(train_data, state.collate)
    differ = _compare_model(manifest, state.model, state.checkpoints)
    members = manifest.groups if groups is None else {k: list(v) for k, v in groups.members.items()}
    if list(members.items()) != list(manifest.groups.items()):
        differ.append(f"the groups ({brief(manifest.groups, members)})")
    if rows is not None:
        rows, other = _match_examples(state.stored, rows)
        differ += other
    if state.task is not None and not differ:
        if state.model is None or rows is None:
            differ = differences(manifest.task, state.task.identity())
        else:
            inputs = ModelInputs(state.model, state.task, rows, state.checkpoints)
            differ = compare_task(FeatureRunner(folder, manifest, inputs), rows)
    if differ:
        raise UndeError(f"{folder} was made from something else. What differs: {'; '.join(differ)}")
    watch = None if state.model is None else ModelWatch(state.model, state.checkpoints)
    return replace(state, ids=read_ids(folder, manifest), rows=rows, watch=watch)


def note_device(folder: StorePath, manifest: Manifest, model: nn.Module) -> None:
    """Say so if the model is on another kind of device than the one that began the index."""
    here, there = device_of(model).type, manifest.resolved.device or "cpu"
    if here != there:
        console.note(
            f"{folder} was computed on {there}, this model is on {here}: features differ by rounding, up to 1e-5 of "
            "their norm in float32"
        )


def _match_examples(stored: IndexReader, rows: Rows) -> tuple[Rows, list[str]]:
    """The examples of an index among `rows`, and how they differ.

    In an index that was changed since it was built examples are matched by their content, in any order.
    """
    m, digests = stored.manifest, stored.values("digest")
    if len(rows) != m.examples:
        differ = f"the length of the training data ({m.examples} there, {len(rows)} given)"
    else:
        changed = changed_example(rows, torch.arange(len(rows)), digests)
        if changed is None:
            return rows, []
        differ = f"the training data (example {changed} has another content)"
    if m.changes is None:
        return rows, [differ]
    matched, missing = align_rows(rows, digests)
    if matched is None:
        lines = "; ".join(m.changes.lines)
        return rows, [f"{differ}; {missing} of its examples are not in what is given ({lines})"]
    return matched, []


def list_differences(there: Manifest, wanted: Manifest, other: str = "asked for") -> list[str]:
    """What differs between an index on disk and one that is asked for, but for the task and what was resolved."""
    ignored = {"schema", "task", *(["data"] if there.examples != wanted.examples else [])}
    return [
        _words(name, getattr(there, name), value, other)
        for name, value in request_fields(wanted).items()
        if name not in ignored and json.dumps(getattr(there, name)) != json.dumps(value)  # order counts
    ]


def _words(name: str, old: Any, value: Any, other: str) -> str:
    if name == "models" and len(old) != len(value):
        return f"the checkpoints ({len(old)} there, {len(value)} {other})"
    if name in ("units", "groups"):
        return f"the {'parameters' if name == 'units' else name} ({brief(old, value, other)})"
    some = "some" if old else "none"
    words = {
        "models": "the model's weights (other values)",
        "data": "the training data (same length, other content)",
        "matrices": "the whitening or the second moments (other values)",
        "ids": "the ids" if old and value else f"the ids (there are {some})",
        "factors": f"the covariances for EKFAC ({some} there)",
        "examples": f"the length of the training data ({old} there, {value} given)",
    }
    return words.get(name, f"{name} ({old!r} there, {value!r} {other})")


def brief(old: Any, new: Any, other: str = "asked for") -> str:
    named = [{u["name"]: u for u in x} if isinstance(x, list) else x for x in (old, new)]
    lone = [n for n in [*named[0], *named[1]] if n not in named[0] or n not in named[1]]
    if lone:
        return f"{len(named[0])} there, {len(named[1])} {other}; e.g. {lone[0]!r} is in one only"
    differ = [n for n in named[0] if named[0][n] != named[1][n]]
    return f"{differ[0]!r} is not the same" if differ else "in another order"


def _compare_model(
    manifest: Manifest, model: nn.Module | None, checkpoints: Sequence[Checkpoint] | None
) -> list[str]:
    if model is None:
        return []
    models = fingerprints(model, checkpoints)
    shapes = {n: list(p.shape) for n, p in model.named_parameters()}
    for u in manifest.units:
        here = shapes.get(u["name"])
        if here is None:
            return [f"the model (the one given has no parameter {u['name']!r})"]
        if here != u["shape"]:
            return [
                f"the model (parameter {u['name']!r} has shape {u['shape']} there, {here} in the one given)"
            ]
    if len(models) != len(manifest.models):
        return [f"the checkpoints ({len(manifest.models)} there, {len(models)} given; pass checkpoints=)"]
    if models != manifest.models:
        where = [c for c, (a, b) in enumerate(zip(models, manifest.models)) if a != b]
        which = "" if len(models) == 1 else f" of checkpoint {where[0]}"
        return [f"the model's weights{which} (same shapes, other values)"]
    return []


def compare_task(runner: FeatureRunner, rows: Rows) -> list[str]:
    """How the given task differs from that of the index, in words; features are compared for a user's own task."""
    task = runner.inputs.task
    differ = differences(runner.manifest.task, task.identity())
    if differ or is_builtin(type(task)):
        return differ
    other = _compare_features(runner, rows)
    return [] if other is None else [f"what {type(task).__name__} computes ({other})"]


def _probe_features(runner: FeatureRunner, rows: Rows, where: list[int]) -> Tensor:
    """Features of a few examples under the first checkpoint."""
    try:
        run = runner.open_pass(0, factors=False)
        batch = to_device(rows.batch(where), run.collect.device)
        return run.collect(batch, runner.sample_numbers(where))[0].float().cpu()
    finally:
        runner.close()


def write_probe(runner: FeatureRunner, rows: Rows) -> None:
    """Store the features of a few examples."""
    m, where = runner.manifest, evenly(len(rows), PROBE_SIZE)
    tensors = {"where": torch.tensor(where), "features": _probe_features(runner, rows, where)}
    write_shard(probe_path(runner.folder, m), m.id, tensors)


def probe_path(folder: StorePath, manifest: Manifest) -> StorePath:
    return folder / layout.versioned_name(layout.PROBE, manifest.generation)


def _compare_features(runner: FeatureRunner, rows: Rows) -> str | None:
    """Compare features of the examples of the probe with those stored; None if they are equal or cannot be read."""
    try:
        probe = read_shard(probe_path(runner.folder, runner.manifest), runner.manifest.id)
    except ShardError:  # lost or damaged: `verify` reports it, a build that goes on writes it again
        return None
    where, then = probe["where"], probe["features"]
    if len(where) != len(then) or not all(0 <= i < runner.manifest.examples for i in where.tolist()):
        return "the features to compare with are not of these examples"
    now = _probe_features(runner, rows, where.tolist())
    error = (now - then).norm(dim=1)
    bound = TOLERANCE[next(runner.inputs.model.parameters()).dtype] * then.norm(dim=1)
    wrong = (~(error <= bound)).nonzero()[:, 0]
    if not len(wrong):
        return None
    worst = int(wrong[0])
    off = 100 * float(error[worst] / then[worst].norm().clamp(min=1e-38))
    return f"features of example {int(where[worst])} differ by {off:.3g} %"
