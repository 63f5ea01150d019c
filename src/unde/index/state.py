"""The state of an open index, and its checks: are the shards whole, was it made from the given inputs, does the task
still compute the same?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unde import console
from unde.checkpoints import Checkpoint, fingerprints
from unde.data import Collate, Rows, choose_collate, evenly, to_device
from unde.devices import CPU, Compute, budget, device_of, find_device, model_bytes
from unde.errors import UndeError
from unde.fingerprints import ModelWatch, align_rows, changed_example, ids_fingerprint, plain_ids
from unde.gradients.coverage_check import TOLERANCE
from unde.groups import Groups
from unde.index.feature_runner import FeatureRunner
from unde.index.reader import IndexReader
from unde.index.scorer import Scorer
from unde.kernels import Moments
from unde.parallel import SERIAL, Executor
from unde.parallel.model_transport import AnyRecipe, BuildInputs, ModelInputs
from unde.store import layout
from unde.store.files import read_json, write_bytes
from unde.store.manifest import Manifest, request_fields
from unde.store.remote import StorePath, Unreachable, is_local
from unde.store.shards import ShardError, read_shard, write_shard
from unde.tasks.base import Task, differences, is_builtin

PROBE_SIZE = 2  # examples whose features are stored to compare with
_TRIES = 3  # readings of an index that others change meanwhile
_SMALL, _LONGEST_ID = 2**20, 2**12  # bytes of the ids of any index, and of an id on average


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
        if self.device is not None:
            device = find_device(self.device)
        else:
            device = CPU if self.model is None else device_of(self.model)
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

    def inputs(self, why: str) -> ModelInputs:
        """Model and task, with the data if there are any; `why` they are needed."""
        if self.model is None or self.task is None:
            raise self._missing(why, model=self.model, task=self.task)
        return ModelInputs(self.model, self.task, self.rows, self.checkpoints, self.recipe, self.device)

    def build_inputs(self, why: str) -> BuildInputs:
        """Model, task and data."""
        if self.model is None or self.task is None or self.rows is None:
            raise self._missing(why, model=self.model, task=self.task, train_data=self.rows)
        return BuildInputs(self.model, self.task, self.rows, self.checkpoints, self.recipe, self.device)

    def _missing(self, why: str, **inputs: object) -> UndeError:
        names = [name for name, value in inputs.items() if value is None]
        return UndeError(
            f"{why}, but this index was opened without its {', '.join(names)}: pass "
            f"{', '.join(f'{name}=' for name in names)} to Index.open"
        )


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
    differ = _compare_model(manifest, state.model, state.checkpoints) + _compare_groups(manifest, groups)
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


def check_shards(reader: IndexReader, verify: bool) -> None:
    """Raise unless every shard is there, whole and at its place; one is in memory at a time.

    Remote shards are fetched only to verify checksums; without `verify` each is checked when it is first read.
    """
    written = layout.list_names(reader.folder / layout.SHARDS)
    missing = [path.name for path in reader.paths.values() if path.name not in written]
    if missing:
        raise ShardError(
            f"{reader.folder} is not finished: {len(missing)} of {len(reader.paths)} shards are missing "
            f"({', '.join(missing[:5])}{', …' if missing[5:] else ''}). "
            "Run the same Index.build again to finish it"
        )
    problems = []
    for c, s in reader.paths if verify or is_local(reader.folder) else ():
        try:
            reader.read_checked(c, s, verify)
        except ShardError as e:
            problems.append(str(e))
    if problems:
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ShardError(
            f"{'; '.join(problems[:5])}{more}. Run the same Index.build again to repair the index"
        )


def read_ids(folder: StorePath, manifest: Manifest) -> list[Any] | None:
    """The user's ids; a file that is far too long for the number of examples is not read."""
    if not manifest.ids:
        return None
    path = folder / layout.versioned_name(layout.IDS, manifest.generation)
    try:
        ids = read_json(path, max(_SMALL, _LONGEST_ID * manifest.examples))
        if not isinstance(ids, list) or len(ids) != manifest.examples:
            ids = []
    except Unreachable:
        raise
    except (OSError, ValueError):
        ids = []
    if ids_fingerprint(ids) != manifest.ids:
        raise UndeError(f"{path} is missing or damaged: run the same Index.build again to repair it")
    return ids


def parse_ids(rows: Rows, ids: Sequence[Any] | None) -> list[Any] | None:
    """The ids as plain values, by default those in `ids` of the data; raises unless there is one for each example."""
    if ids is None:
        ids = getattr(rows.data, "ids", None)
        if (
            not isinstance(ids, list)
            or len(ids) != len(rows)
            or not all(isinstance(i, (str, int)) for i in ids)
        ):
            return None
    values = plain_ids(ids)
    if len(values) != len(rows):
        raise UndeError(f"{len(values)} ids for {len(rows)} examples: expected one for each")
    return values


def write_ids(folder: StorePath, ids: Sequence[Any] | None, generation: int = 0) -> None:
    if ids is not None:
        path = folder / layout.versioned_name(layout.IDS, generation)
        write_bytes(path, (json.dumps(list(ids)) + "\n").encode())


def list_differences(there: Manifest, wanted: Manifest, other: str = "asked for") -> list[str]:
    """What differs between an index on disk and one that is asked for, but for the task and what was resolved."""
    ignored = {"schema", "task", *(["data"] if there.examples != wanted.examples else [])}
    return [
        _words(name, getattr(there, name), value, other)
        for name, value in request_fields(wanted).items()
        if name not in ignored and json.dumps(getattr(there, name)) != json.dumps(value)  # order counts
    ]


_CONTENT = {
    "models": "the model's weights (other values)",
    "data": "the training data (same length, other content)",
    "matrices": "the whitening or the second moments (other values)",
}


def _words(name: str, old: Any, value: Any, other: str) -> str:
    if name == "models" and len(old) != len(value):
        return f"the checkpoints ({len(old)} there, {len(value)} {other})"
    if name in _CONTENT:
        return _CONTENT[name]
    if name == "ids":
        return "the ids" if old and value else f"the ids (there are {'some' if old else 'none'})"
    if name in ("units", "groups"):
        return f"the {'parameters' if name == 'units' else name} ({brief(old, value, other)})"
    if name == "factors":
        return f"the covariances for EKFAC ({'some' if old else 'none'} there)"
    if name == "examples":
        return f"the length of the training data ({old} there, {value} given)"
    return f"{name} ({old!r} there, {value!r} {other})"


def brief(old: Any, new: Any, other: str = "asked for") -> str:
    named = [{u["name"]: u for u in x} if isinstance(x, list) else x for x in (old, new)]
    lone = [n for n in [*named[0], *named[1]] if n not in named[0] or n not in named[1]]
    if lone:
        return f"{len(named[0])} there, {len(named[1])} {other}; e.g. {lone[0]!r} is in one only"
    differ = [n for n in named[0] if named[0][n] != named[1][n]]
    return f"{differ[0]!r} is not the same" if differ else "in another order"


def _compare_groups(manifest: Manifest, groups: Groups | None) -> list[str]:
    members = manifest.groups if groups is None else {k: list(v) for k, v in groups.members.items()}
    same = list(members.items()) == list(manifest.groups.items())
    return [] if same else [f"the groups ({brief(manifest.groups, members)})"]


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
