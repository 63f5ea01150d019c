"""Files that whence 0.1 wrote: they open, they score, they are finished where they stopped.

tests/data/whence-0.1 was made by its make.py, run with the package as it was under its old name.
"""

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import toy
import unde
from unde import Index, UndeError, Weights
from unde.evaluate import Bank
from unde.methods import TRAK
from unde.tasks import Classification

pytestmark = pytest.mark.usefixtures("one_thread")

OLD = Path(__file__).parent.parent / "data" / "whence-0.1"


@pytest.fixture
def old(tmp_path):
    """A copy that may be written to: scoring writes kernels, building writes shards."""
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def model():
    net = toy.net()
    net.load_state_dict(load_file(OLD / "model.safetensors"))
    return net


def rows():
    columns = load_file(OLD / "data.safetensors")
    return (columns["x"], columns["y"]), (columns["queries"], columns["labels"])


def build(folder, **options):
    train, _ = rows()
    ids = [f"example {i}" for i in range(len(train[0]))]
    return toy.build(
        folder, model=model(), train_data=train, method=TRAK(projection="kron(4)"), ids=ids, memory="2GB", **options
    )  # fmt: skip


def opened(folder):
    return Index.open(folder, model=model(), task=Classification(), train_data=rows()[0])


def test_an_index_opens_and_scores_as_it_did(old):
    index, (_, queries) = opened(old / "index"), rows()
    scores, then = index.score(queries), load_file(OLD / "scores.safetensors")
    # 0.1 inverted small kernels in float32; now they are in float64.
    torch.testing.assert_close(
        scores.total(), then["total"], rtol=0, atol=1e-5 * float(then["total"].abs().max())
    )
    weights = Weights.load(old / "weights.json")
    weighted = then["weighted"]
    torch.testing.assert_close(
        scores.total(weights.values), weighted, rtol=0, atol=1e-5 * float(weighted.abs().max())
    )
    assert index.ids is not None and index.ids[7] == "example 7"
    assert index.self_influence().shape == (24,)


def test_it_scores_as_a_new_index_of_the_same_data(old, tmp_path):
    """Kernels are made anew from the old shards."""
    new, there, (_, queries) = build(tmp_path / "new"), opened(old / "index"), rows()
    got, want = there.score(queries).by_group(), new.score(queries).by_group()
    # 0.1 inverted small kernels in float32; now they are in float64.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert there.manifest.data == new.manifest.data and there.manifest.units == new.manifest.units


def test_kept_query_features_are_used(old):
    index, (_, queries) = opened(old / "index"), rows()
    with mock.patch("unde.index.session.Session.features", side_effect=AssertionError("computed anew")):
        kept = index.features(queries, old / "queries.safetensors")
    torch.testing.assert_close(kept.features, index.features(queries).features, rtol=1e-6, atol=1e-6)


def test_a_build_resumes_it(old):
    sound = {p.name: p.read_bytes() for p in (old / "index" / "shards").iterdir()}
    lost = old / "index" / "shards" / "c00-000001.safetensors"
    lost.unlink()
    with pytest.raises(UndeError, match="1 of 3 shards are missing"):
        opened(old / "index")
    computed = []
    begin = unde.index.background_writer.begin_shard

    def noted(path, *rest):
        computed.append(path.name)
        return begin(path, *rest)

    with mock.patch("unde.index.background_writer.begin_shard", noted):
        index = build(old / "index")
    assert computed == [lost.name]
    now = {p.name: p.read_bytes() for p in (old / "index" / "shards").iterdir()}
    assert {n: b for n, b in now.items() if n != lost.name} == {
        n: b for n, b in sound.items() if n != lost.name
    }
    again = toy.stored(index).block(0, 1).clone()
    lost.write_bytes(sound[lost.name])
    torch.testing.assert_close(again, toy.stored(index).block(0, 1), rtol=1e-6, atol=1e-6)


def counted(indices, seed=0):
    return torch.from_numpy(np.bincount(indices, minlength=24)).float()


def test_a_bank_opens():
    bank = Bank.open(OLD / "bank.npz")
    assert bank.masks.shape == (4, 24) and bank.masks.sum(1).tolist() == [12] * 4
    learn, evaluate = bank.utility["learn"], bank.utility["evaluate"]
    assert np.array_equal(learn, -bank.masks[:, :3].astype(float))
    assert np.array_equal(evaluate, -bank.masks[:, 3:5].astype(float))
    assert bank.seeds.shape == (4, 2)


def test_a_bank_that_was_begun_is_finished(old):
    with pytest.raises(UndeError, match=r"not finished \(7 of 8 models\)"):
        Bank.open(old / "begun.npz")
    trained = []

    def train(indices, seed):
        trained.append(seed)
        return counted(indices)

    bank = Bank.run(
        old / "begun.npz", train=train, utility=lambda c: {"learn": -c[:3]}, n_train=24, subsets=4,
        seeds_per_subset=2, name="which examples were there",
    )  # fmt: skip
    whole = Bank.open(OLD / "bank.npz")
    assert trained == [int(whole.seeds[-1, -1])]
    assert np.array_equal(bank.masks, whole.masks) and np.array_equal(
        bank.utility["learn"], whole.utility["learn"]
    )


def test_what_cannot_be_read_says_what_to_do(old):
    """Formats of neither name are refused in a sentence."""
    content = json.loads((old / "weights.json").read_text())
    (old / "weights.json").write_text(json.dumps(content | {"format": "wherefrom weights"}))
    with pytest.raises(UndeError, match=r"expected a file written by Weights\.save"):
        Weights.load(old / "weights.json")
    manifest = json.loads((old / "index" / "manifest.json").read_text())
    (old / "index" / "manifest.json").write_text(json.dumps(manifest | {"schema": 1}))
    with pytest.raises(
        UndeError, match=r"schema 1, this release reads .*: rebuild it, or install the release"
    ):
        opened(old / "index")
