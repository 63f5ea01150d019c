"""Contributions of groups that are alike, which are made in one product: as one by one, in float64."""

import pytest
import torch

from unde import Groups, GroupScores
from unde import onednn as products
from unde.methods import TracIn
from unde.scoring import ArrayFeatures, blocks, query_side
from unde.scoring.query_side import batches

SIZES = [4, 4, 4, 2, 4, 4, 1, 4, 0]
NAMES = [f"u{i}" for i in range(len(SIZES))]
STARTS = [sum(SIZES[:i]) for i in range(len(SIZES) + 1)]
COLUMNS = [slice(a, b) for a, b in zip(STARTS, STARTS[1:])]
ETAS = [0.5, -2.0]
PARTITIONS = {
    "one each": [[0], [1], [2], [3], [4], [5], [6], [7], [8]],  # the last has no columns
    "turned": [[8], [7], [6], [5], [4], [3], [2], [1], [0]],
    "twice": [[0, 4], [1, 5], [2, 7], [3], [6, 8]],  # groups 0 and 1 come again, side by side
    "before and after": [[0, 5], [1], [2, 3], [4, 6, 7, 8]],
    "all": [[0, 1, 2, 3, 4, 5, 6, 7, 8]],
}


def random_scores(partition, q=3, n=50, rows=20):
    g = torch.Generator().manual_seed(0)
    queries, train = torch.randn(2, q, STARTS[-1], generator=g), torch.randn(2, n, STARTS[-1], generator=g)
    side = ArrayFeatures(train, dict(zip(NAMES, SIZES)), checkpoint_weights=ETAS, block_rows=rows)
    groups = Groups({f"g{j}": tuple(NAMES[u] for u in own) for j, own in enumerate(partition)})
    return GroupScores(side, queries, TracIn(), groups, [""] * q, {}, 10**9), queries, train


@pytest.fixture(params=["as it is", "by oneDNN"])
def library(request, monkeypatch):
    if request.param == "by oneDNN":
        if not products.available():
            pytest.skip("torch was built without oneDNN")
        monkeypatch.setattr(query_side, "_LARGE", 0)
        monkeypatch.setattr(products, "_LEAST", 0)
        monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("name", PARTITIONS)
def test_contributions_are_those_of_one_group_after_the_other(name, library, monkeypatch):
    monkeypatch.setattr(blocks, "CACHE", 4 * 3 * len(PARTITIONS[name]) * 17)  # 16 rows at a time
    scores, queries, train = random_scores(PARTITIONS[name])
    want = torch.zeros(3, 50, len(PARTITIONS[name]), dtype=torch.float64)
    for eta, q, t in zip(ETAS, queries.double(), train.double()):
        for j, own in enumerate(PARTITIONS[name]):
            for u in own:
                want[..., j] += eta * q[:, COLUMNS[u]] @ t[:, COLUMNS[u]].T
    torch.testing.assert_close(scores.by_group().double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.contributions(slice(1, 3)).double(), want[1:], rtol=1e-5, atol=1e-5)
    assert [rows for rows, _ in scores.stream(slice(0, 3))][:2] == [slice(0, 16), slice(16, 20)]


def test_what_is_made_together():
    runs = [(0, slice(0, 4)), (1, slice(4, 8)), (2, slice(8, 10)), (0, slice(10, 14)), (1, slice(14, 18))]
    found = [(b.groups.start, b.groups.stop, b.columns.start, b.columns.stop, b.add) for b in batches(runs)]
    assert found == [(0, 2, 0, 8, False), (2, 3, 8, 10, False), (0, 2, 10, 18, True)]
    # columns between them, a group between them
    gap = [(0, slice(0, 4)), (1, slice(5, 9)), (3, slice(9, 13))]
    assert len(batches(gap)) == 3
    assert [b.add for b in batches(gap, {1})] == [False, True, False]


@pytest.mark.parametrize(("queries", "groups", "rows"), [(1, 1, 2**21), (1000, 64, 32), (10**4, 64, 3)])
def test_rows_at_once(queries, groups, rows):
    """By sixteens, where there are so many."""
    assert blocks.rows_per_block(queries, groups, 10**12) == rows
