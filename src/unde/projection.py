"""Random projections of gradients: one per parameter, unbiased, the same on every device.

Every parameter is seen as a matrix of R rows and C columns (its first dimension by the rest). A projection
P maps its gradient to a short feature vector with E⟨P g, P h⟩ = ⟨g, h⟩ whatever R and C are, so features of
all parameters share one scale and learned weights need not undo the projection.

    none        the gradient itself
    factored(c) the gradient itself, of which an index stores c outer products. EKFAC whitens it first, and spends the
                bytes of c of each matrix on those products of any matrix that keep most energy
    kron(r)     two-sided, A G Bᵀ with A (r × R) and B (r × C): needs only the two factors of G, never G
    sjlt(k)     sparse Johnson–Lindenstrauss: every coordinate goes to one of k buckets with a random sign
    dense(k)    k full random directions, entries normal or Rademacher

A parameter that has no more entries than its feature would have passes unprojected. The random numbers are
drawn with a counter-based generator keyed by (seed, parameter name, side, version); the seed of each further
checkpoint of an index is derived from that of the index (`checkpoint_seed`). Whitening turns
both sides of a gradient by orthogonal matrices (`rows`, `cols`) that are given.

A `scale` multiplies the gradient entry by entry before it is projected (second moments of an optimiser).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.onednn import times

VERSION = 1  # raise when the numbers drawn for a given key change: indexes of another version are refused
KINDS = ("none", "factored", "kron", "sjlt", "dense")
WHOLE = ("none", "factored")  # features are gradients, entry for entry
MATRICES = (*WHOLE, "kron")  # features of matrices are matrices
MOST_FACTORS = 64  # outer products of a matrix: the largest c of factored(c)
DENSE_LIMIT = 2**31  # bytes of one dense matrix


@dataclass(frozen=True)
class Spec:
    """A parsed short name.

    >>> Spec.parse("kron(16)")
    Spec(kind='kron', size=16, law='rademacher')
    >>> str(Spec.parse("dense(512, normal)"))
    'dense(512, normal)'
    """

    kind: str
    size: int = 0
    law: str = "rademacher"

    @classmethod
    def parse(cls, text: str | Spec) -> Spec:
        if isinstance(text, Spec):
            return text
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*(?:,\s*(\w+)\s*)?\))?\s*", text)
        if match is None:
            raise UndeError(
                f"cannot read projection {text!r}: expected 'none', 'factored(4)', 'kron(16)' or 'sjlt(4096)'"
            )
        kind, size, law = match[1], int(match[2] or 0), match[3] or "rademacher"
        if kind not in KINDS:
            raise unknown("projection", kind, KINDS)
        if law not in ("rademacher", "normal") or (match[3] and kind != "dense"):
            raise UndeError(
                f"projection {text!r}: only 'dense(k, normal)' and 'dense(k, rademacher)' name a law"
            )
        if kind == "factored" and not 1 <= size <= MOST_FACTORS:
            raise UndeError(
                f"projection {text!r}: expected 1 to {MOST_FACTORS} outer products, as in 'factored(4)'; 'none' keeps "
                "whole gradients"
            )
        if (size < 1) != (kind == "none"):
            raise UndeError(f"projection {text!r}: expected 'none' or a size of at least 1, as in 'kron(16)'")
        return cls(kind, size, law)

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        law = f", {self.law}" if self.kind == "dense" else ""
        return f"{self.kind}({self.size}{law})"


class Projection:
    """The projection of one parameter's gradient, seen as a matrix of `shape[0]` by the rest.

    `factored` ones act on rows and columns apart (`rows`, `cols`); the others need the gradient (`flat`).

    >>> p = Projection("kron(2)", "layer.weight", (3, 5), seed=0)
    >>> g = torch.randn(4, 3, 5)                      # four examples
    >>> torch.allclose(p(g), (p.rows(p.cols(g).mT)).mT.flatten(1))
    True
    """

    def __init__(
        self,
        spec: Spec | str,
        name: str,
        shape: tuple[int, ...],
        seed: int = 0,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`given` may hold "rows/<name>" and "cols/<name>" (turns of whitening), and "scale/<name>"."""
        spec, given = Spec.parse(spec), given or {}
        self.R = shape[0] if len(shape) > 1 else 1
        self.C = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
        self._kernel = len(shape) > 2
        self._rows: Tensor | None = None  # (r, R); None is the identity
        self._cols: Tensor | None = None  # (r, C)
        self._flat: Tensor | None = None  # (size, R·C)
        self._buckets: tuple[Tensor, Tensor] | None = None  # of each entry, and its sign
        scale = given.get(f"scale/{name}")
        self._scale = None if scale is None else scale.reshape(1, -1)  # (1, R·C)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._turns = (
            spec.kind != "factored"
        )  # bases of whitening are large, and may be mapped from their file
        numel, self.size = self.R * self.C, feature_size(spec, shape)
        self._taps: Tensor | None = None  # (channels, channels), turns the input channels of a kernel
        if spec.kind == "factored":
            self._rows, self._cols = given.get(f"rows/{name}"), given.get(f"cols/{name}")
            if self._cols is not None and len(self._cols) != self.C:
                self._taps, self._cols = self._cols, None
        if self.size == numel:
            return
        if spec.kind == "kron" and len(shape) > 1:
            r = spec.size
            self._rows = _signs(seed, name, "rows", r, self.R) if self.R > r else None
            self._cols = _signs(seed, name, "cols", r, self.C) if self.C > r else None
        elif spec.kind == "dense":
            if 4 * self.size * numel > DENSE_LIMIT:
                raise UndeError(
                    f"projection {spec} of parameter {name!r} ({numel:,} entries) would need a matrix of "
                    f"{4 * self.size * numel / 2**30:.1f} GiB: use 'sjlt({spec.size})' or 'kron(16)'"
                )
            draw = _normal if spec.law == "normal" else _signs
            self._flat = draw(seed, name, "flat", self.size, numel)
        else:
            self._buckets = _buckets(seed, name, self.size, numel)

    @property
    def factored(self) -> bool:
        return self._flat is None and self._buckets is None and self._scale is None

    @property
    def row_matrix(self) -> Tensor | None:
        return self._rows

    @property
    def col_matrix(self) -> Tensor | None:
        return self._cols

    @property
    def tap_matrix(self) -> Tensor | None:
        return self._taps

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        held = (self._rows, self._cols, self._flat, self._scale, self._taps, *(self._buckets or ()))
        return [t for t in held if t is not None]

    def to(self, device: torch.device, dtype: torch.dtype) -> Projection:
        """Rows and columns are laid out as they are multiplied and looked up, transposed; those of a kernel stay, as
        convolutions take them."""
        self.device, self.dtype = device, dtype
        for side in ("_rows", "_cols", "_flat", "_scale", "_taps"):
            matrix = getattr(self, side)
            if matrix is not None:
                turned = self._turns and (side == "_rows" or (side == "_cols" and not self._kernel))
                matrix = matrix.to(device, dtype)
                setattr(self, side, matrix.T.contiguous().T if turned else matrix)
        if self._buckets is not None:
            self._buckets = self._buckets[0].to(device), self._buckets[1].to(device, dtype)
        return self

    def rows(self, x: Tensor) -> Tensor:  # (..., R) → (..., r)
        return x if self._rows is None else times(x.to(self._rows.dtype), self._rows)

    def cols(self, x: Tensor) -> Tensor:  # (..., C) → (..., r)
        if self._taps is not None:
            channels = x.unflatten(-1, (len(self._taps), -1)).to(self._taps.dtype)
            return (self._taps @ channels).flatten(-2)
        return x if self._cols is None else times(x.to(self._cols.dtype), self._cols)

    def flat(self, g: Tensor) -> Tensor:  # (B, R·C) → (B, size)
        if self._scale is not None:
            g = g.to(self._scale.dtype) * self._scale
        if self._buckets is not None:
            bucket, sign = self._buckets
            return sign.new_zeros(len(g), self.size).index_add_(1, bucket, g.to(sign.dtype) * sign)
        if self._flat is None:
            return self._two_sided(g.reshape(-1, self.R, self.C))
        return g.to(self._flat.dtype) @ self._flat.T

    def __call__(self, gradient: Tensor) -> Tensor:
        """Project whole gradients, (B, R, C) or (B, *shape) → (B, size)."""
        if not self.factored:
            return self.flat(gradient.flatten(1))
        return self._two_sided(gradient.reshape(-1, self.R, self.C))

    def back(self, features: Tensor) -> Tensor:
        """Pᵀ, (B, size) → (B, R·C): ⟨P g, f⟩ = ⟨g, back(f)⟩."""
        if self._buckets is not None:
            g = features[:, self._buckets[0]] * self._buckets[1]
        elif self._flat is not None:
            g = (self._flat.mT @ features.T).T
        else:
            r = self.R if self._rows is None else len(self._rows)
            g = features.unflatten(1, (r, -1))
            g = g if self._rows is None else self._rows.T @ g
            g = (g if self._cols is None else g @ self._cols).flatten(1)
            if self._taps is not None:
                g = (self._taps.T @ g.unflatten(1, (self.R, len(self._taps), -1))).flatten(1)
        return g if self._scale is None else g * self._scale

    def _two_sided(self, g: Tensor) -> Tensor:  # (B, R, C) → (B, size)
        g = self.cols(g)  # (B, R, c)
        if self._rows is not None:
            g = self._rows.to(g.dtype) @ g
        return g.flatten(1)


def feature_size(spec: Spec, shape: tuple[int, ...]) -> int:
    """How long the feature of a parameter is.

    >>> feature_size(Spec.parse("kron(16)"), (8, 100)), feature_size(Spec.parse("sjlt(64)"), (8, 100))
    (128, 64)
    """
    numel = math.prod(shape)
    most = spec.size**2 if spec.kind == "kron" else spec.size
    if spec.kind in WHOLE or numel <= most:
        return numel
    if spec.kind == "kron" and len(shape) > 1:
        return math.prod(two_sides(spec, shape))
    return most


def two_sides(spec: Spec, shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns (r, c) of the feature of a matrix under a projection that keeps it a matrix."""
    rows, cols = shape[0], math.prod(shape[1:])
    if spec.kind in WHOLE or rows * cols <= spec.size**2:
        return rows, cols
    return min(rows, spec.size), min(cols, spec.size)


def checkpoint_seed(seed: int, checkpoint: int) -> int:
    """The seed of the projections under a checkpoint, so that the errors of several average out; `seed` for the first.

    >>> checkpoint_seed(7, 0), checkpoint_seed(7, 1) == checkpoint_seed(7, 2)
    (7, False)
    """
    if checkpoint == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\0{checkpoint}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _generator(seed: int, name: str, side: str) -> np.random.Philox:
    key = hashlib.blake2b(f"{VERSION}\0{seed}\0{name}\0{side}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(key, "little"))


def _raw(seed: int, name: str, side: str, count: int) -> np.ndarray:
    return _generator(seed, name, side).random_raw(count).astype("<u8", copy=False)


def _signs(seed: int, name: str, side: str, size: int, n: int) -> Tensor:
    """Rademacher entries ±1/√size: E[PᵀP] = I, with less variance than a normal matrix."""
    words = _raw(seed, name, side, -(-size * n // 64))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: size * n].reshape(size, n)
    return torch.from_numpy((1.0 - 2.0 * bits).astype(np.float32)) / math.sqrt(size)


def _normal(seed: int, name: str, side: str, size: int, n: int) -> Tensor:
    half = -(-size * n // 2)
    u = (_raw(seed, name, side, 2 * half) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log1p(-u[:half])), 2.0 * np.pi * u[half:]  # Box–Muller
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: size * n]
    return torch.from_numpy(draws.reshape(size, n).astype(np.float32)) / math.sqrt(size)


def _buckets(seed: int, name: str, size: int, n: int) -> tuple[Tensor, Tensor]:
    """The bucket and the sign of each of n entries."""
    words = _raw(seed, name, "buckets", n)
    sign = torch.from_numpy(1.0 - 2.0 * (words & np.uint64(1)).astype(np.float32))
    bucket = torch.from_numpy(((words >> np.uint64(1)) % np.uint64(size)).astype(np.int64))
    return bucket, sign
