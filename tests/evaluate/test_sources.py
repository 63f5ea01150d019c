"""Influence by source against a loop, and the sources of examples by the name of a column."""

import numpy as np
import pytest
import torch

from refusals import refused
from unde import Setup
from unde.evaluate import source_shares
from unde.integrations.sources import source_names
from unde.scoring import documents, from_arrays
from unde.tasks import Classification


def test_totals_and_shares_against_a_loop():
    g = torch.Generator().manual_seed(0)
    contributions = torch.randn(6, 20, 3, generator=g)
    names, w = [f"s{n % 4}" for n in range(20)], [1.0, 0.5, 2.0]
    whole = ["a", "a", "b", "c", "c", "c"]
    scores = from_arrays(contributions)
    result = source_shares(scores, names, w, queries=whole)
    values = (contributions * torch.tensor(w)).sum(2)
    by_query = [values[[q for q in range(6) if whole[q] == name]].sum(0) for name in "abc"]
    for s, name in enumerate(result.names):
        inside = torch.tensor([n == name for n in names])
        totals = [float(v[inside].sum()) for v in by_query]
        shares = [float(v[inside].clamp(min=0).sum() / v.clamp(min=0).sum()) for v in by_query]
        assert result.totals[s].per_query == pytest.approx(totals, rel=1e-4)
        assert result.shares[s].per_query == pytest.approx(shares, rel=1e-4)
        assert result.examples[s] == 5
    means = [e.mean for e in result.shares]
    assert means == sorted(means, reverse=True) and sum(means) == pytest.approx(1)
    rows = list(result.table().rows())
    assert rows[0]["share_ci95"] == result.shares[0].ci95 and rows[0]["share_of_examples"] == 0.25
    assert scores.top(4, w, by=names).indices.shape == (6, 4)  # the same names rank sources for each query
    alone = source_shares(from_arrays(contributions[:1]), names)
    assert np.isnan(alone.shares[0].ci95)
    refused("19 names for 20", source_shares, scores, names[1:])


def test_sources_are_columns_labels_and_documents():
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    model = torch.nn.Linear(2, 2)
    columns = Setup(model, Classification(), {"x": x, "labels": y, "author": ["a", "b", "a", "c"]})
    assert source_names(columns, "author") == ["a", "b", "a", "c"]
    assert source_names(columns, "labels") == [0, 1, 1, 0]
    pairs = Setup(model, Classification(), (x, y), classes=["cat", "dog"])
    assert source_names(pairs, "label") == ["cat", "dog", "dog", "cat"]
    parts = source_names(pairs, "document", ["d:1", "d:2", "e:1", "f:1"])
    assert parts.names == documents(["d:1", "d:2", "e:1", "f:1"]).names
    refused("unknown --by 'writer'.*author", source_names, columns, "writer")
    refused("holds a Tensor: expected a name or a number", source_names, columns, "x")


def test_fields_of_records_follow_the_ids(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "t", "author": "ann", "id": "x"}\n{"text": "u", "author": "bob"}\n')
    setup = Setup(torch.nn.Linear(1, 1), Classification(), [1, 2, 3])
    assert source_names(setup, "author", ["x:1", "x:2", "2:1"], str(file)) == ["ann", "ann", "bob"]
    assert source_names(setup, "author", ["2:1", "2:2", "2:3"], str(file)) == ["bob"] * 3
    refused("no record 'y' any more", source_names, setup, "author", ["y:1", "x:1", "2:1"], str(file))
