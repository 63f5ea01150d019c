"""Whole gradients stored as a few outer products; for EKFAC whitened before they are truncated."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import toy
import unde
from oracles import slow_gradients
from unde import UndeError
from unde.data import Rows
from unde.index.calibration import list_settings
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.projection import feature_size
from unde.store.factored import Factored, choose_ranks, sides_of
from unde.tasks import Classification

TOKENS, WORDS, CLASSES = 6, 11, 4


class Words(nn.Module):
    """An embedding, linear layers, a norm and a convolution."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(WORDS, 5), nn.Linear(5, 8), nn.LayerNorm(8)
        self.conv, self.out = nn.Conv1d(8, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(self.conv(self.norm(self.up(self.embed(x))).mT).relu().mean(-1))


def words(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Words()


def texts(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (n, TOKENS), generator=g), torch.randint(CLASSES, (n,), generator=g)


TRAIN, QUERIES = texts(22), texts(5, seed=3)


def build(folder, method, **options):
    return toy.build(folder, model=words(), train_data=options.pop("data", TRAIN), method=method, **options)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def slow_kernel(index, kernel_of="empirical", damping=0.1, scope="layer"):
    """(Λ + λ)⁻¹ along the bases of an index of whole gradients: a dense matrix for each parameter, as K-FAC has it."""
    source, shapes = toy.stored(index).source(kernel_of, 0), [u["shape"] for u in index.manifest.units]
    shards = range(len(source.sizes.cuts))
    gradients = torch.cat([source.block(s) for s in shards]).double()
    bases, spectra = [], []
    for part, shape in zip(source.sizes.parts, shapes):
        g, sides = gradients[:, part.columns], [shape[0], part.size // shape[0]]
        pairs = [source.factors(s).get(part.name) for s in shards]
        if len(shape) < 2 or pairs[0] is None:
            values, basis = torch.linalg.eigh(g.T @ g)
        else:
            found = []
            for i in range(2):
                if pairs[0][i] is None:  # coordinates, and the squares along them
                    found.append((g.unflatten(1, sides).square().sum((0, 2 - i)), torch.eye(sides[i])))
                else:
                    values, basis = torch.linalg.eigh(sum(pair[i].double() for pair in pairs))
                    taps = torch.eye(sides[i] // len(basis))
                    found.append((values.repeat_interleave(len(taps)), torch.kron(basis.contiguous(), taps)))
            values = torch.kron(found[0][0], found[1][0])
            values, basis = values * g.square().sum() / values.sum(), torch.kron(found[0][1], found[1][1])
        bases.append(basis.double())
        spectra.append(values.clamp(min=0) * source.sizes.labels / source.sizes.examples)
    mean = torch.cat(spectra).mean()
    inverses = [1 / (v + damping * (mean if scope == "model" else v.mean())) for v in spectra]
    return [q @ (inverse.unsqueeze(1) * q.T) for q, inverse in zip(bases, inverses)]


def slow_scores(index, queries, examples, **options):
    """(M, Q, N) ⟨g_q, K g_n⟩ of each group, from features of an index of whole gradients."""
    out = dict.fromkeys(index.manifest.groups, 0.0)
    [g], [h] = queries.features.double(), examples.features.double()
    for name, columns, k in zip(
        index.manifest.unit_names, index.manifest.columns, slow_kernel(index, **options)
    ):
        group = next(key for key, members in index.manifest.groups.items() if name in members)
        out[group] = out[group] + g[:, columns] @ k @ h[:, columns].T
    return torch.stack(list(out.values()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return build(tmp_path_factory.mktemp("whole") / "i", EKFAC("none"), store_dtype="float32")


@pytest.fixture(scope="module")
def full_rank(tmp_path_factory):
    """Enough outer products for every matrix, so that all are stored in int8."""
    return build(tmp_path_factory.mktemp("factored") / "i", EKFAC("factored(12)"))


def test_whitened_queries_are_exact(whole, full_rank):
    """⟨feature, feature⟩ of whitened queries is ⟨g, K g⟩ of whole gradients."""
    g, white = whole.features(QUERIES), full_rank.features(QUERIES).features[0]
    assert relative(white @ white.T, slow_scores(whole, g, g).sum(0)) < 2e-5


def test_full_rank_scores_are_those_of_whole_gradients(whole, full_rank):
    queries, examples = whole.features(QUERIES), whole.features(TRAIN)
    for damping in (0.01, 0.1, 10.0):
        expected = slow_scores(whole, queries, examples, damping=damping).sum(0)
        assert relative(full_rank.score(QUERIES, EKFAC(damping=damping)).total(), expected) < 0.01
    method = EKFAC(damping=0.3, damping_scope="model")
    a = full_rank.score(QUERIES, method).by_group()
    b = slow_scores(whole, queries, examples, damping=0.3, scope="model")
    assert relative(a, b.movedim(0, 2)) < 0.01


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_truncation_is_that_of_singular_values(tmp_path, full_rank, rank):
    """Stored matrices are the best of their rank to the whitened ones, but for int8."""
    index = build(tmp_path / "i", EKFAC(f"factored({rank})"))
    exact = full_rank.features(TRAIN).features[0]
    stored = torch.cat([toy.stored(index).block(0, s) for s in range(len(index.manifest.shards))])
    for unit, columns in zip(index.manifest.units, index.manifest.columns):
        matrices = exact[:, columns]
        shape, rank = (unit["shape"][0], unit["size"] // unit["shape"][0]), unit.get("rank", 0)
        if len(unit["shape"]) > 1 and rank * (sum(shape) + 4) < unit["size"] + 4:
            u, s, v = torch.linalg.svd(matrices.view(-1, *shape), full_matrices=False)
            matrices = ((u[..., :rank] * s[:, None, :rank]) @ v[:, :rank]).flatten(1)
        if matrices.any():
            assert relative(stored[:, columns], matrices) < 0.02, unit["name"]
        else:
            assert not stored[:, columns].any(), unit["name"]


def test_bytes_are_spent_where_whitened_gradients_have_most_energy(tmp_path, full_rank):
    """The ranks are those for the singular values of the sample, which here has all examples."""
    with mock.patch("unde.index.projection_matrices.SHARE", 1):
        index = build(tmp_path / "i", EKFAC("factored(2)"))
    m, energies = index.manifest, []
    for unit, matrices in zip(
        m.units, full_rank.features(TRAIN).features[0].split([u["size"] for u in m.units], 1)
    ):
        square = matrices.unflatten(1, (unit["shape"][0], -1))
        energies.append(
            [] if len(unit["shape"]) < 2 else torch.linalg.svdvals(square).square().sum(0).tolist()
        )
    sides = sides_of(m.units, "factored(2)")
    assert tuple(u.get("rank", 0) for u in m.units) == choose_ranks(2, sides, energies)
    assert len({u["rank"] for u in m.units if "rank" in u}) > 1  # or this would test nothing
    assert m.codec.nbytes(1, m.columns) <= Factored(2, sides).nbytes(1, m.columns)


def test_indexes_with_one_number_of_products_for_all_matrices_open(tmp_path):
    """As they were built before each matrix had its own."""
    with mock.patch("unde.index.projection_matrices._energies", return_value={}):
        index = build(tmp_path / "i", EKFAC("factored(2)"))
    assert not any("rank" in u for u in index.manifest.units)
    before = index.score(QUERIES).total()
    toy.shard_files(index)[1].unlink()
    again = build(tmp_path / "i", EKFAC("factored(2)"))
    assert again.manifest == index.manifest
    assert_close(again.score(QUERIES).total(), before, rtol=0, atol=0)
    again.append(texts(4, seed=9))
    assert_close(again.score(QUERIES).total()[:, :22], before)


@pytest.mark.parametrize(
    "method", [TracIn(), TracIn(metric="diagonal"), LoGRA()], ids=["tracin", "metric", "logra"]
)
def test_kernels_without_whitening_keep_raw_gradients(tmp_path, whole, method):
    raw = build(tmp_path / "i", replace(method, projection="factored(12)"))
    assert_close(raw.features(QUERIES).features, whole.features(QUERIES).features)
    assert relative(raw.score(QUERIES).total(), whole.score(QUERIES, method).total()) < 0.02


def test_whitened_features_answer_for_ekfac_alone(full_rank):
    for method in ("tracin", TRAK(), EKFAC(fisher="sampled")):
        with pytest.raises(UndeError, match=r"whitened for EKFAC.*projection='none' for all methods"):
            full_rank.score(QUERIES, method)


@pytest.mark.parametrize("fisher", ["sampled", "true"])
def test_whitening_by_other_labels(tmp_path, fisher):
    """Curvature of sampled or of all labels, without storing their gradients."""
    method = EKFAC("none", fisher=fisher)
    whole = build(tmp_path / "whole", method, store_dtype="float32")
    index = build(tmp_path / "i", EKFAC("factored(12)", fisher=fisher))
    expected = slow_scores(whole, whole.features(QUERIES), whole.features(TRAIN), kernel_of=fisher).sum(0)
    assert relative(index.score(QUERIES).total(), expected) < 0.02
    assert not [p for p in index.folder.iterdir() if p.name.startswith("fisher")]


def test_parameters_may_be_whitened_one_after_the_other(tmp_path, capsys):
    """A budget that holds the sums of one parameter at a time changes the rounds, not the matrices."""
    build(tmp_path / "one", EKFAC("factored(2)"))
    with mock.patch("unde.gradients.whitening._split", side_effect=lambda sizes, most: [[n] for n in sizes]):
        build(tmp_path / "two", EKFAC("factored(2)"), progress=True)
    assert toy.content(tmp_path / "one") == toy.content(tmp_path / "two")


def test_matrices_may_stay_in_their_file(tmp_path, full_rank):
    with mock.patch("unde.index.projection_matrices.MAPPED", 16), mock.patch("unde.store.shards.MAPPED", 16):
        index = build(tmp_path / "i", EKFAC("factored(12)"))
        assert relative(index.score(QUERIES).total(), full_rank.score(QUERIES).total()) < 1e-6


def test_every_operation_of_an_index(tmp_path):
    """Self-influence, weights, append, remove and verify work as for other features."""
    index = build(tmp_path / "i", EKFAC("factored(2)"), ids=list(range(22)))
    total = index.score(TRAIN).total()
    assert_close(index.self_influence(), total.diagonal(), rtol=0.1, atol=float(total.abs().max()) / 50)
    weights = unde.learn_weights(index.score(QUERIES), k=3)
    assert weights.values.shape == (len(index.manifest.groups),)
    more = texts(4, seed=9)
    before = index.score(QUERIES).total()
    index.append(more, ids=list(range(22, 26)))
    assert_close(index.score(QUERIES).total()[:, :22], before)
    index.remove([0, 25])
    assert_close(index.score(QUERIES).total()[:, :21], before[:, 1:])
    assert not index.verify().problems


def test_builds_resume_with_the_same_bytes(tmp_path):
    build(tmp_path / "one", EKFAC("factored(2)"))
    two = build(tmp_path / "two", EKFAC("factored(2)"))
    toy.shard_files(two)[1].unlink()
    build(tmp_path / "two", EKFAC("factored(2)"))
    assert toy.content(tmp_path / "two") == toy.content(tmp_path / "one")


def test_tables_have_no_covariance_over_their_rows(whole):
    factors = toy.stored(whole).source("empirical", 0).factors(0)
    assert factors["embed.weight"][0] is None and factors["embed.weight"][1].shape == (5, 5)


def test_covariance_of_a_table_is_that_of_its_gradients(tmp_path):
    """Σ_n G_nᵀ G_n of whole gradients, by single backward passes."""
    index = build(tmp_path / "i", EKFAC("none"))
    gradients = slow_gradients(words(), Classification(), Rows(TRAIN))["embed.weight"]
    shards = range(len(index.manifest.shards))
    total = sum(toy.stored(index).source("empirical", 0).factors(s)["embed.weight"][1] for s in shards)
    assert_close(total, torch.einsum("nrc,nrd->cd", gradients, gradients), rtol=1e-4, atol=1e-7)


def test_bad_input(tmp_path):
    with pytest.raises(UndeError, match=r"factored\(0\)"):
        EKFAC("factored(0)")
    with pytest.raises(UndeError, match=r"expected 1 to 64 outer products.*'none' keeps whole gradients"):
        EKFAC("factored(65)")
    with pytest.raises(UndeError, match="leave store_dtype out"):
        build(tmp_path / "i", EKFAC("factored(2)"), store_dtype="int8")
    assert feature_size(unde.projection.Spec.parse("factored(2)"), (3, 4)) == 12


def test_features_of_many_queries_may_lie_in_a_file(full_rank):
    expected = full_rank.features(QUERIES).features
    with mock.patch("unde.store.shards.MAPPED", 16):
        assert_close(full_rank.features(QUERIES).features, expected, rtol=0, atol=0)
    with (
        mock.patch("unde.store.shards.MAPPED", 16),
        mock.patch("os.posix_fallocate", side_effect=OSError("disk full")),
        pytest.raises(UndeError, match=r"disk full.*ask fewer queries at once, or set TMPDIR"),
    ):
        full_rank.features(QUERIES)


def test_examples_that_are_not_finite_are_left_out_of_the_statistics(tmp_path):
    x, y = toy.data(22)
    bad = x.clone()
    bad[5] = torch.nan
    keep = [i for i in range(22) if i != 5]
    method = EKFAC("factored(12)")
    skipped = toy.build(tmp_path / "bad", train_data=(bad, y), method=method, on_bad="skip")
    without = toy.build(tmp_path / "good", train_data=(x[keep], y[keep]), method=method)
    queries = toy.data(3, seed=3)
    a, b = skipped.score(queries).total()[:, keep], without.score(queries).total()
    assert relative(a / a.norm(), b / b.norm()) < 0.02
    with pytest.raises(UndeError, match="example 5 is NaN or infinite"):
        toy.build(tmp_path / "error", train_data=(bad, y), method=method)


def test_long_patches_have_the_basis_of_input_channels(tmp_path):
    """The same scores from whitened features and from the kernel on whole gradients."""
    with mock.patch("unde.gradients.factors.LIMIT", 10):  # patches of 24 entries, 8 channels
        whole = build(tmp_path / "whole", EKFAC("none"), store_dtype="float32")
        assert toy.stored(whole).source("empirical", 0).factors(0)["conv.weight"][1].shape == (8, 8)
        white = build(tmp_path / "white", EKFAC("factored(12)"))
        g, w = whole.features(QUERIES), white.features(QUERIES).features[0]
        expected = slow_scores(whole, g, g).sum(0)
    assert relative(w @ w.T, expected) < 2e-5


def test_calibration_tries_methods_that_read_wide_gradients_once(tmp_path, whole):
    families = {curve[0].family for curve in list_settings(toy.stored(whole))}
    assert families > {"TRAK", "LoGRA", "EKFAC", "TracIn"}
    with mock.patch("unde.index.calibration.WIDE", 100):
        wide = {curve[0].family for curve in list_settings(toy.stored(whole))}
    assert wide == {f for f in families if not f.startswith(("TRAK", "LoGRA"))}
