"""Real GroupScores over features that a test makes up."""

import torch

from unde import Groups, GroupScores
from unde.methods import TracIn
from unde.scoring import TrainSide


def group_scores(queries, train, units, *, groups=None, method=None, skipped=(), memory=2**30, rows=7):
    """`queries` (Q, D) and `train` (N, D) with {unit: columns}; the training side comes in blocks of `rows`."""
    ends = torch.tensor(list(units.values())).cumsum(0).tolist()
    columns = [slice(end - size, end) for end, size in zip(ends, units.values())]
    n = len(train)
    cuts = [slice(a, min(a + rows, n)) for a in range(0, n, rows)]
    bad = torch.zeros(n, dtype=torch.bool)
    bad[list(skipped)] = True
    side = TrainSide(
        examples=n,
        units=list(units),
        columns=columns,
        checkpoint_weights=[1.0],
        cuts=cuts,
        block=lambda s: [train[cuts[s]]],
        squares=lambda: torch.stack([train[:, c].square().sum(1) for c in columns], 1),
        skipped=lambda: bad,
        ids=None,
        leverage=lambda: torch.linspace(0.1, 0.6, n),
        beside=lambda: torch.linspace(1.0, 2.0, n).unsqueeze(1),
    )
    partition = groups or Groups({name: (name,) for name in units})
    digests = [f"query {q}" for q in range(len(queries))]
    return GroupScores(side, queries.unsqueeze(0), method or TracIn(), partition, digests, {}, memory)
