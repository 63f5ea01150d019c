"""Documents and queries that are in pieces are ranked as wholes: against sums written out."""

import numpy as np
import pytest
import torch
from random_group_scores import random_scores

import toy
from unde import UndeError
from unde.methods import TracIn
from unde.scoring import Pieces, documents, from_arrays

NAMES = ["a", "b", "a", "c", "c", "d", "b", "a", "e", "e", "e", "f"]  # of 12 training examples
ORDER = list("abcdef")


def summed(total: torch.Tensor, rows: list, columns: list) -> np.ndarray:
    """One addition at a time."""
    names, docs = list(dict.fromkeys(rows)), list(dict.fromkeys(columns))
    out = np.zeros((len(names), len(docs)))
    for q, row in zip(rows, total.double().tolist()):
        for d, value in zip(columns, row):
            out[names.index(q), docs.index(d)] += value
    return out


def both():
    scores = random_scores(5, 12)
    return [scores, from_arrays(scores.by_group(), groups=scores.groups)]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("weights", [None, [0.2, 3.0, 1.0]])
@pytest.mark.parametrize("memory", [1, 10**9])
def test_the_score_of_a_document_is_the_sum_over_its_pieces(kind, weights, memory):
    scores = both()[kind] if memory > 1 else random_scores(5, 12, memory=1)
    want = summed(scores.total(weights), range(5), NAMES)
    for largest in (True, False):
        top = scores.top(4, weights, largest, by=NAMES)
        order = np.argsort(-want if largest else want, axis=1, kind="stable")[:, :4]
        assert top.indices.tolist() == order.tolist()
        np.testing.assert_allclose(top.values, np.take_along_axis(want, order, 1), rtol=1e-5, atol=1e-6)
        assert top.ids == [[ORDER[i] for i in row] for row in order]
        assert top.query_ids is None


@pytest.mark.parametrize("method", [TracIn(), TracIn(cosine=True)])
def test_pieces_of_a_query_are_one_query(method):
    scores = random_scores(5, 12, method=method)
    asked = ["long", "short", "long", "long", "other"]
    want = summed(scores.total(), asked, list(range(12)))
    top = scores.top(12, queries=asked)
    assert top.query_ids == ["long", "short", "other"]
    for q in range(3):
        assert top.indices[q].tolist() == np.argsort(-want[q], kind="stable").tolist()
        np.testing.assert_allclose(top.values[q], np.sort(want[q])[::-1], rtol=1e-5, atol=1e-6)
    both = scores.top(6, by=NAMES, queries=asked)
    want = -np.sort(-summed(scores.total(), asked, NAMES), 1)
    np.testing.assert_allclose(both.values, want, rtol=1e-5, atol=1e-6)


def test_names_without_pieces_change_no_bit():
    scores = random_scores(5, 12, whole=True)
    plain, named = scores.top(7), scores.top(7, queries=list("vwxyz"))
    assert torch.equal(plain.values, named.values) and torch.equal(plain.indices, named.indices)
    assert named.query_ids == list("vwxyz")
    alone = scores.top(7, queries=["v", "w", "x", "y", "v"])  # summing one number changes nothing either
    assert torch.equal(alone.values[1:], plain.values[1:4])


def test_skipped_examples_add_nothing():
    scores = random_scores(3, 12, skipped=[2, 5, 11])
    total = scores.total()
    total[:, [2, 5, 11]] = 0
    want = summed(total, range(3), NAMES)
    top = scores.top(4, by=NAMES)
    assert not {"d", "f"} & {name for row in top.ids for name in row}  # nothing of them is left
    np.testing.assert_allclose(top.values, -np.sort(-want[:, [0, 1, 2, 4]], 1), rtol=1e-5, atol=1e-6)
    said = r"top\(5\) of 4 documents \(2 more were skipped\): expected 1 ≤ k ≤ 4"
    with pytest.raises(UndeError, match=said):
        scores.top(5, by=NAMES)


def test_documents_of_ids():
    found = documents(["x:1", "x:3", "y:2", "y:4", "y:2", "a:b:1", "x:5", "plain"])
    assert found.names == ["x", "y", "y", "a:b", "x", "plain"]
    assert found.of.tolist() == [0, 0, 1, 1, 2, 3, 4, 5]  # y begins anew, and so does x
    assert found.rows(1) == [2, 3] and not found.whole
    assert documents(["1:1", "2:1"]).whole
    with pytest.raises(UndeError, match=r"do not say which document .* \(one is 'row-0'\).*by=names"):
        documents(["row-0", "row-1"])
    with pytest.raises(UndeError, match="do not say which document"):
        documents(range(5))


def test_two_documents_of_one_name_stay_two():
    scores = random_scores(2, 4)
    top = scores.top(3, by=documents(["x:1", "x:2", "x:1", "y:1"]))
    total = scores.total().double()
    want = torch.stack([total[:, 0] + total[:, 1], total[:, 2], total[:, 3]], 1)
    want = want.sort(1, descending=True).values
    torch.testing.assert_close(top.values.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"by": ["a"] * 11}, "11 names for 12 training examples: expected one for each"),
        ({"queries": ["a"] * 6}, "6 names for 5 queries: expected one for each"),
        ({"by": "document"}, "expected a list with a name for each of the training examples, got .document."),
        ({"by": 3}, "got 3"),
        ({"by": documents(["a:1", "a:2"])}, "2 names for 12"),
    ],
)
def test_names_that_do_not_fit(options, said):
    with pytest.raises(UndeError, match=said):
        random_scores(5, 12).top(1, **options)


def test_an_index_of_documents(tmp_path):
    """Through an index with several shards, and with workers who share the scores."""
    ids = [f"d{i // 4}:{i % 4 + 1}" for i in range(22)]
    index = toy.build(tmp_path / "idx", 22, ids=ids)
    scores = index.score(toy.data(3, seed=1))
    top = scores.top(2, by=documents(index.ids), queries=["q", "r", "q"])
    want = summed(scores.total(), ["q", "r", "q"], [i.partition(":")[0] for i in ids])
    order = np.argsort(-want, axis=1)[:, :2]
    assert top.ids == [[f"d{i}" for i in row] for row in order]
    np.testing.assert_allclose(top.values, np.take_along_axis(want, order, 1), rtol=1e-5)
    assert Pieces(torch.arange(3), list("abc")).whole
