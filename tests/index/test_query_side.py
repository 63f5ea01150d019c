"""Kernels that do not mix layers act on the query side: the same scores as K g(n), and none of it on disk."""

import pytest
import torch
from torch import nn

import toy
from unde import Groups
from unde.index.reader import FeatureSource
from unde.kernels import EKFACKernel, Gram, fit_kernel
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.store import shards

QUERIES = toy.data(5, seed=3)
METHODS = {
    "by layer": LoGRA(projection="kron(3)"),
    "by layer, unprojected": LoGRA(projection="none", damping=0.5),
    "ekfac": EKFAC(projection="kron(3)"),
    "ekfac, unprojected": EKFAC(projection="none"),
    "ekfac, sampled": EKFAC(projection="kron(3)", fisher="sampled"),
}
PARTITIONS = {
    "layer": Groups.by_layer,
    "tensor": Groups.by_tensor,
    "consecutive": lambda model: Groups.consecutive(model, 3),
    "across layers": lambda model: Groups.by_pattern(model, {"weights": "weight", "biases": "bias"}),
}


def net():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture(params=METHODS, scope="module")
def index(request, tmp_path_factory):

    folder = tmp_path_factory.mktemp("index")
    states = [net().state_dict(), {k: 1.5 * v for k, v in net().state_dict().items()}]
    return toy.build(folder / "i", model=net(), method=METHODS[request.param], checkpoints=states)


def applied(index):
    """K g(n) of each checkpoint, as releases before 0.2 stored it: fitted to all features, applied to all."""
    stored, kernel = toy.stored(index), index.method.kernel
    sources = [stored.source(kernel.fisher, c) for c in range(2)]
    features = [torch.cat([stored.block(c, s) for s in range(3)]) for c in range(2)]
    return [fit_kernel(kernel, source).apply(phi) for source, phi in zip(sources, features)], features


@pytest.mark.parametrize("name", PARTITIONS)
def test_contributions_are_those_of_the_stored_product(index, name):
    partition = PARTITIONS[name](net())
    made, _ = applied(index)
    scores = index.score(QUERIES).regroup(partition)
    queries = index.features(QUERIES).features
    m, of = index.manifest, partition.of(index.manifest.unit_names)
    want = torch.zeros(5, 22, len(partition))
    for eta, q, k in zip(m.checkpoint_weights, queries, made):
        for j, c in zip(of, m.columns):
            want[..., j] += eta * q[:, c] @ k[:, c].T
    largest = float(want.abs().max())
    torch.testing.assert_close(scores.by_group(), want, rtol=1e-4, atol=2e-6 * largest)
    w = torch.linspace(0.2, 2, len(partition))
    torch.testing.assert_close(scores.total(w), want @ w, rtol=1e-4, atol=4e-6 * largest)
    torch.testing.assert_close(scores.total(), want.sum(-1), rtol=1e-4, atol=4e-6 * largest)


def test_self_influence_is_that_of_the_stored_product(index):
    made, features = applied(index)
    etas, w = index.manifest.checkpoint_weights, [0.5, 2.0, 1.0]
    of = index.groups.of(index.manifest.unit_names)
    column = torch.cat([torch.full((c.stop - c.start,), w[j]) for j, c in zip(of, index.manifest.columns)])
    want = sum(eta * (column * f * k).sum(1) for eta, f, k in zip(etas, features, made))
    torch.testing.assert_close(index.self_influence(w), want, rtol=1e-4, atol=2e-6 * float(want.abs().max()))
    leverage = sum(eta * (f * k).sum(1) for eta, f, k in zip(etas, features, made))
    got = toy.training(index, index.method).leverage()
    torch.testing.assert_close(got, leverage, rtol=1e-4, atol=2e-6 * float(leverage.abs().max()))


def test_nothing_but_moments_is_written(index):
    index.score(QUERIES).total()
    written = [p for p in (index.folder / "kernels").rglob("*") if p.is_file() and p.name != ".lock"]
    assert {p.name for p in written} == {"moments.safetensors"}
    assert len(written) == 2  # for each checkpoint


def test_another_damping_reads_no_features(index, monkeypatch):
    features = index.features(QUERIES)
    before = index.score(features).total()
    other = type(index.method)(**{**vars(index.method), "damping": 7.0})
    read, real = [], shards.read_shard

    def note(path, *args, **options):
        read.append(path.parent.name)
        return real(path, *args, **options)

    for module in ("store.shards", "index.kernel_cache"):
        monkeypatch.setattr(f"unde.{module}.read_shard", note)
    again = index.score(features, method=other)
    assert "shards" not in read  # K is there
    assert not torch.allclose(again.total(), before, rtol=1e-2)


@pytest.mark.parametrize(("method", "files"), [(TRAK(projection="none"), 3), (TracIn(projection="none"), 0)])
def test_what_other_kernels_write(tmp_path, method, files):
    index = toy.build(tmp_path / "i", model=net(), method=method)
    index.score(QUERIES).total()
    assert len(list((index.folder / "kernels").rglob("000*.safetensors"))) == files
    assert (index.folder / "kernels").exists() == bool(files)  # the identity writes nothing


def test_moments_do_not_depend_on_who_computes_what(tmp_path, monkeypatch):
    """Partial results that are there are used, in whatever order they were made."""
    monkeypatch.setattr("unde.kernels.base.JOINED", 1)
    one = toy.build(tmp_path / "a", model=net(), method=EKFAC(projection="kron(3)"))
    two = toy.build(tmp_path / "b", model=net(), method=EKFAC(projection="kron(3)"))
    want = one.score(QUERIES).total()
    source = FeatureSource(toy.stored(two), 0)
    resolved = two.method.kernel.bind(source.sizes)
    [first, _] = resolved.rounds
    assert first.jobs == 3
    made = {i: first.job(source, i, {}) for i in (2, 0, 1)}
    from unde.index.kernel_cache import KernelCache

    at = KernelCache(toy.stored(two), two.method.kernel, 0)._moments
    at.path.mkdir(parents=True)
    for i in (1, 2):
        shards.write_shard(at.partial(first, i), at.owner, made[i])
    stamps = {p.name: p.stat().st_mtime_ns for p in at.path.iterdir()}
    assert torch.equal(two.score(QUERIES).total(), want)
    assert stamps and not [p for p in at.path.iterdir() if p.name in stamps]  # merged, and gone


def test_fitted_once_however_often_it_is_asked(index, monkeypatch):
    """Tokens, leverages and scores share the kernel that was inverted first."""
    from unde.kernels import ekfac
    from unde.kernels import logra as by_layer

    features, fits = index.features(QUERIES), []
    opened = toy.reopen(index)
    for module, name in ((by_layer, "LayerBlocks"), (ekfac, "_BoundEKFAC")):
        kind = getattr(module, name)
        monkeypatch.setattr(kind, "fit", lambda *args, real=kind.fit: (fits.append(1), real(*args))[1])
    for _ in range(3):
        opened.score(features).total()
        opened._state.scorer.train_features(opened.method).kernel_times(0, features.features[0])
    assert len(fits) == 2  # one for each checkpoint


def test_descriptions_are_equal_by_content():
    assert Gram(0.1, blocks="layer") == Gram(0.1, blocks="layer") != Gram(0.2, blocks="layer")
    assert EKFACKernel(0.1) != EKFACKernel(0.1, fisher="sampled")
