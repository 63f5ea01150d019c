"""Query features: computed once, kept, reused, and refused where they do not belong."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import toy
import unde
from unde import Index, UndeError
from unde.index.query_features import QueryFeatures
from unde.methods import TRAK
from unde.tasks import Classification


@pytest.fixture
def runs():
    """How many examples each run of the model had."""
    return []


@pytest.fixture
def watched(tmp_path, runs):
    return toy.build(tmp_path / "i", task=toy.Watched(lambda batch: runs.append(len(batch[0]))))


def test_features_are_gradients_whatever_the_batch(tmp_path):
    index, queries = toy.build(tmp_path / "i"), toy.data(9, seed=3)
    made = index.features(queries)
    want = toy.gradients(toy.net(), Classification(), queries)
    torch.testing.assert_close(made.features[0], want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(made.loss[0], Classification().loss(toy.net(), queries).detach())
    assert len(made) == 9
    x, y = queries
    together = index.features((x, y)).features
    alone = torch.cat([index.features((x[i : i + 1], y[i : i + 1])).features for i in range(9)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-7)


def test_they_stand_for_the_queries(watched, runs):
    queries, names = toy.data(9, seed=3), ("tracin", "trak", "tracin-cosine")
    made = watched.features(queries)
    runs.clear()
    totals = [watched.score(made, method=m).total() for m in names]
    assert watched.features(made) is made
    assert runs == []  # the model is not run again
    for method, total in zip(names, totals):
        assert torch.equal(watched.score(queries, method=method).total(), total)
    assert runs != []


def test_they_are_kept_and_reused(watched, runs, tmp_path):
    queries, path = toy.data(9, seed=3), tmp_path / "deep" / "q.safetensors"
    made = watched.features(queries, path=path)
    runs.clear()
    again = watched.features(queries, path=path)
    assert runs == []
    assert torch.equal(made.features, again.features) and torch.equal(made.loss, again.loss)
    assert made.digests == again.digests
    moved = path.rename(tmp_path / "renamed.safetensors")  # a user's file, under the user's name
    assert torch.equal(Index.open(watched.folder).features(queries, path=moved).features, made.features)


def test_files_of_something_else_or_damaged(tmp_path):
    index, path = toy.build(tmp_path / "i"), tmp_path / "q.safetensors"
    index.features(toy.data(9, seed=3), path=path)
    for other in (toy.data(9, seed=4), toy.data(8, seed=3)):
        with pytest.raises(UndeError, match="holds the features of other queries"):
            index.features(other, path=path)
    with pytest.raises(UndeError, match="does not hold query features"):
        index.features(toy.data(9, seed=3), path=toy.shard_files(index)[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UndeError, match=r"truncated or damaged.*choose another path, or delete it"):
        index.features(toy.data(9, seed=3), path=path)


@pytest.mark.parametrize(
    "other",
    [
        {"model": toy.net(4)},
        {"seed": 3},
        {"method": TRAK(projection="none")},
        {"train_data": toy.data(22, 5)},
    ],
    ids=lambda o: next(iter(o)),
)
def test_features_for_another_index_are_refused(tmp_path, other):
    index, stranger = toy.build(tmp_path / "i"), toy.build(tmp_path / "j", **other)
    queries, path = toy.data(9, seed=3), tmp_path / "q.safetensors"
    made = index.features(queries, path=path)
    with pytest.raises(UndeError, match="computed for another index"):
        stranger.score(made)
    with pytest.raises(UndeError, match=r"does not hold query features of this index .*foreign"):
        stranger.features(queries, path=path)


def test_a_loader_brings_its_own_collate(tmp_path):
    def doubled(rows):
        x, y = torch.utils.data.default_collate(rows)
        return 2 * x, y

    x, y = toy.data(22)
    loader = DataLoader(TensorDataset(x / 2, y), collate_fn=doubled)
    index = toy.build(tmp_path / "i", train_data=loader)
    plain = toy.build(tmp_path / "j")
    assert torch.equal(toy.stored(index).block(0, 0), toy.stored(plain).block(0, 0))
    q, labels = toy.data(5, seed=3)
    halves = DataLoader(TensorDataset(q / 2, labels), collate_fn=doubled)
    want = plain.score((q, labels)).total()
    assert torch.equal(plain.score(halves).total(), want)
    assert torch.equal(index.score((q / 2, labels)).total(), want)


NO_LABELS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("queries", "said"),
    [
        ((torch.randn(4, 7), NO_LABELS), r"cannot run on query 0 \(RuntimeError: mat1"),
        ((torch.randn(4, 5, 5), NO_LABELS), r"logits of shape \(4, 5, 3\) for labels of shape \(4,\)"),
        ((torch.randn(4, 5), torch.tensor([0, 1, 9, 2])), "query 2 has the label 9"),
        ((torch.randn(4, 5),), "batch of Classification is"),
        ((torch.randn(4, 5), torch.zeros(3)), "columns of different lengths"),
        ([], "empty"),
        (7, "data of type int cannot be read by position"),
    ],
    ids=["width", "dims", "label", "no labels", "columns", "empty", "int"],
)
def test_queries_that_do_not_fit(tmp_path, queries, said):
    with pytest.raises(UndeError, match=said):
        toy.build(tmp_path / "i").score(queries)


def test_queries_that_read_differently_each_time(tmp_path):
    class Augmented(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return (x + torch.randn(()) if i == 7 else x), y

    with pytest.raises(UndeError, match="example 7 of the queries reads differently"):
        toy.build(tmp_path / "i").score(Augmented(*toy.data(9, seed=3)))


def test_digests_are_of_content(tmp_path):
    index, (x, y) = toy.build(tmp_path / "i"), toy.data(9, seed=3)
    one, two = index.score((x, y)), index.score((x[2:5], y[2:5]))
    assert len(set(one.query_digests)) == 9
    assert two.query_digests == one.query_digests[2:5]
    torch.testing.assert_close(one.total()[2:5], two.total(), rtol=1e-5, atol=1e-7)


def test_scoring_leaves_the_model_as_it_was(tmp_path):
    model = toy.net()
    model.train()
    model[0].weight.grad = torch.ones(6, 5)
    index = toy.build(tmp_path / "i", model=model, checkpoints=toy.states(1, 2))
    index.score(toy.data(3))
    with pytest.raises(UndeError):
        index.score((torch.randn(3, 9), torch.zeros(3, dtype=torch.long)))
    assert all(torch.equal(v, toy.net().state_dict()[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model[0].weight.grad, torch.ones(6, 5))
    assert not model[0]._forward_hooks


def test_sets_and_contrasts_of_queries(tmp_path):
    """Gradients add up, so scores of additive methods do."""
    index, (x, y) = toy.build(tmp_path / "i"), toy.data(9, seed=5)
    scores = index.score((x, y)).total()
    a, b = index.features((x[:5], y[:5])), index.features((x[5:], y[5:]))
    torch.testing.assert_close(index.score(a.mean()).total(), scores[:5].mean(0, keepdim=True))
    contrast = a.mean() - b.mean()
    wanted = scores[:5].mean(0) - scores[5:].mean(0)
    torch.testing.assert_close(index.score(contrast).total()[0], wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(index.score(a - b.mean()).total()[2], scores[2] - scores[5:].mean(0))
    contrast.save(tmp_path / "kept.safetensors")
    m = index.manifest
    kept = QueryFeatures.load(tmp_path / "kept.safetensors", m.lineage, (m.terms, m.width))
    assert torch.equal(kept.features, contrast.features) and kept.digests == contrast.digests
    with pytest.raises(UndeError, match=r"5 queries less 4: .* a.mean\(\) - b.mean\(\)"):
        a - b
    with pytest.raises(UndeError, match="two indexes"):
        a - replace(b, index="another")
    weights = unde.learn_weights(index.score(b.mean() - a), k=3, weight_decay=0.1)
    assert sorted(weights.query_digests)[0] in a.digests + b.digests
    with pytest.raises(UndeError, match="learned on 1 of these 1 queries"):
        index.score(a.mean()).total(weights)
    train = index.features(tuple(c[:3] for c in toy.data(22)))
    with pytest.raises(UndeError, match="1 of the queries are also in the training data"):
        unde.learn_weights(index.score(train.mean() - a.mean()), k=3, weight_decay=0.1)
