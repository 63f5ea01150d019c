"""What cannot be appended, removed or merged: one error that says what is wrong, and the index stays as it is."""

import shutil

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.methods import EKFAC, TRAK, TracIn
from unde.parallel import Array
from unde.tasks import Classification


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    return toy.build(tmp_path_factory.mktemp("refused") / "named", ids=[f"#{i}" for i in range(22)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return toy.build(tmp_path_factory.mktemp("refused") / "plain")


def refused(index, match, change):
    before = toy.content(index.folder)
    with pytest.raises(UndeError, match=match):
        change()
    assert toy.content(index.folder) == before


MORE = toy.data(2, seed=5)


@pytest.mark.parametrize(
    ("data", "ids", "match"),
    [
        (MORE, None, r"has ids \('#0', '#1', '#2', …\): pass ids=, one for each of the 2"),
        (MORE, ["a"], "1 ids for 2 examples"),
        (MORE, ["a", "a"], "1 of the ids are given twice, or in the index already: 'a'"),
        (MORE, ["a", "#3"], "1 of the ids are given twice, or in the index already: '#3'"),
        (MORE, [None, "a"], "ids must be strings or numbers"),
        ([], [], "empty"),
        (toy.data(0), [], "empty"),
        (iter([1, 2]), ["a", "b"], "cannot be read by position"),
        ((MORE[0], MORE[1][:1]), ["a", "b"], "columns of different lengths"),
        ((MORE[0][:, :2], MORE[1]), ["a", "b"], "cannot run on example 'a'"),
        ((MORE[0], MORE[1] + 100), ["a", "b"], "example 'a' has the label 10[0-9]: expected a class number"),
    ],
)
def test_appending(named, data, ids, match):
    refused(named, match, lambda: named.append(data, ids=ids, progress=False))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "say which examples to remove"),
        ({"ids": ["#1"], "indices": [1]}, "one of the two"),
        ({"ids": []}, "nothing to remove"),
        ({"ids": ["#1", "x", "y"]}, "2 of the ids are not in the index: 'x', 'y'"),
        ({"ids": [1]}, "not in the index: 1.*to remove by position, pass indices="),
        ({"ids": [f"#{i}" for i in range(22)]}, "all 22 examples: delete the index"),
        ({"indices": range(22)}, "all 22 examples"),
        ({"indices": [22]}, "no example 22 in the index: expected positions from 0 to 21"),
        ({"indices": [-1]}, "no example -1"),
        ({"indices": ["#1"]}, "no example '#1'"),
    ],
)
def test_removing(named, given, match):
    refused(named, match, lambda: named.remove(**given))


def test_without_ids(tmp_path, plain):
    given = {"ids": ["a", "b"], "progress": False}
    refused(plain, "index has no ids: leave ids= out", lambda: plain.append(MORE, **given))
    refused(plain, r"no example 'a'.*\(it has no ids\)", lambda: plain.remove(["a"]))
    index = toy.build(tmp_path / "i")
    index.remove([3, 3, torch.tensor(5)])  # positions are its ids
    assert len(index) == 20


def test_opened_without_its_model(plain):
    bare = Index.open(plain.folder)
    refused(plain, "appended examples .*opened without its model, task", lambda: bare.append(MORE))


def test_removing_needs_no_model(tmp_path):
    toy.build(tmp_path / "i", method=TRAK(projection="kron(3)"))
    Index.open(tmp_path / "i").remove(indices=[3])
    assert len(Index.open(tmp_path / "i")) == 21


def test_removing_from_covariances_needs_one(tmp_path):
    index = toy.build(tmp_path / "i", method=EKFAC(projection="kron(3)"))
    bare = Index.open(index.folder)
    refused(
        index, "run through the model once more.*model=, task=, train_data=", lambda: bare.remove(indices=[3])
    )
    bare.remove(indices=range(8))  # a whole shard leaves with its sum
    assert len(bare) == 14


@pytest.mark.parametrize(("workers", "said"), [(1, "does a share of a build"), (2, "not finished")])
def test_one_of_an_array(tmp_path, workers, said):
    index = toy.build(tmp_path / "i", executor=Array(worker=0, of=workers))
    refused(index, said, lambda: index.remove(indices=[0]) if workers == 2 else index.append(MORE))


class Other(Classification):
    def identity(self):
        return super().identity() | {"name": "Other"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": toy.net(9)}, "the model's weights"),
        ({"task": Other()}, "task"),
        ({"seed": 1, "method": TracIn(projection="kron(3)")}, r"seed \(0 there, 1 in the other\)"),
        ({"groups": "tensor"}, r"the groups \(2 there, 4 in the other"),
        (
            {"store_dtype": "float16"},
            r"store_dtype \('float32' there, 'float16' in the other\)\.",
        ),
        ({"method": TRAK(projection="kron(3)")}, "method"),
        ({"exclude": ["^2"]}, "the parameters"),
        ({"on_bad": "skip"}, "on_bad"),
        ({"ids": list(range(22))}, r"the ids \(none there, some in the other\)"),
        ({"checkpoints": toy.states(1, 2)}, "checkpoints"),
        ({"method": EKFAC(projection="kron(3)")}, "covariances for EKFAC"),
    ],
)
def test_merging_what_was_not_measured_alike(tmp_path, options, match):
    kinds = {"method": TracIn(projection="kron(3)")}
    toy.build(tmp_path / "a", **kinds)
    toy.build(tmp_path / "b", train_data=toy.data(22, seed=4), **(kinds | options))
    with pytest.raises(
        UndeError, match=f"cannot be merged with .*not measured alike. What differs: .*{match}"
    ):
        Index.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_merging_other_whitening(tmp_path):
    method = EKFAC(projection="factored(2)")
    for seed in (0, 1):
        toy.build(tmp_path / f"{seed}", train_data=toy.data(22, seed=seed), method=method)
    with pytest.raises(UndeError, match=r"the whitening or the second moments.*Append the examples"):
        Index.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "m")


def test_merging_copies_that_grew_apart(tmp_path):
    """Whitened indexes can be merged where one began as a copy of the other."""
    one = toy.build(tmp_path / "a", method=EKFAC(projection="factored(2)"))
    shutil.copytree(one.folder, tmp_path / "b")
    other = Index.open(tmp_path / "b", model=toy.net(), task=Classification())
    other.append(toy.data(5, seed=7), progress=False)
    other.remove(indices=range(22))
    merged = Index.merge([one, other], tmp_path / "m")
    one.append(toy.data(5, seed=7), progress=False)
    made = Index.open(tmp_path / "m", model=toy.net(), task=Classification())
    queries = toy.data(3, seed=3)
    torch.testing.assert_close(made.score(queries).total(), one.score(queries).total())
    assert len(merged) == 27


def test_merging_wrongly(tmp_path, named, plain):
    with pytest.raises(UndeError, match="expected two or more"):
        Index.merge([named], tmp_path / "m")
    with pytest.raises(UndeError, match="are one index"):
        Index.merge([named, named.folder], tmp_path / "m")
    other = toy.build(tmp_path / "b", train_data=toy.data(22, seed=4), ids=[f"#{i + 20}" for i in range(22)])
    with pytest.raises(UndeError, match="2 ids are in more than one of the indexes, such as '#20'"):
        Index.merge([named, other], tmp_path / "m")
    with pytest.raises(UndeError, match="holds an index already"):
        Index.merge([plain, toy.build(tmp_path / "c", train_data=toy.data(9, seed=4))], other.folder)
    with pytest.raises(UndeError, match="holds no unde index"):
        Index.merge([plain, tmp_path / "nowhere"], tmp_path / "m")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UndeError, match="holds something else"):
        Index.merge([plain, tmp_path / "c"], tmp_path / "full")
