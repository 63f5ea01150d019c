"""The interface of kernels: bound to a layout of features, fitted in rounds, applied to rows.

    kernel.bind(layout)           → BoundKernel   which form, how many rounds, what it needs
    rounds of jobs                → moments       undamped sums over the features: saved, and good for any damping
    bound.fit(moments, source)    → Fitted        K with its damping
    fitted.apply(rows)            → K applied to (n, D) features

A round is a number of jobs; each reads a run of stored blocks and gives partial results, which are merged in an
order that depends on the number of jobs alone. So moments do not depend on who computed what, nor when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from unde.console import size
from unde.devices import CPU, put
from unde.errors import UndeError
from unde.tasks.base import describe, digest_json, is_builtin

Moments = Mapping[str, Tensor]
JOBS = 16  # of a round, at most
JOINED = 2**26  # bytes of float32 features that are worked on together, at least one block


@dataclass(frozen=True)
class ParameterColumns:
    """The columns of one parameter; `sides` are (r, c) where its feature is a sum of outer products (r × c) whose
    covariances were gathered; None for a side without one."""

    name: str
    columns: slice
    sides: tuple[int | None, int | None] | None = None

    @property
    def size(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def layer(self) -> str:
        """The module that holds the parameter: weight and bias of one layer make one block."""
        return self.name.rpartition(".")[0] or self.name


@dataclass(frozen=True)
class FeatureLayout:
    """Features in stored blocks: the rows of each, and the parameters whose columns they have."""

    parts: tuple[ParameterColumns, ...]
    cuts: tuple[slice, ...]
    dtype: torch.dtype = torch.float32
    rounding: float = 0.0  # of an entry as it is stored, relative and at most; 0 for float32
    labels: int = 1  # rows of each example
    lossy: bool = False  # whether stored values are too coarse for K g(n): K acts on the query side then
    whitened: bool = False  # whether features are (Λ + λ)^−1/2 Qᵀ g, as EKFAC needs them

    @property
    def examples(self) -> int:
        return self.cuts[-1].stop

    @property
    def width(self) -> int:
        return self.parts[-1].columns.stop

    def joined(self, first: int = 0, last: int | None = None) -> list[list[int]]:
        """Batches of neighbouring blocks that are read together."""
        out: list[list[int]] = []
        for s in range(first, len(self.cuts) if last is None else last):
            rows = self.cuts[s].stop - (self.cuts[out[-1][0]].start if out else 0)
            if out and 4 * self.width * rows <= JOINED:
                out[-1].append(s)
            else:
                out.append([s])
        return out

    def runs(self) -> list[list[list[int]]]:
        """The batches, dealt out to at most `JOBS` jobs of neighbours."""
        joined = self.joined()
        count = min(JOBS, len(joined))
        return [joined[len(joined) * i // count : len(joined) * (i + 1) // count] for i in range(count)]

    def rows(self, blocks: Sequence[int]) -> slice:
        return slice(self.cuts[blocks[0]].start, self.cuts[blocks[-1]].stop)


Whitening = Mapping[str, tuple[Tensor, float]]


class KernelSource(Protocol):
    """The features that a kernel is fitted to."""

    @property
    def sizes(self) -> FeatureLayout: ...

    @property
    def device(self) -> torch.device:
        """Where blocks come, moments are wanted, and K is applied."""
        ...

    def block(self, s: int) -> Tensor:
        """(n, D)"""
        ...

    def factors(self, s: int) -> Mapping[str, tuple[Tensor | None, Tensor | None]]:
        """Covariances of the two sides of the parameters that have them, summed over the rows of a block."""
        ...

    def whitening(self) -> Whitening:
        """Λ and λ of each parameter that whitened features were divided by."""
        ...


def read(source: KernelSource, blocks: Sequence[int]) -> Tensor:
    """Read neighbouring blocks into one tensor, one at a time."""
    if len(blocks) == 1:
        return source.block(blocks[0])
    sizes, rows = source.sizes, source.sizes.rows(blocks)
    out = torch.empty(rows.stop - rows.start, sizes.width, dtype=sizes.dtype, device=source.device)
    for s in blocks:
        out[sizes.cuts[s].start - rows.start : sizes.cuts[s].stop - rows.start] = source.block(s)
    return out


@dataclass(frozen=True)
class Round:
    """`job(source, i, before)` gives the partial result of job i, from the moments of earlier rounds; `finish` makes
    moments of the merged results. All of them are on the device of the source, float64 where that is computed."""

    name: str
    jobs: int
    job: Callable[[KernelSource, int, Moments], Moments]
    finish: Callable[[Moments], Moments] = dict


@dataclass(frozen=True)
class Needs:
    """Bytes that fitting holds at once, and the tensors of the moments file, on the meta device."""

    memory: int = 0
    moments: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self, memory: int, what: str, device: torch.device = CPU) -> None:
        if self.memory > memory:
            name = f"memory budget{'' if device == CPU else f' of {device}'}"
            raise UndeError(
                f"{what} {size(self.memory)}, the {name} is {size(memory)}: raise "
                f"{'memory=' if device == CPU else 'device_memory='}, or build with a smaller projection"
            )


def meta_tensor(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor with a shape and no content."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Fitted:
    """K, fitted to the features of `source`."""

    source: KernelSource

    def apply(self, rows: Tensor) -> Tensor:
        """K applied to features (n, D), in their precision and on their device, that of the source."""
        raise NotImplementedError

    def train(self, blocks: Sequence[int]) -> Tensor:
        """K g(n) of neighbouring blocks of the source."""
        return self.apply(read(self.source, blocks))


class BoundKernel(Protocol):
    """A kernel bound to features of known layout."""

    @property
    def key(self) -> str:
        """Key of its moments: kernels with equal keys share them."""
        ...

    @property
    def blocks(self) -> Sequence[Sequence[slice]] | None:
        """Columns that K mixes among themselves; None: all of them, and K g(n) is stored."""
        return None

    @property
    def rounds(self) -> Sequence[Round]:
        return ()

    def fit(self, moments: Moments, source: KernelSource) -> Fitted: ...

    def needs(self) -> Needs:
        return Needs()

    @property
    def described(self) -> str:
        """Subject and verb of a sentence about what fitting needs."""
        return f"the kernel {type(self).__name__} needs"

    def check(self, memory: int, device: torch.device = CPU) -> None:
        """Raise if the budget of a device does not hold what fitting needs."""
        self.needs().check(memory, self.described, device)


@dataclass(frozen=True)
class PerParameterKernel(BoundKernel):
    """A kernel that does not mix parameters, so that it acts on the query side."""

    sizes: FeatureLayout

    @property
    def blocks(self) -> Sequence[Sequence[slice]]:
        return [[p.columns] for p in self.sizes.parts]


class Kernel(Protocol):
    """A description of K that a method names; equal descriptions are equal kernels."""

    @property
    def fisher(self) -> str:
        """Labels of the gradients that it is fitted to: "empirical", "sampled" or "true"."""
        ...

    def bind(self, sizes: FeatureLayout) -> BoundKernel: ...


def add_partials(parts: Sequence[Callable[[], Moments]]) -> Moments:
    """Add up partial results in order, so that rounding depends on their number alone."""
    total = dict(parts[0]())
    for i, part in enumerate(parts[1:]):
        for name, value in part().items():
            if name not in total:
                total[name] = value
            elif i == 0:
                total[name] = total[name] + value  # the first may be a view of a file
            else:
                total[name] += value
    return total


def put_moments(moments: Moments, source: KernelSource) -> dict[str, Tensor]:
    """Moments where a kernel of `source` wants them."""
    return {name: put(value, source.device) for name, value in moments.items()}


def compute_moments(bound: BoundKernel, source: KernelSource) -> dict[str, Tensor]:
    """Run all rounds in memory."""
    moments: dict[str, Tensor] = {}
    for r in bound.rounds:
        before = put_moments(moments, source)
        parts = [lambda i=i, r=r, before=before: r.job(source, i, before) for i in range(r.jobs)]
        moments |= r.finish(add_partials(parts))
    return moments


def fit_kernel(kernel: Kernel, source: KernelSource) -> Fitted:
    """Fit a kernel to features in memory.

    >>> from unde.kernels import Gram, TensorSource
    >>> phi = torch.randn(6, 3, dtype=torch.float64)
    >>> K = fit_kernel(Gram(2.0, relative=False), TensorSource(phi, [ParameterColumns("weight", slice(0, 3))]))
    >>> torch.allclose(K.apply(phi), phi @ torch.linalg.inv(phi.T @ phi + 2 * torch.eye(3, dtype=torch.float64)))
    True
    """
    bound = kernel.bind(source.sizes)
    return bound.fit(put_moments(compute_moments(bound, source), source), source)


class TensorSource:
    """Features in memory as a source, in one block or in several."""

    def __init__(
        self,
        features: Tensor,
        parts: Sequence[ParameterColumns],
        cuts: Sequence[slice] | None = None,
        factors: Mapping[str, tuple[Tensor | None, Tensor | None]] | None = None,
    ) -> None:
        self.features, self._factors, self.device = features, factors or {}, features.device
        self.sizes = FeatureLayout(tuple(parts), tuple(cuts or [slice(0, len(features))]), features.dtype)

    def block(self, s: int) -> Tensor:
        return self.features[self.sizes.cuts[s]]

    def factors(self, s: int) -> Mapping[str, tuple[Tensor | None, Tensor | None]]:
        return self._factors if s == 0 else {}

    def whitening(self) -> Whitening:
        return {}


def chunks(source: KernelSource, run: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Read the features of a run, batch by batch."""
    return (read(source, blocks) for blocks in run)


def describe_kernel(kernel: Any, method: str = "") -> str:
    """Settings, and for a user's own kernel also its class and `version`, so that files of another one are not used.

    >>> from unde.kernels import Gram
    >>> describe_kernel(Gram(0.1))
    "Gram(damping=0.1, relative=True, form='auto', blocks='full', fisher='empirical', damping_scope='layer')"
    """
    kind = type(kernel)
    if is_builtin(kind):
        return repr(kernel)
    of = f" of the method {method}" if method else ""
    missing = [name for name in ("bind", "fisher") if not hasattr(kernel, name)]
    if missing:
        raise UndeError(
            f"the kernel{of} is a {kind.__name__} without {' and '.join(missing)}: expected one of unde.kernels, or an "
            "object that has what unde.kernels.Kernel names"
        )
    try:
        hash(kernel)
    except TypeError:
        raise UndeError(
            f"the kernel {kind.__name__}{of} cannot be hashed: write it as a @dataclass(frozen=True) of numbers and "
            "names"
        ) from None
    settings = digest_json([describe(kernel, kind.__module__), getattr(kernel, "version", 1)])
    return f"{kind.__module__}:{kind.__qualname__} {settings}"


def code_key(kernel: Any) -> str:
    """What tells the moments of a kernel of the user's own from those of another; "" for kernels of unde."""
    return "" if is_builtin(type(kernel)) else f" {describe_kernel(kernel)}"
