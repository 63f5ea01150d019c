"""Features in float32 and float16: the rounding of each entry, at the edges of the range too."""

import pytest
import torch

from unde.store.codec import CODECS

COLUMNS = [slice(0, 3), slice(3, 4), slice(4, 40)]
ROUNDING = {"float32": 0.0, "float16": 2.0**-11}  # half a unit in the last place


def through(dtype, x, columns=COLUMNS):
    """Features as they come back from storage."""
    codec = CODECS[dtype]
    packed = codec.pack(x, columns)
    assert sum(t.nbytes for t in packed.values()) == codec.nbytes(len(x), columns)
    return codec.unpack(packed, columns)


def spread_out(n=50):
    """Features of wildly different sizes: from example to example, unit to unit and entry to entry."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 40, generator=g) * torch.exp2(torch.randint(-8, 8, (n, 40), generator=g))
    x *= torch.exp2(torch.randint(-60, 40, (n, 1), generator=g))
    for c in COLUMNS:
        x[:, c] *= torch.exp2(torch.randint(-20, 20, (n, 1), generator=g))
    return x


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_of_each_entry(dtype):
    x = spread_out()
    back = through(dtype, x)
    assert ((back - x).abs() <= ROUNDING[dtype] * x.abs()).all()
    if dtype != "float32":
        assert ((back - x).abs() > ROUNDING[dtype] * x.abs() / 4).any()  # it is stored in half precision


def test_half_precision_keeps_what_is_small_beside_its_unit_to_absolute_accuracy():
    """Below 2⁻²⁸ of the largest entry of its example and unit, float16 is left with absolute accuracy."""
    x = torch.zeros(2, 40)
    x[:, 4], x[0, 5], x[0, 6], x[1, 7] = 1.0, 2.0**-28, 2.0**-37, 2.0**-60
    back = through("float16", x)
    assert torch.equal(back[:, :7], x[:, :7])
    assert back[1, 7] == 0


@pytest.mark.parametrize("scale", [1e-9, 1e-30, 1e9, 1e30])
@pytest.mark.parametrize("dtype", ["float16"])
def test_the_size_of_a_feature_does_not_matter(dtype, scale):
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(1)) * scale
    back = through(dtype, x)
    assert ((back - x).abs() <= ROUNDING[dtype] * x.abs()).all()


def test_edges_of_the_range():
    x = torch.tensor([0.0, -0.0, 3e38, -3e38, 1.2e-38, 1e-42, 65504.0, 65520.0]).repeat(5).view(1, 40).clone()
    for columns in ([slice(i, i + 1) for i in range(40)], [slice(0, 40)]):
        back = through("float16", x, columns)
        assert back.isfinite().all()
        assert (back - x).abs().max() <= ROUNDING["float16"] * 3e38
    alone = through("float16", x[:, 4:6], [slice(0, 1), slice(1, 2)])
    assert alone[0, 0] == pytest.approx(1.2e-38, rel=1e-3)


def test_float32_is_handed_on_without_a_copy():
    x = torch.randn(3, 40)
    assert CODECS["float32"].unpack({"features": x}, COLUMNS).data_ptr() == x.data_ptr()
