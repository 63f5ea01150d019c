"""Features stored as whole numbers from -127 to 127 with a scale for each example and parameter."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import toy
from unde import UndeError, methods
from unde.index import scorer as train_features
from unde.store.shards import ShardError, read_shard, write_shard

QUERIES = toy.data(4, seed=3)


def decoded(numbers, scale, columns):
    """By NumPy, in float64."""
    sizes = [c.stop - c.start for c in columns]
    return numbers.astype(np.float64) * np.repeat(scale.astype(np.float64), sizes, axis=1)


def on_disk(index) -> np.ndarray:
    """(N, D) as the files have them."""
    files = [load_file(path) for path in toy.shard_files(index)]
    return np.concatenate([decoded(f["features"], f["scale"], index.manifest.columns) for f in files])


@pytest.mark.parametrize("memory", ["2GB", "20kB"])
def test_scores_are_those_of_what_is_stored(tmp_path, memory, monkeypatch):
    """Contributions, totals and self-influence of TracIn, whole shards and in runs of 16 rows."""
    index = toy.build(tmp_path / "i", 50, method="tracin", store_dtype="int8", shard_passes=10)
    n, asked = on_disk(index), index.features(QUERIES).features[0].double().numpy()
    truth = toy.gradients(toy.net(), index.task, toy.data(50)).numpy()
    assert 1e-4 < np.linalg.norm(n - truth) / np.linalg.norm(truth) < 0.01
    for unpacked in (train_features.RUN_BYTES, 17 * 4 * index.manifest.width):
        monkeypatch.setattr(train_features, "RUN_BYTES", unpacked)
        monkeypatch.setattr(train_features, "_FEWEST", 1)
        scores = toy.reopen(index, memory=memory).score(QUERIES)
        want = np.stack([asked[:, c] @ n[:, c].T for c in (slice(0, 36), slice(36, 57))], 2)
        assert scores.by_group().numpy() == pytest.approx(want, rel=1e-5, abs=1e-6)
        total = scores.total([0.3, 1.7])
        assert total.numpy() == pytest.approx(want @ [0.3, 1.7], rel=1e-5, abs=1e-6)
        best = scores.top(5, [0.3, 1.7])
        assert torch.equal(best.values, total.gather(1, best.indices))
        assert torch.equal(best.values, total.sort(1, descending=True).values[:, :5])
    own = index.self_influence().numpy()
    assert own == pytest.approx((n * n).sum(1), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("method", ["tracin", "trak"])
def test_runs_of_rows_do_not_depend_on_memory(tmp_path, dtype, method, monkeypatch):
    index = toy.build(tmp_path / "i", 100, method=method, store_dtype=dtype, shard_passes=10)
    monkeypatch.setattr(train_features, "RUN_BYTES", 17 * 4 * index.manifest.width)
    monkeypatch.setattr(train_features, "_FEWEST", 1)
    assert train_features.run_rows(index.manifest.width, 2**30) == 16 < index.manifest.shards[0].stop
    little, much = toy.reopen(index, memory="60kB"), toy.reopen(index, memory="2GB")
    sides = [toy.training(at, at.method) for at in (little, much)]
    assert [side._blocks_in_memory is None for side in sides] == [True, False]
    assert [rows.stop - rows.start for rows, _ in sides[0].runs()][:2] == [16, 16]
    asked = much.features(QUERIES)
    assert toy.same_products(little.score(asked).total(), much.score(asked).total())


def test_kernels_are_those_of_what_is_stored(tmp_path):
    """(ΦᵀΦ + λI)⁻¹ of the unpacked features, in float64; K g(n) is int8 too, and adds half a scale of its own."""
    method = methods.TRAK(damping=0.5, projection="none")
    index = toy.build(tmp_path / "i", method=method, store_dtype="int8")
    phi = on_disk(index)
    gram = phi.T @ phi
    lam = 0.5 * np.trace(gram) / len(gram)
    want = phi @ np.linalg.inv(gram + lam * np.eye(len(gram)))
    got = toy.training(index, method)
    found = torch.cat([got.block(s)[0] for s in range(len(got.cuts))]).double().numpy()
    for c in index.manifest.columns:
        half = np.abs(want[:, c]).max(1, keepdims=True) / 254
        assert (np.abs(found[:, c] - want[:, c]) <= 1.01 * half).all()


def spoilt(path, name, make):
    """The same file with another tensor, and a checksum that fits it."""
    with safe_open(path, framework="pt") as f:
        owner = json.loads(f.metadata()["unde"])["index"]
    tensors = {name: t.clone() for name, t in read_shard(path, owner).items()}
    write_shard(path, owner, tensors | {name: make(tensors[name])})


def with_entry(value):
    def make(t):
        t[1, 2] = value
        return t

    return make


FLOAT64 = r"'scale' is float64 of shape \(8, 4\), expected float32 of shape \(8, 4\)"
NUMBERS = r"'features' is float32 of shape .* expected int8"
HOSTILE = {
    "NaN": ("scale", with_entry(float("nan")), r"of row 1, parameter 2 is nan, expected a finite number"),
    "infinite": ("scale", with_entry(float("inf")), r"'scale' of row 1, parameter 2 is inf"),
    "too large": ("scale", with_entry(3e38), r"'scale' of row 1, parameter 2 is"),
    "negative": ("scale", with_entry(-1.0), r"'scale' of row 1, parameter 2 is -1\.0"),
    "shape": ("scale", lambda t: t[:, :1], r"'scale' of shape|'scale' is float32 of shape"),
    "type": ("scale", lambda t: t.double(), FLOAT64),
    "type of numbers": ("features", lambda t: t.float(), NUMBERS),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_tensors_that_cannot_be_right(tmp_path, what):
    name, make, said = HOSTILE[what]
    index = toy.build(tmp_path / "i", method="tracin", store_dtype="int8")
    asked = index.features(QUERIES)
    spoilt(toy.shard_files(index)[0], name, make)
    assert "is damaged" in str(index.verify())
    with pytest.raises(ShardError, match=r"c00-000000.safetensors is damaged: .*(" + said + ")"):
        index.score(asked).total()


def test_hostile_rows_of_a_kernel_are_made_anew(tmp_path):
    index = toy.build(tmp_path / "i", method="trak", store_dtype="int8")
    asked = index.features(QUERIES)
    want = index.score(asked).total()
    path = next((index.folder / "kernels").rglob("000000.safetensors"))
    spoilt(path, "scale", with_entry(float("nan")))
    assert torch.equal(toy.reopen(index).score(asked).total(), want)


def test_unknown_precision(tmp_path):
    with pytest.raises(UndeError, match=r"unknown store_dtype 'int3'.*Did you mean 'int"):
        toy.build(tmp_path / "i", store_dtype="int3")
