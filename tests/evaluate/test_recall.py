import numpy as np
import pytest
import torch

from refusals import refused
from unde.evaluate import recall_at_k


def test_equals_a_loop_over_sets():
    rng = np.random.default_rng(0)
    relevant = rng.random((9, 30)) < 0.2
    top = np.stack([rng.permutation(30)[:10] for _ in range(9)])
    expected = [len(set(top[q]) & set(np.flatnonzero(relevant[q]))) / 10 for q in range(9)]
    np.testing.assert_allclose(recall_at_k(top, relevant).per_query, expected)
    tensors = recall_at_k(torch.tensor(top), torch.tensor(relevant))
    np.testing.assert_allclose(tensors.per_query, expected)


def test_hits_are_divided_by_k_not_by_the_number_of_contributors():
    relevant = np.zeros((2, 20), dtype=bool)
    relevant[0, :3] = True  # all three found among ten: 0.3
    top = np.tile(np.arange(10), (2, 1))
    assert recall_at_k(top, relevant).per_query.tolist() == [0.3, 0.0]


def test_unsigned_positions():
    relevant = np.array([[True, False, True]])
    assert recall_at_k(np.array([[2, 1]], dtype=np.uint8), relevant).mean == 0.5


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (np.array([[0, 1]]), "has 1 rows for 2 queries"),
        (np.array([[0, 1], [2, 4]]), r"top_indices\[1, 1\] is 4: .* 0 to 3"),
        (np.array([[0, 1], [-1, 2]]), r"top_indices\[1, 0\] is -1"),
        (np.array([[0, 1], [3, 3]]), "twice for query 1"),
        (np.array([[0.2, 0.1], [0.5, 0.3]]), "whole numbers, not float64"),
        (np.array([0, 1]), r"shape \(Q, k\)"),
    ],
)
def test_bad_input(top, message):
    refused(message, recall_at_k, top, np.zeros((2, 4), dtype=bool))
