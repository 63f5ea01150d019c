"""Products with int8 of whole numbers: as near to the exact ones as those of float32, whatever is large or small."""

import pytest
import torch

from unde import onednn as products
from unde.store import dequantize as packed
from unde.store import limbs
from unde.store.codec import Int8, codec
from unde.store.dequantize import Packed
from unde.store.limbs import Factor, nbytes

SIZES = [300, 70, 1, 129]
STARTS = [sum(SIZES[:i]) for i in range(len(SIZES) + 1)]
COLUMNS = [slice(a, b) for a, b in zip(STARTS, STARTS[1:])]
WIDTH = STARTS[-1]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Products are right without instructions for them too, if slow."""
    monkeypatch.setattr(limbs, "_WIDE", 1)
    monkeypatch.setattr(limbs, "_FEW", 10**6)
    if not limbs._exact():
        monkeypatch.setattr(limbs, "_exact", lambda: limbs._exact_of(30, 300, 40))


def drawn(rows: int, seed: int, spread: float = 0.0) -> torch.Tensor:
    """Entries of each parameter are of a size of their own, and so are rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=g)
    for c in COLUMNS:
        x[:, c] *= torch.exp2(spread * torch.randn(rows, 1, generator=g))
    return x


def block(rows: int = 200, spread: float = 0.0, features: torch.Tensor | None = None) -> Packed:
    features = drawn(rows, 1, spread) if features is None else features
    return Packed(Int8(), COLUMNS, Int8().pack(features, COLUMNS))


def twin(queries: torch.Tensor, rows: Packed) -> torch.Tensor:
    return queries.double() @ Int8().unpack(rows.shard, COLUMNS).double().T


def tolerance(queries: torch.Tensor, rows: Packed) -> torch.Tensor:
    """Of what queries are rounded by, and of sums of parameters in float32."""
    x, q = Int8().unpack(rows.shard, COLUMNS).double().abs(), queries.double().abs()
    by = torch.zeros(len(q), len(x), dtype=torch.float64)
    for c in COLUMNS:
        by += (2.0**-23 * q[:, c] + 2.0**-24 * q[:, c].amax(1, keepdim=True)) @ x[:, c].T
    return by + 2.0**-21 * sum((q[:, c] @ x[:, c].T for c in COLUMNS), torch.zeros(()))


def product(
    queries: torch.Tensor, rows: Packed, some: slice | None = None, add: bool = False
) -> torch.Tensor:
    some = some or slice(0, len(queries))
    factor = Factor(queries, COLUMNS)
    assert factor.limbs is not None
    out = torch.full((some.stop - some.start, len(rows)), 1.0 if add else float("nan"))
    factor.multiply(out, some, rows, add)
    return out


@pytest.mark.parametrize("spread", [0.0, 10.0])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_products_are_near_to_exact_ones(queries, spread, monkeypatch):
    monkeypatch.setattr(limbs, "_ROWS", 64)
    monkeypatch.setattr(limbs, "_SUMS", 3 * 3 * 64)  # several parameters together for few queries
    q, rows = drawn(queries, 2, spread), block(200, spread)
    off = (product(q, rows).double() - twin(q, rows)).abs()
    assert (off <= tolerance(q, rows)).all()


def test_no_further_from_them_than_float32():
    q, rows = drawn(100, 2), block(500)
    float32 = q @ Int8().unpack(rows.shard, COLUMNS).T
    exact = twin(q, rows)
    ours, theirs = ((found.double() - exact).square().mean() for found in (product(q, rows), float32))
    assert ours <= 1.5 * theirs


def test_extremes_of_both_sides():
    """Every number ±127, every limb at its end, and rows long enough for sums beyond 16 bits, and 24."""
    rows = block(features=torch.where(drawn(64, 3) > 0, 1.0, -1.0))
    assert rows.shard["features"].abs().min() == 127
    for q in (torch.ones(4, WIDTH), -torch.ones(4, WIDTH), torch.where(drawn(4, 4) > 0, 1.0, -1.0)):
        q[1] *= 1 - 2.0**-16
        assert ((product(q, rows).double() - twin(q, rows)).abs() <= tolerance(q, rows)).all()


def test_long_parameters_are_cut(monkeypatch):
    monkeypatch.setattr(limbs, "_COLUMNS", 100)
    q, rows = drawn(3, 2), block()
    made = Factor(q, COLUMNS).limbs
    assert made is not None and [u for u, _ in made.units] == [0, 0, 0, 1, 2, 3, 3]
    assert ((product(q, rows).double() - twin(q, rows)).abs() <= tolerance(q, rows)).all()


@pytest.mark.parametrize("queries", [1, 7, 40])
def test_rows_and_queries_may_be_cut_anywhere(queries, monkeypatch):
    """The same bits, however many are multiplied together."""
    q, rows = drawn(queries, 2), block(200)
    whole = product(q, rows)
    assert torch.equal(product(q, rows, slice(queries // 3, queries)), whole[queries // 3 :])
    for start, stop in ((0, 1), (3, 20), (33, 170), (199, 200)):
        assert torch.equal(product(q, rows[start:stop]), whole[:, start:stop])
    monkeypatch.setattr(limbs, "_ROWS", 24)
    for sums in (1, 3 * queries * 24 * 2):  # parameter by parameter, two at a time
        monkeypatch.setattr(limbs, "_SUMS", sums)
        assert torch.equal(product(q, rows), whole)
    torch.testing.assert_close(product(q, rows, add=True), whole + 1, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [2.0**-80, 1.0, 2.0**80])
def test_sizes_of_queries_and_rows_far_apart(size):
    q, rows = drawn(3, 2) * size, block(features=drawn(50, 1) / size)
    q[1] = 0
    q[2, COLUMNS[0]] = 0
    found = product(q, rows)
    assert not found[1].any()
    assert ((found.double() - twin(q, rows)).abs() <= tolerance(q, rows)).all()


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), 2.0**100, 2.0**-100])
def test_queries_that_are_out_of_range_are_multiplied_in_float32(entry):
    q, rows = drawn(3, 2), block()
    q[1, COLUMNS[2]] = entry  # the one column of a parameter
    factor = Factor(q, COLUMNS)
    assert factor.limbs is None
    out = torch.empty(3, len(rows))
    factor.multiply(out, slice(0, 3), rows, add=False)
    want = q @ Int8().unpack(rows.shard, COLUMNS).T
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_other_stores_are_multiplied_in_float32(monkeypatch):
    monkeypatch.setattr(packed, "_FEWEST", 512)
    q, features = drawn(3, 2), drawn(50, 1)
    factor, out = Factor(q, COLUMNS), torch.empty(2, 50)
    half = codec("float16")
    rows = Packed(half, COLUMNS, half.pack(features, COLUMNS))
    for stored, plain in ((rows, half.unpack(rows.shard, COLUMNS)), (features, features)):
        factor.multiply(out, slice(1, 3), stored, add=False)
        assert torch.equal(out, q[1:] @ plain.T)
        factor.multiply(out, slice(1, 3), stored, add=True)
        assert torch.allclose(out, 2 * (q[1:] @ plain.T))
    assert "limbs" not in factor.__dict__  # nobody has asked for them
    assert nbytes(half, COLUMNS, 50, 3, 3) == (0, 0)


@pytest.mark.skipif(not products.available(), reason="torch was built without oneDNN")
def test_float32_by_the_faster_library(monkeypatch):
    monkeypatch.setattr(products, "_LEAST", 0)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    q, features = drawn(5, 2), drawn(50, 1)
    exact, out = q.double() @ features.double().T, torch.full((3, 80), float("nan"))
    Factor(q, COLUMNS).multiply(out[:, 20:70], slice(1, 4), features, add=False)
    torch.testing.assert_close(out[:, 20:70].double(), exact[1:4], rtol=1e-5, atol=1e-4)
    Factor(q, COLUMNS).multiply(out[:, 20:70], slice(1, 4), features, add=True)
    torch.testing.assert_close(out[:, 20:70].double(), 2 * exact[1:4], rtol=1e-5, atol=1e-4)
    assert out[:, :20].isnan().all() and out[:, 70:].isnan().all()


@pytest.mark.skipif(not products.available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("together", [1, 3, 7, 8])
def test_unpacked_rows_are_multiplied_with_some_queries_after_others(together, monkeypatch):
    monkeypatch.setattr(products, "_LEAST", 0)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(limbs, "_FEW", 0)
    monkeypatch.setattr(limbs, "_together", lambda: together)
    monkeypatch.setattr(packed, "_FEWEST", 16)
    monkeypatch.setattr(packed, "MOST", 0)
    q, rows = drawn(8, 2), block(50)
    out = torch.full((7, 50), 1.0)
    for times in (1, 2):
        Factor(q, COLUMNS).multiply(out, slice(1, 8), rows, add=times == 2)
        torch.testing.assert_close(out.double(), times * twin(q, rows)[1:], rtol=1e-5, atol=1e-4)


def test_processors_that_cut_sums_are_found_out(monkeypatch):
    """As those that add pairs of products in 16 bits."""

    def saturating(a, b):
        pairs = torch.stack([a[:, k::2].int() @ b[k::2].int() for k in range(2)])
        return pairs.clamp(-(2**15), 2**15 - 1).sum(0)

    assert limbs._exact_of(3, 256, 60)
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not limbs._exact_of(3, 256, 60)


def test_without_instructions_for_them_products_are_those_of_float32(monkeypatch):
    monkeypatch.setattr(limbs, "_exact", lambda: False)
    assert Factor(drawn(3, 2), COLUMNS).limbs is None
    assert nbytes(Int8(), COLUMNS, 50, 3, 3) == (0, 0)


def test_many_queries_are_multiplied_in_float32(monkeypatch):
    monkeypatch.setattr(limbs, "_FEW", 4)
    q, rows = drawn(4, 2), block()
    assert Factor(q, COLUMNS).limbs is None and Factor(q[:3], COLUMNS).limbs is not None
    assert nbytes(Int8(), COLUMNS, 50, 4, 4) == (0, 0)
    out = torch.empty(4, len(rows))
    Factor(q, COLUMNS).multiply(out, slice(0, 4), rows, add=False)
    torch.testing.assert_close(out.double(), twin(q, rows), rtol=1e-5, atol=1e-4)


def test_bytes(monkeypatch):
    monkeypatch.setattr(limbs, "_ROWS", 64)
    monkeypatch.setattr(limbs, "_SUMS", 1000)
    made = Factor(drawn(40, 2), COLUMNS).limbs
    assert made is not None
    of_limbs = sum(x.nbytes for x in made.limbs)
    assert nbytes(Int8(), COLUMNS, 200, 40, 40) == (of_limbs, 8 * 3 * 40 * 64)
    assert nbytes(Int8(), COLUMNS, 50, 40, 2) == (of_limbs, 8 * 3 * 2 * 50 * 3)  # of three parameters
