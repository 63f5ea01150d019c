"""Scores of any library: what is done with them is what is done with the scores that they are a copy of."""

import numpy as np
import pytest
import torch
from random_group_scores import random_scores

import toy
import unde
from unde import Setup, UndeError, Weights, learn_weights
from unde.data import Rows
from unde.evaluate import compare, fine_grained, lds, lds_strength
from unde.scoring import from_arrays
from unde.scoring.arrays import ArrayScores
from unde.ui.report.panels import query_panels
from unde.ui.report.weights import weights_panels

W = [0.3, 2.0, 1.0]


def copies(tmp_path):
    """The same numbers in every kind of array."""
    values = random_scores(6, 23).by_group().numpy()
    file = np.memmap(tmp_path / "s.bin", np.float64, "w+", shape=values.shape)
    file[:] = values
    return {
        "numpy": values,
        "torch": torch.tensor(values, requires_grad=True),
        "double": values.astype(np.float64),
        "strided": np.asfortranarray(values),
        "memmap": file,
    }


@pytest.mark.parametrize("memory", [1, 10**9])
def test_totals_tops_and_weights_are_those_of_the_scores(tmp_path, memory):
    scores = random_scores(6, 23)
    for kind, values in copies(tmp_path).items():
        found = from_arrays(values, groups=scores.groups, memory=memory)
        assert found.shape == (6, 23) and found.groups == scores.groups and len(found) == 6
        for w in (None, W, Weights(torch.tensor(W), scores.groups)):
            torch.testing.assert_close(found.total(w), scores.total(w), rtol=2e-5, atol=2e-6)
            assert torch.equal(found.top(9, w).indices, scores.top(9, w).indices), kind
            lowest = (s.top(3, w, largest=False).indices for s in (found, scores))
            assert torch.equal(*lowest)
        torch.testing.assert_close(found.by_group(), scores.by_group())
        learned = learn_weights(found, k=3, weight_decay=0.1)
        torch.testing.assert_close(learned.values, learn_weights(scores, k=3, weight_decay=0.1).values)
        assert not torch.allclose(learned.values, torch.ones(3), atol=0.01)


def test_a_bare_array_is_enough():
    values = random_scores(6, 23).by_group()
    want = learn_weights(from_arrays(values), k=3, weight_decay=0.1)
    for given in (values, values.numpy()):
        found = learn_weights(given, k=3, weight_decay=0.1)
        assert torch.equal(found.values, want.values) and found.groups == ["group 0", "group 1", "group 2"]
    by_name = learn_weights({"style": values.numpy()}, k=3, weight_decay=0.1)
    assert torch.equal(by_name["style"].values, want.values)
    with pytest.raises(UndeError, match=r"shape \(6, 23\) have one group, so there is nothing to weigh"):
        learn_weights(values.sum(2))
    with pytest.raises(UndeError, match="weights are learned from scores, there is a list"):
        learn_weights([[1.0]])


def bank(scores, subsets=20):
    rng = np.random.default_rng(0)
    masks = rng.random((subsets, 23)) < 0.5
    return masks, masks @ scores.total(W).numpy().T


def test_evaluation_takes_them():
    scores = random_scores(6, 23)
    values, (masks, utility) = scores.by_group(), bank(scores)
    learned = Weights(torch.tensor(W), ["group 0", "group 1", "group 2"])
    want = compare(scores, Weights(torch.tensor(W), scores.groups), masks, utility)
    for given in (from_arrays(values), values, values.numpy(), ArrayScores(values, learned.groups)):
        found = compare(given, learned, masks, utility)
        np.testing.assert_allclose(found.weighted.per_query, 1.0)
        np.testing.assert_allclose(found.difference.per_query, want.difference.per_query, atol=1e-9)
    for given in (scores, from_arrays(values), from_arrays(values.sum(2)), values.sum(2)):
        np.testing.assert_allclose(lds(given, masks, utility).per_query, want.unweighted.per_query)
    table = fine_grained(from_arrays(values), {"w": learned}, {"a": np.eye(6, 23, dtype=bool)}, k=3)
    assert table.recall["w"]["a"].per_query.shape == (6,)
    strength = lds_strength(from_arrays(values, groups=list("uvw")), masks, utility, cells=None)
    assert strength.rows == list("uvw")


def test_weights_do_not_go_back_to_their_queries():
    values = random_scores(6, 23).by_group()
    learned = learn_weights(values[:4], k=3, weight_decay=0.1)
    masks, utility = bank(random_scores(6, 23))
    with pytest.raises(UndeError, match="learned on 4 of these 6 queries"):
        compare(values, learned, masks, utility)
    assert compare(values[4:], learned, masks, utility[:, 4:]).checked
    assert not compare(values, W, masks, utility).checked  # bare numbers remember nothing


def test_names_come_back():
    values = random_scores(2, 4).by_group()
    ids, queries = list("abcd"), ["q0", "q1"]
    found = from_arrays(values, groups=list("uvw"), ids=ids, query_ids=queries, name="other")
    top = found.top(2)
    assert top.ids == [[ids[i] for i in row] for row in top.indices.tolist()] and top.query_ids == queries
    assert list(top.table().rows())[2]["query_id"] == "q1"
    assert "other, 2 queries × 4 examples × 3 groups" in repr(found)
    coarse = found.regroup({"ends": ["w", "u"], "middle": ["v"]})
    want = torch.stack([values[..., 0] + values[..., 2], values[..., 1]], 2)
    torch.testing.assert_close(coarse.by_group(), want)
    assert coarse.top(2).query_ids == queries
    with pytest.raises(UndeError, match="unknown group 'x'"):
        found.regroup({"x": ["x"]})
    with pytest.raises(UndeError, match="1 groups are named, there are 3"):
        found.regroup({"x": ["u"]})


def spoilt(where, value):
    values = np.zeros((3, 4, 2))
    values[where] = value
    return values


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        (np.zeros(4), {}, r"scores of shape \(4,\): expected \(queries, training examples\)"),
        (np.zeros((2, 3, 4, 5)), {}, r"shape \(2, 3, 4, 5\)"),
        (np.zeros((0, 3)), {}, r"shape \(0, 3\).*none of them empty"),
        (spoilt((1, 2, 0), np.nan), {}, "first at query 1, training example 2, group 'group 0'"),
        (spoilt((2, 0, 1), np.inf), {"groups": ["a", "b"]}, "query 2, training example 0, group 'b'"),
        (spoilt((2, 0, 1), 1e300), {}, "beyond the range of float32"),
        (spoilt((1, 2, 0), np.nan)[:, :, 0], {}, "query 1, training example 2: find out"),
        (np.zeros((2, 3), complex), {}, "scores of type complex128: expected real numbers"),
        (torch.zeros(2, 3, dtype=torch.complex64), {}, "complex64"),
        (np.array([["a"]]), {}, "expected real numbers"),
        (np.zeros((2, 3, 2)), {"groups": ["a"]}, "1 group names for 2 groups"),
        (np.zeros((2, 3, 2)), {"groups": ["a", "a"]}, "a name of its own for each"),
        (np.zeros((2, 3)), {"groups": ["a", "b"]}, "not resolved into groups"),
        (np.zeros((2, 3)), {"ids": ["a", "b"]}, r"2 ids .*expected 3\. The array looks transposed"),
        (
            np.zeros((2, 3)),
            {"query_ids": list("abcd")},
            r"4 query_ids for scores of shape \(2, 3\): expected 2$",
        ),
    ],
)
def test_what_is_not_scores(values, options, said):
    with pytest.raises(UndeError, match=said):
        from_arrays(values, **options)


def test_a_page_of_them(tmp_path):
    """Panels of proponents and weights are made from arrays alone."""
    setup = Setup(toy.net(), unde.tasks.Classification(), toy.data(8), ids=[f"t{i}" for i in range(8)])
    values = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    scores, queries = from_arrays(values, groups=list("uvw")), Rows(toy.data(2, seed=1))
    learned = {"w": Weights(torch.tensor(W), list("uvw"))}
    panels = query_panels(setup, queries, scores, {"plain": None, **learned}, which=[0, 1], count=3)
    want = scores.total(learned["w"])[1].sort(descending=True)
    row = panels[1].rows[1]
    assert [s.item.id for s in row.proponents] == [f"t{i}" for i in want.indices[:3].tolist()]
    assert [s.score for s in row.proponents] == want.values[:3].tolist()
    assert weights_panels(learned, scores.groups)[0].name == "w"
