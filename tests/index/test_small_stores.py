"""Indexes of outer products under every kernel, and the precision that "auto" stores."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import toy
from unde import Groups, Index, UndeError
from unde.index import sizes as settle
from unde.kernels import FeatureLayout, Gram
from unde.kernels.trak import Primal
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.store.shards import read_shard
from unde.tasks import Classification

QUERIES = toy.data(4, seed=3)


def unpacked(index) -> np.ndarray:
    """(N, D) as the files have them, in float64."""
    shards = range(len(index.manifest.shards))
    return torch.cat([toy.stored(index).block(0, s) for s in shards]).double().numpy()


def test_gradients_that_are_one_outer_product_are_kept(tmp_path):
    """Of one position the gradient of a weight is δ xᵀ: nothing is left out, and entries lose a hundredth."""
    index = toy.build(tmp_path / "i", 50, method=TracIn("factored(1)"))
    truth, found = toy.gradients(toy.net(), Classification(), toy.data(50)), torch.tensor(unpacked(index))
    assert ((found - truth).norm(dim=1) <= 0.015 * truth.norm(dim=1)).all()
    each = sum(t.nbytes for t in read_shard(toy.shard_files(index)[0], None).values()) / 8
    bare = (6 + 5 + 4) + (6 + 4) + (3 + 6 + 4) + (3 + 4)  # numbers and scales
    assert each == bare + 4 * 4 + 4 + 1 + 8  # norms, the loss, whether it was skipped, its digest


@pytest.mark.parametrize("projection", ["factored(1)", "factored(2)"])
@pytest.mark.parametrize(
    "method", [TracIn(), LoGRA(damping=2.0), TRAK(damping=2.0), TRAK(damping=2.0, form="dual")]
)
def test_scores_are_those_of_what_is_stored(tmp_path, projection, method):
    """Contributions, totals under weights, and self-influence, from dense inverses of the unpacked features."""
    index = toy.build(tmp_path / "i", 40, method=replace(method, projection=projection))
    phi, asked = unpacked(index), index.features(QUERIES).features[0].double().numpy()
    width = phi.shape[1]
    k = np.eye(width)
    if not isinstance(method, TracIn):
        k = np.zeros((width, width))
        layers = [np.arange(width)]
        if isinstance(method, LoGRA):
            layers = np.split(np.arange(width), [index.manifest.columns[1].stop])
        for at in layers:
            gram = phi[:, at].T @ phi[:, at]
            lam = 2.0 * np.trace(gram) / len(gram)
            k[np.ix_(at, at)] = np.linalg.inv(gram + lam * np.eye(len(gram)))
    scores = index.score(QUERIES).regroup(Groups.by_tensor(toy.net()))
    want = np.stack([asked[:, c] @ k[c] @ phi.T for c in index.manifest.columns], 2)
    by_group, size = scores.by_group().numpy(), np.abs(want).max()
    assert np.abs(by_group - want).max() <= 1e-5 * size
    w = torch.tensor([0.3, 1.7, 0.0, 2.0])
    assert scores.total(w).numpy() == pytest.approx(by_group @ w.numpy(), rel=1e-4, abs=1e-5 * size)
    own = np.einsum("nd,de,ne->n", phi, k, phi)
    assert index.self_influence().numpy() == pytest.approx(own, rel=1e-4, abs=1e-6)
    assert not list((index.folder / "kernels").rglob("000000.safetensors"))  # no K g(n)


@dataclass(frozen=True)
class Kept(Gram):
    """A kernel that knows nothing of stores."""

    def bind(self, sizes):
        return Primal(FeatureLayout(sizes.parts, sizes.cuts), self.damping, self.relative)


class CustomKernel(TRAK):
    @property
    def kernel(self):
        return Kept(2.0)


def test_what_outer_products_cannot_keep(tmp_path):
    """K g(n) of a kernel of one's own."""
    index = toy.build(tmp_path / "i", method=TracIn("factored(1)"))
    said = r"stored as factored\(1\), in which K g\(n\) cannot be: .*another projection"
    with pytest.raises(UndeError, match=said):
        index.score(QUERIES, CustomKernel(projection="factored(1)"))


def test_small_stores_keep_every_digit_and_large_ones_are_a_quarter(tmp_path, monkeypatch):
    small = toy.build(tmp_path / "small", method="tracin")
    assert small.manifest.store_dtype == "float32"
    m = small.manifest
    monkeypatch.setattr(settle, "EXACT", 4 * m.examples * m.width - 1)  # one byte too large for it
    large = toy.build(tmp_path / "large", method="tracin")
    assert large.manifest.store_dtype == "int8"
    # goes on as it is
    assert toy.build(tmp_path / "small", method="tracin").manifest.store_dtype == "float32"
    for count, dtype in ((m.examples, "int8"), (m.examples - 1, "float32")):
        plan = Index.plan(toy.net(), Classification(), toy.data(2), n_examples=count, method="tracin")
        assert plan.store_dtype == dtype


def test_dampings_that_rounding_could_decide_keep_every_digit(tmp_path, monkeypatch):
    monkeypatch.setattr(settle, "EXACT", 0)
    asked = TRAK(damping=0.09)
    absolute = LoGRA(damping=1e3, relative=False)
    for i, (method, stored) in enumerate(
        ((TRAK(damping=0.1), "int8"), (asked, "float32"), (absolute, "float32"))
    ):
        assert toy.build(tmp_path / str(i), method=method).manifest.store_dtype == stored
    begun = toy.build(tmp_path / "begun", method=asked, store_dtype="float16")
    assert toy.build(begun.folder, method=asked).manifest.store_dtype == "float16"  # as it is
    index = toy.build(tmp_path / "sampled", method=EKFAC(damping=0.01, fisher="sampled"))
    # what the kernel is made of, too
    assert index._state.stored.fisher("sampled").manifest.store_dtype == "float32"


def test_few_wide_features_keep_every_digit(tmp_path, monkeypatch):
    """What "auto" stores is not refused by the kernel that it was built for."""
    monkeypatch.setattr(settle, "EXACT", 0)
    x, queries = toy.data(4, seed=5)[0], toy.data(3, seed=3)
    few = x[:1] + x / 100, torch.zeros(4, dtype=torch.long)  # much alike
    refused = toy.build(tmp_path / "int8", train_data=few, method=TRAK(), store_dtype="int8")
    with pytest.raises(UndeError, match=r"rounding of the features.* raise the damping to at least"):
        refused.score(queries).total()
    index = toy.build(tmp_path / "auto", train_data=few, method=TRAK())
    assert index.manifest.store_dtype == "float32" and index.score(queries).total().isfinite().all()
    plan = Index.plan(toy.net(), Classification(), few, n_examples=4, method=TRAK())
    assert plan.store_dtype == "float32"
    by_layer = toy.build(tmp_path / "layers", train_data=few, method=LoGRA())
    assert by_layer.manifest.store_dtype == "int8" and by_layer.score(queries).total().isfinite().all()
