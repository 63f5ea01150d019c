import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import compare, lds, paired


@dataclass
class Weights:
    values: torch.Tensor
    query_digests: list[str] = field(default_factory=list)


@dataclass
class Scores:
    by_group: torch.Tensor  # (Q, N, M)
    query_digests: list[str]

    def total(self, weights: Weights | None = None) -> torch.Tensor:
        return self.by_group.sum(-1) if weights is None else self.by_group @ weights.values


@pytest.fixture
def world():
    """The first group knows the truth, the second is noise: weights on the first must help."""
    rng = torch.Generator().manual_seed(0)
    truth, noise = torch.randn(2, 12, 50, generator=rng)
    masks = torch.rand(40, 50, generator=rng) < 0.5
    scores = Scores(torch.stack([truth, 2 * noise], -1), [f"query {q}" for q in range(12)])
    return scores, masks, masks.float() @ truth.T


def test_the_parts_are_those_of_lds_and_paired(world):
    scores, masks, utility = world
    weights = Weights(torch.tensor([1.0, 0.1]), ["other"])
    c = compare(scores, weights, masks, utility, bootstrap=50, seed=4)
    plain = lds(scores.total(), masks, utility, bootstrap=50, seed=4)
    weighted = lds(scores.total(weights), masks, utility, bootstrap=50, seed=4)
    np.testing.assert_array_equal(c.unweighted.per_query, plain.per_query)
    np.testing.assert_array_equal(c.weighted.per_query, weighted.per_query)
    np.testing.assert_array_equal(c.difference.per_query, paired(plain, weighted).per_query)
    assert c.difference.ci95_total == paired(plain, weighted).ci95_total
    assert c.difference.mean - c.difference.ci95_total > 0.2
    assert c.checked


def test_queries_of_weight_learning_are_refused_by_position(world):
    scores, masks, utility = world
    weights = Weights(torch.ones(2), ["query 7", "elsewhere", "query 2"])
    refused("2 of these 12 queries, at positions 2, 7:", compare, scores, weights, masks, utility)


def test_many_refused_positions_are_abridged(world):
    scores, masks, utility = world
    with pytest.raises(UndeError, match=r"11 of these 12 queries, at positions 0, 1, .*, 9, …:"):
        compare(scores, Weights(torch.ones(2), scores.query_digests[:11]), masks, utility)


def test_weights_that_forgot_their_queries_are_marked(world):
    scores, masks, utility = world
    c = compare(scores, Weights(torch.ones(2)), masks, utility, bootstrap=0)
    assert not c.checked
    assert "not checked" in str(c)
    assert c.difference.mean == 0


def test_printed_and_as_json(world):
    scores, masks, utility = world
    c = compare(scores, Weights(torch.tensor([1.0, 0.0]), ["other"]), masks, utility, bootstrap=20)
    lines = str(c).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["unweighted", "weighted", "difference"]
    assert lines[2].split()[1] == "100.00"
    assert lines[3].split()[1] == f"{100 * c.difference.mean:+.2f}"
    assert lines[3].split()[3] == f"{100 * c.difference.ci95_total:.2f}"
    assert "not checked" not in str(c)
    assert json.loads(json.dumps(c.as_dict()))["difference"]["mean"] == c.difference.mean
