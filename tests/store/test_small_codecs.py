"""Features in a byte, and as a few outer products: against loops in NumPy, and singular values of torch."""

import itertools

import numpy as np
import pytest
import torch

from unde import UndeError
from unde.store import factored
from unde.store.codec import CODECS
from unde.store.factored import Factored, choose_ranks, codec_of, leading, sides_of

INT8 = CODECS["int8"]
SIZES = [3, 1, 64, 64, 65, 130, 256]  # one column, whole blocks, odd ones, and neighbours of one size


def columns_of(sizes):
    ends = np.cumsum(sizes).tolist()
    return [slice(b - n, b) for n, b in zip(sizes, ends)]


COLUMNS = columns_of(SIZES)


def wild(n=40):
    """Rows and parameters of all sizes that float32 has, zeros among them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, sum(SIZES), generator=g)
    for c in COLUMNS:
        x[:, c] *= torch.exp2(torch.randint(-140, 124, (n, 1), generator=g))
    x[3] = 0.0
    x[4, COLUMNS[2]] = 0.0
    x[5, :4] = torch.tensor([3.4028234663852886e38, -3.4e38, 1e-45, -1e-42])
    return x


def test_int8_entries_are_off_by_half_a_scale_at_most():
    x = wild()
    packed = INT8.pack(x, COLUMNS)
    back, scale = INT8.unpack(packed, COLUMNS), packed["scale"].double().numpy()
    decoded = packed["features"].double().numpy() * np.repeat(scale, SIZES, axis=1)
    assert np.array_equal(back.double().numpy(), decoded)
    largest = np.stack([x[:, c].abs().amax(1).double().numpy() for c in COLUMNS], 1)
    seen = largest > 2.0**-127  # half the smallest scale
    assert (scale[seen] >= np.maximum(largest / 127 * (1 - 2.0**-16), 2.0**-126)[seen]).all()
    assert (scale[seen] <= np.maximum(largest / 127 * (1 + 2.0**-15), 2.0**-126)[seen]).all()
    assert not scale[~seen].any()
    for u, c in enumerate(COLUMNS):
        off = (back[:, c].double() - x[:, c].double()).abs().numpy()
        assert (off <= 0.5 * (1 + 2.0**-15) * np.maximum(scale[:, u : u + 1], 2.0**-126)).all()
        assert off[largest[:, u] > 1e-30].max(1).mean() > 0  # it is not float32
    assert torch.equal(back[3], torch.zeros(sum(SIZES))) and not scale[3].any()
    assert torch.equal(back[4, COLUMNS[2]], torch.zeros(64))
    assert (
        sum(t.nbytes for t in packed.values())
        == INT8.nbytes(40, COLUMNS)
        == 40 * (sum(SIZES) + 4 * len(SIZES))
    )


def test_packed_again_it_is_the_same():
    packed = INT8.pack(wild(), COLUMNS)
    again = INT8.pack(INT8.unpack(packed, COLUMNS), COLUMNS)
    assert all(torch.equal(again[name], t) for name, t in packed.items())


SIDES = ((16, 16), None, (12, 20), (20, 12), (2, 3), (16, 16))
OF_SIDES = columns_of([256, 16, 240, 240, 6, 256])


def matrices(n, r, s, decay, seed=0):
    """With singular values 1, decay, decay², …"""
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, k, min(r, s), generator=g).double()).Q for k in (r, s))
    return (left * decay ** torch.arange(min(r, s)) @ right.mT).float()


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("sides", [(16, 16), (6, 20), (20, 6)])
def test_no_other_outer_products_come_closer(rank, decay, sides):
    """Eckart and Young: what is left has the singular values from the next one on. Equal ones are no trouble."""
    m = matrices(30, *sides, decay)
    left, right = leading(m, rank)
    off = (left @ right.mT - m).norm(dim=(1, 2)).double()
    best = torch.linalg.svdvals(m.double())[:, rank:].square().sum(1).sqrt()
    assert (off <= best * (1 + 1e-5) + 1e-6).all()
    assert (off >= best * (1 - 1e-5) - 1e-6).all()  # nothing can


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_stored_products_are_the_best_ones_but_for_rounding(rank):
    codec = Factored(rank, SIDES)
    g = torch.Generator().manual_seed(1)
    x = torch.cat(
        [
            matrices(25, 16, 16, 0.6).flatten(1),
            torch.randn(25, 16, generator=g),
            matrices(25, 12, 20, 0.6, 1).flatten(1),
            matrices(25, 20, 12, 0.6, 2).flatten(1),
            torch.randn(25, 6, generator=g),
            matrices(25, 16, 16, 0.3, 3).flatten(1),
        ],
        1,
    )
    x *= torch.exp2(torch.randint(-100, 100, (25, 1), generator=g))
    packed = codec.pack(x, OF_SIDES)
    codec.check(packed, 25, OF_SIDES)
    back = codec.unpack(packed, OF_SIDES).double()
    for c, sides in zip(OF_SIDES, SIDES):
        own, off = x[:, c].double(), (back[:, c] - x[:, c].double()).norm(dim=1)
        if sides is None or rank * (sum(sides) + 4) >= sides[0] * sides[1] + 4:  # int8 is smaller
            assert (off <= own.norm(dim=1) / 100).all()
            continue
        values = torch.linalg.svdvals(own.unflatten(1, sides))
        best = values[:, rank:].square().sum(1).sqrt()
        assert (off >= best * (1 - 1e-4)).all()
        # Each factor is off by 1/254 of its largest entry in each of its entries, at most.
        rounding = values[:, :rank].sum(1) * (sides[0] ** 0.5 + sides[1] ** 0.5) / 254
        assert (off <= best + 1.05 * rounding).all()
        assert (off > best).any()
    bytes_ = rank * (32 + 4) * 2 + (16 + 4) + min(rank * 9, 10) + 2 * min(rank * (32 + 4), 244)
    assert sum(t.nbytes for t in packed.values()) == codec.nbytes(25, OF_SIDES) == 25 * bytes_


def test_unpacked_by_a_loop():
    codec = Factored(2, SIDES)
    x = torch.randn(4, 1014, generator=torch.Generator().manual_seed(2))
    x[1] = 0
    packed = codec.pack(x, OF_SIDES)
    numbers, scale = packed["features"].double().numpy(), packed["scale"].double().numpy()
    back, at, of_scale = codec.unpack(packed, OF_SIDES), 0, 0
    for c, sides in zip(OF_SIDES, SIDES):
        if sides is None or sides == (2, 3):
            size = c.stop - c.start
            want = numbers[:, at : at + size] * scale[:, of_scale : of_scale + 1]
            at, of_scale = at + size, of_scale + 1
        else:
            r, s = sides
            want = np.zeros((4, r, s))
            for k in range(2):
                for i in range(4):
                    u, v = numbers[i, at : at + r], numbers[i, at + r : at + r + s]
                    want[i] += scale[i, of_scale + k] * np.outer(u, v)
                at += r + s
            want, of_scale = want.reshape(4, -1), of_scale + 2
        assert back[:, c].double().numpy() == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert at == numbers.shape[1] and of_scale == scale.shape[1] and not back[1].any()


def test_each_matrix_may_have_its_own_number_of_products():
    """As a codec of its own stores it; a matrix of rank 0 is zero, one whose products take more is kept in int8."""
    ranks = (3, 0, 0, 1, 1, 40)
    codec = Factored(2, SIDES, ranks)
    x = torch.randn(5, 1014, generator=torch.Generator().manual_seed(4))
    packed = codec.pack(x, OF_SIDES)
    codec.check(packed, 5, OF_SIDES)
    back = codec.unpack(packed, OF_SIDES)
    for c, pair, rank in zip(OF_SIDES, SIDES, ranks):
        alone, here = Factored(max(rank, 1), (pair,)), [slice(0, c.stop - c.start)]
        want = alone.unpack(alone.pack(x[:, c], here), here)
        assert torch.equal(back[:, c], want if rank or pair is None else torch.zeros_like(want))
    assert codec.nbytes(1, OF_SIDES) == 3 * 36 + 20 + 0 + 36 + 9 + 260


def brute_force(rank, sides, energies):
    """The most energy that fits, by trying everything."""
    cost = [lambda k, r=r, s=s: min(k * (r + s + 4), r * s + 4) for r, s in sides]
    budget, best = sum(c(rank) for c in cost), -1.0
    for ranks in itertools.product(*(range(len(e) + 1) for e in energies)):
        if sum(c(k) for c, k in zip(cost, ranks)) <= budget:
            best = max(best, sum(sum(e[:k]) for e, k in zip(energies, ranks)))
    return best


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_spent_where_they_keep_most(rank, seed):
    """Of matrices of one shape as much as can be; of others nearly so, as the last product may not fit."""
    g = np.random.default_rng(seed)
    for sides, least in ([[(12, 12)] * 4, 1 - 1e-9], [[(12, 12), (9, 20), (6, 30), (16, 16)], 0.93]):
        energies = [np.sort(g.exponential(size=5) * g.exponential() ** 3)[::-1].tolist() for _ in sides]
        ranks = choose_ranks(rank, [*sides, None], [*energies, []])
        kept = sum(sum(e[:k]) for e, k in zip(energies, ranks))
        assert ranks[-1] == 0
        assert kept >= least * brute_force(rank, sides, energies)
        fixed, own = (Factored(rank, tuple(sides), r) for r in ((), ranks[:-1]))
        columns = columns_of([r * s for r, s in sides])
        assert own.nbytes(1, columns) <= fixed.nbytes(1, columns)


def test_enough_bytes_for_everything_keep_everything():
    sides = [(4, 6), (8, 8), None]
    energies = [[1.0, 0.0, 0.0, 0.0], [0.0] * 8, []]
    ranks = choose_ranks(8, sides, energies)
    whole, own = (Factored(8, tuple(sides), r) for r in ((), ranks))
    columns = columns_of([24, 64, 3])
    assert own.layout(1, columns) == whole.layout(1, columns)


def test_products_of_all_sizes_that_float32_has():
    codec, columns = Factored(1, ((16, 16),)), [slice(0, 256)]
    x = matrices(8, 16, 16, 0.0).flatten(1)  # of rank one
    x = x / x.abs().amax(1, keepdim=True)
    sizes = torch.tensor([1.0, 1e-30, 1e30, 3.4e38, 1e-37, 1e-45, 0.0, 1e10])
    back = codec.unpack(codec.pack(x * sizes.unsqueeze(1), columns), columns)
    assert back.isfinite().all()
    off = (back - x * sizes.unsqueeze(1)).abs().amax(1)
    assert (off <= sizes / 100 + 1e-36).all()


@pytest.mark.parametrize("codec", [INT8, Factored(1, ((4, 8), None))], ids=["int8", "factored"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [5, 35])
def test_what_is_not_finite_is_refused(codec, value, column):
    x = torch.randn(9, 40)
    x[7, column] = value
    said = rf"stored as {codec.name.replace('(', r'.').replace(')', '.')} are NaN or infinite \(row 7 of 9\)"
    with pytest.raises(UndeError, match=said):
        codec.pack(x, [slice(0, 32), slice(32, 40)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 3e38])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("codec", [INT8, Factored(1, ((4, 8), None))], ids=["int8", "factored"])
def test_scales_that_cannot_be_right(codec, value, where):
    columns = [slice(0, 32), slice(32, 40)]
    packed = codec.pack(torch.randn(9, 40), columns)
    packed["scale"][2, where] = value
    with pytest.raises(ValueError, match=r"'scale' of row 2, .* expected a finite number"):
        codec.check(packed, 9, columns)


def test_sides_are_those_of_the_projected_matrix():
    units = [{"shape": [64, 3, 3, 3]}, {"shape": [64]}, {"shape": [8, 100]}, {"shape": [4, 6]}]
    assert sides_of(units, "kron(16)") == ((16, 16), None, (8, 16), (4, 6))
    assert sides_of(units, "none") == ((64, 27), None, (8, 100), (4, 6))
    assert sides_of(units, "sjlt(64)") == (None,) * 4


def test_names():
    assert codec_of("factored(2)", [{"shape": [4, 6]}], "factored(2)") == Factored(2, ((4, 6),))
    own = codec_of("factored(2)", [{"shape": [4, 6], "rank": 1}, {"shape": [4]}], "factored(2)")
    assert own == Factored(2, ((4, 6), None), (1, 2))
    assert codec_of("int8", [], "none") is CODECS["int8"]
    factored.check("factored(2)", "factored(2)")
    for name, said in (
        ("factored(2)", r"unknown store_dtype 'factored\(2\)': expected one of 'auto', 'float32'"),
        ("int5", "unknown store_dtype 'int5': .*Did you mean 'int8'"),
        (None, "unknown store_dtype None"),
    ):
        with pytest.raises(UndeError, match=said):
            factored.check(name, "kron(16)")
