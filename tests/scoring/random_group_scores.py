"""Real GroupScores over random features."""

import torch

from unde import Groups, GroupScores
from unde.methods import TracIn
from unde.scoring import ArrayFeatures


def random_scores(q=5, n=12, *, method=None, memory=10**9, skipped=(), rows=5, ids=None, seed=0, whole=False):
    """Three groups of 2, 3 and 4 columns; the training side comes in blocks of `rows`. Of `whole` numbers all sums are
    exact, in whatever order."""
    g = torch.Generator().manual_seed(seed)
    queries, train = torch.randn(1, q, 9, generator=g), torch.randn(n, 9, generator=g)
    if whole:
        queries, train = (4 * queries).round(), (4 * train).round()
    side = ArrayFeatures(train, {"u": 2, "v": 3, "w": 4}, block_rows=rows, skipped=skipped, ids=ids)
    partition = Groups({name: (name,) for name in "uvw"})
    digests = [f"{i:016x}" for i in range(q)]
    return GroupScores(side, queries, method or TracIn(), partition, digests, {}, memory)
