"""Real GroupScores over features that a test makes up."""

import torch

from unde import Groups, GroupScores
from unde.methods import TracIn
from unde.scoring import ArrayFeatures


class MeasuredFeatures(ArrayFeatures):
    """With leverages and one further measure of each example."""

    def leverage(self):
        return torch.linspace(0.1, 0.6, self.examples)

    def extra_values(self):
        return torch.linspace(1.0, 2.0, self.examples).unsqueeze(1)


def group_scores(queries, train, units, *, groups=None, method=None, skipped=(), memory=2**30, rows=7):
    """`queries` (Q, D) and `train` (N, D) with {unit: columns}; the training side comes in blocks of `rows`."""
    side = MeasuredFeatures(train, units, block_rows=rows, skipped=skipped)
    partition = groups or Groups({name: (name,) for name in units})
    digests = [f"query {q}" for q in range(len(queries))]
    return GroupScores(side, queries.unsqueeze(0), method or TracIn(), partition, digests, {}, memory)
