"""Appended to, removed from or merged, an index scores as one that was built at once on the same examples.

Where the same sums are made in the same order the scores are equal to the last bit, else within TOLERANCE, of float32.
"""

import json

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import Classification

TOLERANCE = 2e-6  # of the largest score
QUERIES, ALL = toy.data(3, seed=3), toy.data(37)
METHODS = {
    "tracin": TracIn(projection="none"),
    "cosine": TracIn(projection="sjlt(20)", cosine=True),
    "trak": TRAK(projection="kron(3)"),
    "trak-dual": TRAK(projection="none", form="dual"),
    "logra": LoGRA(projection="kron(2)"),
    "logra-full": LoGRA(projection="kron(2)", blocks="full"),
    "ekfac": EKFAC(projection="kron(3)"),
    "ekfac-unprojected": EKFAC(projection="none"),
    "ekfac-sampled": EKFAC(projection="kron(3)", fisher="sampled"),
}
some_methods = pytest.mark.parametrize("name", ["trak", "logra", "ekfac-sampled"])
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def some(where, data=ALL):
    return tuple(column[where] for column in data)


def part(start, stop):
    return some(slice(start, stop))


def left_of(*gone, n=37):
    """The positions of the examples that were not removed."""
    return torch.tensor([i for i in range(n) if i not in gone])


def grown(folder, at, **options):
    """An index of the first examples, to which the others were appended."""
    index = toy.build(folder, train_data=part(0, at), **options)
    index.append(part(at, 37), progress=False)
    return index


def assert_close(index, want, tolerance=TOLERANCE):
    for got, expected in (
        (index.score(QUERIES).total(), want.score(QUERIES).total()),
        (index.score(QUERIES).by_group(), want.score(QUERIES).by_group()),
        (index.self_influence(), want.self_influence()),
    ):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@every_method
def test_appended_is_as_built_at_once(tmp_path, method):
    index = toy.build(tmp_path / "i", train_data=part(0, 24), method=method)
    index.score(QUERIES)  # a kernel of the index as it was
    index.append(part(24, 37), progress=False)
    whole = toy.build(tmp_path / "w", train_data=ALL, method=method)
    assert len(index) == 37
    if method.probe is None:  # 24 is a whole number of passes and shards: the same passes, the same sums
        assert torch.equal(index.score(QUERIES).total(), whole.score(QUERIES).total())
    assert_close(index, whole)
    opened = Index.open(index.folder, model=toy.net(), task=Classification(), train_data=ALL)
    assert torch.equal(opened.score(QUERIES).total(), index.score(QUERIES).total())
    assert opened.manifest.data == whole.manifest.data
    assert opened.verify()


@some_methods
def test_one_by_one_fills_up_the_last_shard(tmp_path, name):
    method = METHODS[name]
    index = toy.build(tmp_path / "i", train_data=part(0, 21), method=method)
    for i in range(21, 26, 2):
        index.append(part(i, i + 2), progress=False)
    whole = toy.build(tmp_path / "w", train_data=part(0, 27), method=method)
    stops = [[s.stop for s in i.manifest.shards] for i in (index, whole)]
    assert stops[0] == stops[1] == [8, 16, 24, 27]
    assert_close(index, whole)


@every_method
def test_removed_is_as_never_there(tmp_path, method):
    index = toy.build(tmp_path / "i", train_data=ALL, method=method)
    gone = [0, 3, 9, *range(16, 24), 30, 36]  # of them a whole shard
    left = left_of(*gone)
    index.score(QUERIES)
    index.remove(indices=gone)
    want = toy.build(tmp_path / "w", train_data=some(left), method=method)
    if method.probe is None:
        assert_close(index, want)
    else:  # labels are drawn by the number that an example had: those of the others stay as they were drawn
        full = toy.build(tmp_path / "f", train_data=ALL, method=method)
        rows = toy.stored(full).fisher("sampled").rows(left)
        assert torch.equal(toy.stored(index).fisher("sampled").rows(torch.arange(len(left))), rows)
    opened = Index.open(index.folder, model=toy.net(), task=Classification(), train_data=some(left))
    assert torch.equal(opened.score(QUERIES).total(), index.score(QUERIES).total())
    assert opened.manifest.data == want.manifest.data
    assert opened.verify()


@some_methods
def test_append_then_remove_is_nothing(tmp_path, name):
    method = METHODS[name]
    index = grown(tmp_path / "i", 22, method=method)
    want = toy.build(tmp_path / "w", train_data=part(0, 22), method=method)
    index.remove(indices=range(22, 37))
    assert_close(index, want)
    if not method.factors:  # covariances came and went, which leaves rounding behind
        assert torch.equal(index.score(QUERIES).total(), want.score(QUERIES).total())


@every_method
def test_two_halves_merged_are_the_whole(tmp_path, method):
    one = toy.build(tmp_path / "1", train_data=part(0, 19), method=method)
    other = toy.build(tmp_path / "2", train_data=part(19, 37), method=method)
    Index.merge([one, tmp_path / "2"], tmp_path / "m")
    index = Index.open(tmp_path / "m", model=toy.net(), task=Classification(), train_data=ALL)
    if method.probe is None:
        assert_close(index, toy.build(tmp_path / "w", train_data=ALL, method=method))
    else:  # labels of the second half were drawn by their numbers there: its covariances are added as they are
        sums = [fisher_sums(i) for i in (index, one, other)]
        torch.testing.assert_close(sums[0], sums[1] + sums[2])
    assert index.verify()
    assert "merged from 19 of 1 and 18 of 2" in repr(index)


def fisher_sums(index):
    stored = toy.stored(index).fisher("sampled")
    return sum(stored.shard(0, s)["factors"].double() for s in range(len(stored.manifest.shards)))


def test_against_autograd(tmp_path):
    """TRAK of what is left after all of it, from gradients that are taken one by one."""
    index = toy.build(tmp_path / "i", train_data=part(0, 20), method=TRAK(projection="none", form="primal"))
    index.append(part(20, 31), progress=False)
    index.remove(indices=[2, 19, 20, 25])
    index.append(part(31, 37), progress=False)
    left = left_of(2, 19, 20, 25)
    phi = toy.gradients(toy.net(), Classification(), some(left)).double()
    q = toy.gradients(toy.net(), Classification(), QUERIES).double()
    gram = phi.T @ phi
    want = q @ torch.linalg.solve(gram + 0.1 * gram.diagonal().mean() * torch.eye(len(gram)), phi.T)
    got = index.score(QUERIES).total().double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max())


def test_covariances_are_those_of_what_is_left(tmp_path):
    """Both ways: the removed are taken from the sum, or the rest is summed anew."""
    for gone in ([5], [0, 1, 2, 4, 5, 6, 7]):
        index = toy.build(tmp_path / f"{len(gone)}", train_data=part(0, 16), method=EKFAC(projection="none"))
        index.remove(indices=gone)
        x = some(left_of(*gone, n=16))[0].double()
        torch.testing.assert_close(toy.factors(index)["0.weight"][1], x.T @ x, rtol=1e-5, atol=1e-5)


def test_checkpoints(tmp_path):
    options = {"checkpoint_weights": [0.3, 0.7], "method": EKFAC(projection="kron(3)")}
    options |= {"checkpoints": toy.states(1, 2)}
    index = grown(tmp_path / "i", 21, **options)
    index.remove(indices=[1, 22])
    assert_close(index, toy.build(tmp_path / "w", train_data=some(left_of(1, 22)), **options))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_half_precision(tmp_path, dtype):
    options = {"method": TRAK(projection="kron(3)"), "store_dtype": dtype}
    index = grown(tmp_path / "i", 24, **options)
    whole = toy.build(tmp_path / "w", train_data=ALL, **options)
    assert torch.equal(index.score(QUERIES).total(), whole.score(QUERIES).total())
    index.remove(indices=[7])
    kept, stored = toy.stored(index).rows(torch.arange(36)), toy.stored(whole).rows(left_of(7))
    assert torch.equal(kept, stored)  # rounded once, not twice


def test_whitening_stays(tmp_path):
    """It is that of the examples that the index was built on, for later ones and for queries; rank 8 is exact here."""
    index = toy.build(tmp_path / "i", train_data=part(0, 24), method=EKFAC(projection="factored(8)"))
    before = index.features(QUERIES)
    later = index.features(part(24, 37)).features
    matrices = (index.folder / "projection.safetensors").read_bytes()
    index.append(part(24, 37), progress=False)
    stored = toy.stored(index).rows(torch.arange(37))
    assert (stored[:, 24:] - later).norm() < 0.02 * later.norm()  # stored in int8
    other = toy.build(tmp_path / "all", train_data=ALL, method=EKFAC(projection="factored(8)"))
    assert (toy.stored(other).rows(torch.arange(24, 37)) - later).norm() > 0.1 * later.norm()
    assert (index.folder / "projection.safetensors").read_bytes() == matrices
    want = before.features[0] @ stored[0].T
    torch.testing.assert_close(index.score(before).total(), want)
    assert "the whitening is that of the 24 examples it was built on" in str(index.verify())
    # as it is now: nothing to do
    again = toy.build(tmp_path / "i", train_data=ALL, method=EKFAC(projection="factored(8)"))
    assert again.manifest == index.manifest


def test_features_of_queries_stay_valid(tmp_path):
    index = toy.build(tmp_path / "i", train_data=part(0, 22), method=TRAK(projection="kron(3)"))
    kept = tmp_path / "i" / "queries" / "some.safetensors"
    features = index.features(QUERIES, kept)
    index.append(part(22, 37), progress=False)
    index.remove(indices=[4])
    opened = toy.reopen(index)
    want = opened.score(QUERIES).total()
    assert torch.equal(opened.score(features).total(), want)
    assert torch.equal(opened.score(opened.features(QUERIES, kept)).total(), want)
    assert opened.verify()


def test_ids_move_with_their_examples(tmp_path):
    names = [f"#{i}" for i in range(37)]
    index = toy.build(tmp_path / "i", train_data=part(0, 22), ids=names[:22])
    index.append(part(22, 37), ids=names[22:], progress=False)
    index.remove(["#3", "#30"])
    left = [n for n in names if n not in ("#3", "#30")]
    assert list(index.ids) == left == toy.reopen(index).ids
    q, g = (toy.gradients(toy.net(), Classification(), data) for data in (QUERIES, ALL))
    want = q @ g.T
    want[:, [3, 30]] = -torch.inf
    top = index.score(QUERIES).top(4)
    assert top.ids == [[names[i] for i in row] for row in want.topk(4).indices.tolist()]


def test_a_document_is_removed_with_all_its_parts(tmp_path):
    names = [f"doc-{i // 4}:{1 + i % 4}" for i in range(20)] + ["doc-1", "doc-1x:1"]
    index = toy.build(tmp_path / "i", train_data=part(0, 22), ids=names)
    index.remove(["doc-3", "doc-0:2"])
    left = [n for n in names if not n.startswith("doc-3") and n != "doc-0:2"]
    assert index.ids == left
    index.remove(["doc-1"])  # the example of that name
    assert index.ids == [n for n in left if n != "doc-1"]
    with pytest.raises(UndeError, match=r"1 of the ids are not in the index: 'doc-9'"):
        index.remove(["doc-9", "doc-4"])


def test_the_data_of_the_index_follows(tmp_path):
    """What the index has at hand, and what it takes from data that still holds what was removed."""
    index = grown(tmp_path / "i", 22)
    index.remove(indices=[0, 5, 22])
    left = [i for i in range(37) if i not in (0, 5, 22)]
    assert all(torch.equal(index.train_data[n][0], ALL[0][i]) for n, i in enumerate(left))
    backwards = some(torch.arange(36, -1, -1))
    for data in (ALL, backwards):
        opened = Index.open(index.folder, model=toy.net(), task=Classification(), train_data=data)
        assert all(torch.equal(opened.train_data[n][0], ALL[0][i]) for n, i in enumerate(left))
    with pytest.raises(UndeError, match=r"14 of its examples are not in what is given .*appended 15"):
        Index.open(index.folder, train_data=part(0, 22))


def test_weights_learned_on_a_changed_index(tmp_path):
    data = toy.data(240)
    index = toy.build(tmp_path / "i", train_data=some(slice(0, 200), data))
    index.append(some(slice(200, 240), data), progress=False)
    index.remove(indices=[7, 210])
    whole = toy.build(tmp_path / "w", train_data=some(left_of(7, 210, n=240), data))
    weights = index.learn_weights(examples=20)
    assert torch.allclose(weights.values, whole.learn_weights(examples=20).values, atol=1e-4)


def test_damage_is_repaired_by_the_same_build(tmp_path):
    """With the data as it is now; labels are drawn by the numbers that examples had."""
    method = EKFAC(projection="kron(3)", fisher="sampled")
    index = grown(tmp_path / "i", 24, method=method)
    index.remove(indices=[2, 30])
    want = index.score(QUERIES).total()
    for path in [*(index.folder / "shards").iterdir(), *(index.folder / "fisher" / "shards").iterdir()]:
        path.unlink()
    index.verify()
    again = toy.build(tmp_path / "i", train_data=some(left_of(2, 30)), method=method)
    assert again.manifest == index.manifest
    torch.testing.assert_close(again.score(QUERIES).total(), want, rtol=1e-4, atol=1e-5)


def test_skipped_examples(tmp_path):
    x, y = toy.data(37)
    x[3], x[30] = float("nan"), float("nan")
    options = {"method": EKFAC(projection="none"), "on_bad": "skip"}
    index = toy.build(tmp_path / "i", train_data=(x[:22], y[:22]), **options)
    index.append((x[22:], y[22:]), progress=False)
    assert index.skipped.nonzero()[:, 0].tolist() == [3, 30]
    index.remove(indices=[3, 4])
    good = x[left_of(3, 4, 30)].double()
    torch.testing.assert_close(toy.factors(index)["0.weight"][1], good.T @ good, rtol=1e-5, atol=1e-5)


def test_the_history_is_told(tmp_path):
    index = toy.build(tmp_path / "i", train_data=part(0, 22), ids=list(range(22)))
    assert "appended" not in repr(index)
    index.append(part(22, 37), ids=range(22, 37), progress=False)
    index.remove(ids=[3])
    assert repr(index).endswith("36 × 57, 2 groups; appended 15, removed 1)")
    told = str(toy.reopen(index).verify())
    assert "appended 15 on 20" in told and "37 examples since then" in told
    assert "removed 1 on 20" in told and "36 examples since then" in told
    manifest = json.loads((index.folder / "manifest.json").read_text())
    assert [entry["what"] for entry in manifest["changes"]["history"]] == ["append", "remove"]


def test_no_byte_of_what_was_removed_is_left(tmp_path):
    """Not of its feature, its digest, its id, nor of K g(n)."""
    options = {"ids": [f"name-{i}" for i in range(37)], "method": TRAK(projection="kron(3)")}
    index = toy.build(tmp_path / "i", train_data=ALL, **options)
    index.score(QUERIES)
    secrets = [toy.stored(index).shard(0, 1)[name][3].numpy().tobytes() for name in ("features", "digest")]
    secrets += [toy.training(index, index.method).block(1)[0][3].numpy().tobytes(), b"name-11"]
    found = b"".join(toy.content(index.folder).values())
    assert all(secret in found for secret in secrets)
    index.remove(["name-11"])
    index.score(QUERIES)
    left = b"".join(toy.content(index.folder).values())
    assert not any(secret in left for secret in secrets)


def test_other_shards_are_not_written_again(tmp_path):
    index = toy.build(tmp_path / "i", train_data=ALL)
    before = {p.name: p.stat().st_ino for p in toy.shard_files(index)}
    index.remove(indices=[9])
    after = {p.name: p.stat().st_ino for p in toy.shard_files(index)}
    assert {name: after.get(name) for name in before} == before | {"c00-000001.safetensors": None}
