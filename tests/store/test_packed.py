"""Rows that are unpacked a few at a time: the same numbers as all at once, in less memory."""

import pytest
import torch

from unde.store import dequantize as packed
from unde.store.dequantize import Packed, at_once, in_runs
from unde.store.factored import codec_of

pytestmark = pytest.mark.usefixtures("one_thread")

UNITS = [{"shape": [8, 6], "size": 48}, {"shape": [5], "size": 5}, {"shape": [8, 6], "size": 48}]
COLUMNS = [slice(0, 48), slice(48, 53), slice(53, 101)]


def block(name: str, rows: int = 300) -> tuple[Packed, torch.Tensor]:
    features = torch.randn(rows, 101, generator=torch.Generator().manual_seed(0))
    codec = codec_of(name, UNITS, "none")
    stored = codec.pack(features, COLUMNS)
    return Packed(codec, COLUMNS, stored), codec.unpack(stored, COLUMNS)


@pytest.mark.parametrize(
    "name", ["float32", "float16", "bfloat16", "int8", "int4", "factored(1)", "factored(2)"]
)
@pytest.mark.parametrize("together", [100, 200])
def test_runs_are_what_is_unpacked_at_once(name, together, monkeypatch):
    monkeypatch.setattr(packed, "EACH", together * 4 * 101)
    rows, whole = block(name)
    found, places = torch.full_like(whole, float("nan")), set()
    for here, features in in_runs(rows):
        found[here] = features
        places.add(features.data_ptr())
    assert torch.equal(found, whole)
    assert len(places) == 1  # the same memory again and again
    part = [features.clone() for _, features in in_runs(rows[17:290])]
    assert torch.equal(torch.cat(part), whole[17:290])


def test_how_many_rows_are_unpacked_together():
    """8 MiB of one thread, 16 MiB of several, by sixteens, and never so few that products are slow."""
    assert at_once(1000) == 2**23 // 4000 // 16 * 16 == 2096
    assert at_once(10**6) == 64
    torch.set_num_threads(3)
    assert at_once(1000) == 2**24 // 4000 // 16 * 16


def test_tensors_are_one_run():
    whole = torch.randn(5, 3)
    [(rows, features)] = in_runs(whole)
    assert rows == slice(0, 5) and features is whole


def test_no_rows():
    rows, _ = block("int8", 0)
    assert list(in_runs(rows)) == []
