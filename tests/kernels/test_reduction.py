"""Rounds of a kernel: the moments that they make, and what their jobs read."""

import weakref
from dataclasses import replace

import pytest
import torch

from unde import methods
from unde.kernels import ParameterColumns, TensorSource
from unde.kernels.base import compute_moments, read

ROWS, WIDTH, CUT = 300, 60, 20


class Counted(TensorSource):
    """Notes what is read of it."""

    rows = 0

    def block(self, s):
        found = super().block(s)
        self.rows += len(found)
        return found


def source():
    made = torch.Generator().manual_seed(0)
    parts = [
        ParameterColumns("a.weight", slice(0, 42), (6, 7)),
        ParameterColumns("a.bias", slice(42, 48)),
        ParameterColumns("b.weight", slice(48, 60)),
    ]
    sides = {"a.weight": tuple(torch.randn(40, n, generator=made) for n in (6, 7))}
    cuts = [slice(a, a + CUT) for a in range(0, ROWS, CUT)]
    squares = {name: tuple(m.T @ m for m in pair) for name, pair in sides.items()}
    return Counted(torch.randn(ROWS, WIDTH, generator=made), parts, cuts, squares)


@pytest.mark.parametrize(
    "joined", [1, 3, 100]
)  # blocks that are read together: as many jobs as may be, five, one
@pytest.mark.parametrize(
    "method",
    [
        methods.TRAK(projection="none", form="primal"),
        methods.TRAK(projection="none", form="dual"),
        methods.LoGRA(projection="none"),
        methods.EKFAC(projection="none"),
    ],
    ids=lambda method: method.name + getattr(method, "form", ""),
)
def test_moments_have_the_shapes_that_a_kernel_names(method, joined, monkeypatch):
    monkeypatch.setattr("unde.kernels.base.JOINED", 4 * WIDTH * CUT * joined)
    at = source()
    bound = method.kernel.bind(at.sizes)
    moments, named = compute_moments(bound, at), bound.needs().moments
    assert {k: (t.shape, t.dtype) for k, t in moments.items()} == {
        k: (t.shape, t.dtype) for k, t in named.items()
    }


def test_joined_blocks_are_read_in_order():
    at = source()
    assert torch.equal(read(at, [3, 4, 5]), at.features[60:120])
    assert read(at, [3]).data_ptr() == at.features[60:].data_ptr()  # one alone is handed on as it is


class Watched(Counted):
    """Whoever reads a block must have let go of the one before."""

    last = None

    def block(self, s):
        assert self.last is None or self.last() is None
        found = super().block(s).clone()
        self.last = weakref.ref(found)
        return found


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("name", ["trak", "logra", "ekfac"])
def test_a_job_has_one_block_in_hand(name, together, monkeypatch):
    monkeypatch.setattr("unde.kernels.base.JOINED", 4 * WIDTH * CUT * together)
    monkeypatch.setattr("unde.kernels.base.JOBS", 1)
    monkeypatch.setattr("unde.kernels.trak.SMALL", 0)  # float32: features are multiplied as they are
    made, moments = source(), {}
    at = Watched(made.features, made.sizes.parts, made.sizes.cuts, made._factors)
    options = {"form": "primal"} if name == "trak" else {}
    for r in replace(methods.parse(name), projection="none", **options).kernel.bind(at.sizes).rounds:
        moments |= r.finish(r.job(at, 0, moments))
    assert at.rows == ROWS
