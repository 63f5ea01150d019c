"""method="auto" and projection="auto": what an index is built for, by the task, the model and the budgets.

Features are the first of these that fit the budget of bytes on disk: whole gradients ("none"), their leading outer
products (factored(64) to factored(1)), random two-sided projections (kron(64) to kron(8)). Whole gradients and outer
products have to fit the memory budget, too. Adapters (LoRA) are never projected. Methods whose kernel mixes parameters
(TRAK and its kin, LoGRA) need matrices of features or examples squared: they keep the gradients of small models, and
kron(16) of others; so do all methods on diffusion models.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.console import size
from unde.data import Rows, to_device
from unde.default_device import program_default
from unde.devices import double_device
from unde.errors import UndeError
from unde.gradients.hooks import FAILURES
from unde.gradients.model_state import frozen_eval
from unde.groups import trainable
from unde.index.sizes import IndexFiles, IndexSizes
from unde.methods import AUTO, CHOICES, DEFAULT_METHOD, EKFAC, METHODS, PROJECTION, Damped, Method, TracIn
from unde.methods.builtin import MOST_LABELS
from unde.parallel.model_transport import BuildInputs
from unde.projection import MATRICES, WHOLE, Spec, feature_size
from unde.store import factored
from unde.store.remote import StorePath, is_local
from unde.tasks.base import Task, kind_of

WHOLE_MOST = (
    50_000_000  # parameters beyond which "none" is not chosen: reading it for each score takes too long
)
RANKS = (64, 32, 16, 8, 4, 2, 1)  # of factored(c)
SIDES = (64, 32, 16, 8)  # of kron(r)
LEAST = 2**20  # bytes: smaller memory budgets refuse nothing
ADVICE = "`unde calibrate` measures which setting predicts retrained models best"
_MIXING = "trak"  # the method that takes any features
SMALL = 5_000  # parameters of a model whose gradients are kept whole
FACTOR = 2  # so many times the projected features, too
DISK = 2**28  # bytes of gradients with every label, at most
STATIONARY = 0.95  # cosine of the summed gradients with −θ from which on they are those of L2 regularization
_BATCH = 256


@dataclass(frozen=True)
class MethodChoice:
    """The method to build an index for, and what to say about it.

    Args:
        method: With projection and damping resolved.
        words: What was chosen and why; empty where all of it was named.
        guessed: Whether rules chose the method or the features, which calibration can check.
    """

    method: Method
    words: tuple[str, ...] = ()
    guessed: bool = False

    def lines(self, minutes: float | None = None) -> Iterator[str]:
        """The choice in one line, and how to check it in another."""
        if self.words:
            time = [] if minutes is None else [f"about {console.duration(60 * minutes)}"]
            yield f"chosen: {'; '.join([*self.words, *time])}"
        if self.guessed:
            yield ADVICE


def choose(
    method: str | Method,
    projection: str,
    sizes: IndexSizes,
    disk: int,
    *,
    weighed: bool = False,
    before: dict[str, Any] | None = None,
    inputs: BuildInputs | None = None,
    folder: StorePath | None = None,
    alone: bool = True,
) -> MethodChoice:
    """The method to build an index for, with its projection and damping.

    Args:
        method: What is asked for, or "auto".
        projection: The same for the projection.
        sizes: What is known of the index.
        disk: The budget in bytes, which bounds no projection that is named.
        weighed: Whether gradients are weighed entry by entry, by second moments.
        before: The method of an index that was begun, which "auto" takes over.
        inputs: The model and data of a build, which tell how a small model was regularized.
        folder: Where the index will be; its file system has to hold whole gradients.
        alone: Whether no other process builds the same index: then the free space of the folder is a budget, too.
    """
    kind, words = kind_of(sizes.task.identity()), list[str]()
    named = None if projection == AUTO else str(Spec.parse(projection))
    wanted = _wanted(method, named, sizes, kind, weighed, before)
    if method == AUTO:
        small = "a small model" if sizes.parameters <= SMALL else kind or "other tasks"
        words.append(f"method {wanted.name} ({small if before is None else 'as recorded'})")
    fitted = None if before is not None or inputs is None else regularized(wanted, inputs, sizes.names)
    wanted = fitted or wanted
    if wanted.projection is not None:
        chosen = methods.for_building(wanted, kind, before)
        words += [f"projection {chosen.projection}"] if method == AUTO and named is None else []
    elif before is not None:
        chosen = methods.for_building(wanted, kind, before, default_projection(sizes.model, sizes.names))
        words.append(f"projection {chosen.projection}")
    else:
        free = free_bytes(folder) if alone else None
        budget = _Budget(disk) if free is None or free >= disk else _Budget(free, free=True)
        chosen, said = _Search(wanted, sizes, kind, weighed, budget).first()
        words.append(said)
    words += _said_of_damping(wanted, chosen, kind, fitted is not None)
    if before is None:
        _check_whole(chosen, sizes, folder)
    guessed = before is None and (method == AUTO or wanted.projection is None)
    return MethodChoice(chosen, tuple(words), guessed)


def settle_damping(method: Method, inputs: BuildInputs, names: Sequence[str]) -> MethodChoice:
    """The Fisher matrix and the damping of a method whose features are known."""
    kind, fitted = kind_of(inputs.task.identity()), regularized(method, inputs, names)
    chosen = methods.for_building(fitted or method, kind)
    return MethodChoice(chosen, tuple(_said_of_damping(fitted or method, chosen, kind, fitted is not None)))


def _said_of_damping(wanted: Method, chosen: Method, kind: str, fitted: bool) -> list[str]:
    if not isinstance(chosen, Damped):
        return []
    if fitted:
        return [
            f"fisher true and λ = {chosen.damping:.3g}, that of the L2 regularization the model is fitted with"
        ]
    if getattr(wanted, "damping", None) != AUTO:
        return []
    return [f"damping {chosen.damping:g} ({chosen.name}, {kind or 'other tasks'})"]


def _wanted(
    method: str | Method,
    named: str | None,
    sizes: IndexSizes,
    kind: str,
    weighed: bool,
    before: dict[str, Any] | None,
) -> Method:
    """The method, with the projection that was named beside it or in it."""
    if method == AUTO and before is not None:
        recorded = methods.parse(before)
        return (
            recorded if named is None else methods.with_projection(replace(recorded, projection=None), named)
        )
    if method == AUTO:
        name = CHOICES.get(kind, DEFAULT_METHOD)
        whole = named is not None and Spec.parse(named).kind not in MATRICES
        mixing = sizes.parameters <= SMALL or (name == "ekfac" and (whole or weighed))
        method = METHODS[_MIXING if mixing else name]()
    wanted = methods.parse(method)
    if named is not None and wanted.projection not in (None, named):
        raise UndeError(
            f"projection {named!r} with {wanted}, which names another: give one of the two, or projection='auto' "
            "with the method's own"
        )
    return wanted if named is None else methods.with_projection(wanted, named)


@dataclass(frozen=True)
class _Budget:
    """Bytes on disk: the option, or what is `free`."""

    disk: int
    free: bool = False

    def __str__(self) -> str:
        return f"{size(self.disk)} free" if self.free else f"disk={_option(self.disk)}"


@dataclass(frozen=True)
class _Search:
    """The search for features of a method."""

    method: Method
    sizes: IndexSizes
    kind: str
    weighed: bool
    budget: _Budget

    def first(self) -> tuple[Method, str]:
        """The method with the first features that fit, and what to say about them."""
        tried = list[IndexFiles]()
        for projection in self._candidates():
            files = self.sizes.files(methods.for_building(self.method, self.kind, projection=projection))
            if self._fits(files, self.budget.disk):
                hint = self._hint(tried)
                return files.method, f"projection {projection}: {size(files.total)} of {self.budget}{hint}"
            tried.append(files)
        raise self._nothing(min(tried, key=lambda files: files.total))

    def _candidates(self) -> Iterator[str]:
        sizes = self.sizes
        if not isinstance(self.method, (TracIn, EKFAC)) or self.weighed or self.kind == "diffusion":
            yield default_projection(sizes.model, sizes.names)
            return
        adapters = any("lora_" in name for name in sizes.names)
        if adapters or sizes.parameters <= WHOLE_MOST:
            yield "none"
        if sizes.store_dtype == factored.AUTO:
            yield from (f"factored({c})" for c in RANKS)
        if not adapters:
            yield from (f"kron({r})" for r in SIDES)

    def _fits(self, files: IndexFiles, disk: int) -> bool:
        return files.features <= disk and files.total <= disk and self._fits_memory(files)

    def _fits_memory(self, files: IndexFiles) -> bool:
        bounded = isinstance(self.method, (TracIn, EKFAC))  # other kernels have forms for little memory
        return not bounded or self.sizes.memory_of(files) <= max(LEAST, self.sizes.memory)

    def _hint(self, tried: list[IndexFiles]) -> str:
        """What twice the disk would give, or more memory, of what did not fit."""
        more = replace(self.budget, disk=2 * self.budget.disk)
        for files in tried:
            if self._fits(files, more.disk):
                return f" (with {more}: {files.method.projection})"
        for files in tried:
            if files.features <= self.budget.disk and files.total <= self.budget.disk:
                memory = _option(self.sizes.memory_of(files), up=True)
                return f" (with memory={memory}: {files.method.projection})"
        return ""

    def _nothing(self, files: IndexFiles) -> UndeError:
        total, memory = files.total, self.sizes.memory_of(files)
        need = [f"disk={_option(total, up=True)}"] if total > self.budget.disk else []
        need += [] if self._fits_memory(files) else [f"memory={_option(memory, up=True)}"]
        return UndeError(
            f"no features of {self.method.name or type(self.method).__name__} fit {self.budget} and "
            f"memory={_option(self.sizes.memory)}: the smallest, {files.method.projection!r}, take {size(total)} for "
            f"{self.sizes.examples:,} examples and {self.sizes.parameters:,} parameters. Give {' and '.join(need)}, or "
            "name a smaller projection, such as 'kron(4)', which disk= does not bound"
        )


def _check_whole(method: Method, sizes: IndexSizes, folder: StorePath | None) -> None:
    """Raise where whole gradients fit neither memory nor disk."""
    projection = str(method.projection)
    if Spec.parse(projection).kind not in WHOLE:
        return
    gradient, memory = 4 * sizes.parameters, max(LEAST, sizes.memory)
    free, total = free_bytes(folder), sizes.files(method).total
    if gradient <= memory and (free is None or total <= free):
        return
    others = replace(sizes, store_dtype=factored.AUTO)
    one, kron = (
        f"{p!r} takes {size(others.files(replace(method, projection=p)).total)}"
        for p in ("factored(1)", "kron(16)")
    )
    if gradient > memory:
        why = (
            f"one has {sizes.parameters:,} numbers, {size(gradient)} in float32, and the memory budget is "
            f"{size(sizes.memory)}. {kron}; memory={_option(gradient, up=True)} is enough for whole gradients, of "
            f"which {one}"
        )
    else:
        why = f"{folder} has {size(free or 0)} free. {one}, {kron}"
    raise UndeError(
        f"projection {projection!r} takes {size(total)} for {sizes.examples:,} whole gradients, but {why}"
    )


def free_bytes(folder: StorePath | None) -> int | None:
    """Free bytes of the file system that a folder is on, or will be; None where nothing can be said."""
    if folder is None or not is_local(folder):
        return None
    where = folder.absolute()
    while not where.exists() and where != where.parent:
        where = where.parent
    try:
        return shutil.disk_usage(str(where)).free
    except OSError:
        return None


def _option(count: int, up: bool = False) -> str:
    """Bytes as one gives them, rounded `up` to two digits.

    >>> _option(20 * 10**9), _option(1_234_567_890, up=True)
    ("'20GB'", "'1.3GB'")
    """
    if up:
        step = 10 ** max(0, math.floor(math.log10(max(1, count))) - 1)
        count = -(-count // step) * step
    return repr(size(count).replace(" ", ""))


# --- small models: they can afford whole gradients under any kernel, and the right curvature ------------------


def default_projection(model: nn.Module, names: Sequence[str] | None = None) -> str:
    """Features of methods that mix them: "none" for small models, and where kron(16) would not keep much less; else
    kron(16). `names` are those of the parameters.

    >>> default_projection(nn.Linear(64, 10)), default_projection(nn.Linear(512, 512))
    ('none', 'kron(16)')
    """
    shapes = dict(model.named_parameters())
    names = trainable(model) if names is None else names
    whole, projected = (
        sum(feature_size(Spec.parse(p), tuple(shapes[n].shape)) for n in names) for p in ("none", PROJECTION)
    )
    return "none" if whole <= SMALL or whole <= FACTOR * projected else PROJECTION


def regularized(method: Method, inputs: BuildInputs, names: Sequence[str]) -> Damped | None:
    """The method with the true Fisher matrix and the λ of a small model at its minimum, if it leaves both open."""
    if not isinstance(method, Damped) or inputs.checkpoints is not None or method.measure != "loss":
        return None
    if method.damping != "auto" or getattr(method, "fisher", "") not in ("auto", "true"):
        return None
    decay = weight_decay(inputs.model, inputs.task, inputs.rows, names)
    if decay is None:
        return None
    damping = decay / (len(inputs.rows) if method.per_example else 1)
    return replace(method, damping=damping, relative=False, fisher="true")


def weight_decay(model: nn.Module, task: Task, rows: Rows, names: Sequence[str]) -> float | None:
    """λ of the L2 regularization that a small model is at the minimum of, as an addition to the sum of all losses.

    At such a minimum Σ_n g_n = −λ θ. None where the gradients of matrices do not point there, or the model is not
    small, or has too many labels: then nothing is known about λ.
    """
    parameters = [p for n, p in model.named_parameters() if n in set(names)]
    count = sum(p.numel() for p in parameters)
    decayed = [p for p in parameters if p.dim() > 1]
    if count > SMALL or not decayed:
        return None
    with suppress(UndeError, *FAILURES):  # the build that follows says what is wrong, and with which example
        total = _sum_gradients(model, task, rows, parameters, decayed)
        if total is not None:
            theta = torch.cat([p.detach().flatten().cpu().double() for p in decayed])
            along, norms = -float(total @ theta), float(total.norm() * theta.norm())
            return along / float(theta @ theta) if norms > 0 and along >= STATIONARY * norms else None
    return None


def _sum_gradients(
    model: nn.Module, task: Task, rows: Rows, parameters: list[nn.Parameter], decayed: list[nn.Parameter]
) -> Tensor | None:
    """Summed gradients of all examples; None where fisher="true" is not for this task."""
    device, count = parameters[0].device, sum(p.numel() for p in parameters)
    with frozen_eval(model):
        with torch.no_grad(), program_default():
            labels = task.outputs(model, to_device(rows.batch([0]), device))
        if labels is None or labels > MOST_LABELS or 4 * len(rows) * labels * count > DISK:
            return None
        for p in parameters:
            p.requires_grad_(True)
        total = [torch.zeros_like(p, dtype=torch.float64, device=double_device(p.device)) for p in decayed]
        for start in range(0, len(rows), _BATCH):
            batch = to_device(rows.batch(range(start, min(start + _BATCH, len(rows)))), device)
            with program_default():
                loss = task.loss(model, batch).sum()
            grads = torch.autograd.grad(loss, decayed, allow_unused=True)
            for sum_, g in zip(total, grads):
                if g is not None:
                    sum_ += g.to(sum_.device)
    return torch.cat([t.flatten().cpu() for t in total])
