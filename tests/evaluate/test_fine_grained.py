"""Recall of each target against scikit-learn's precision on scores that are summed in float64."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from group_scores import group_scores
from sklearn.metrics import precision_score

from refusals import refused
from unde import UndeError, Weights
from unde.evaluate import fine_grained, recall_at_k
from unde.evaluate.metrics import rank

UNITS = {"styled": 6, "shaped": 6, "noisy": 6}
Q, N = 25, 40


@pytest.fixture(scope="module")
def world():
    """Features of "styled" lie near their style, those of "shaped" near their subject."""
    g = torch.Generator().manual_seed(0)
    labels = {
        "style": (torch.arange(Q) % 5, torch.arange(N) % 8),
        "subject": (torch.arange(Q) // 5, torch.arange(N) // 5),
    }
    places = {a: 2 * torch.randn(8, 6, generator=g) for a in labels}
    sides = []
    for side, count in enumerate((Q, N)):
        parts = [places[a][labels[a][side]] + torch.randn(count, 6, generator=g) for a in labels]
        sides.append(torch.cat([*parts, 2 * torch.randn(count, 6, generator=g)], 1))
    relevant = {a: (q[:, None] == n[None, :]).numpy() for a, (q, n) in labels.items()}
    return group_scores(*sides, UNITS), sides, relevant


def weights(*values, seen=("elsewhere",)):
    return Weights(torch.tensor(values), list(UNITS), list(seen))


def by_hand(sides, values, relevant, k, without=()):
    """Precision of the k highest, query by query."""
    queries, train = (side.double().numpy() for side in sides)
    total = (queries * np.repeat(values, 6)) @ train.T
    total[:, list(without)] = -np.inf
    found = []
    for q in range(Q):
        chosen = np.zeros(N, dtype=bool)
        chosen[sorted(range(N), key=lambda n: -total[q, n])[:k]] = True
        found.append(precision_score(relevant[q], chosen))
    return found


@pytest.mark.parametrize("k", [1, 5])
def test_recall_of_every_target_and_attribute(world, k):
    scores, sides, relevant = world
    given = {"None": (1, 1, 1), "style": (2.5, 0.3, 0.2), "subject": (0.3, 2.5, 0.2)}
    targets = {name: None if name == "None" else weights(*map(float, v)) for name, v in given.items()}
    found = fine_grained(scores, targets, relevant, k=k)
    assert list(found.recall) == list(given) and found.unweighted == "None" and found.checked
    for name, values in given.items():
        row = {a: by_hand(sides, values, marks, k) for a, marks in relevant.items()}
        for attribute, expected in row.items():
            np.testing.assert_allclose(found.recall[name][attribute].per_query, expected)
        both = np.add(row["style"], row["subject"])
        np.testing.assert_allclose(found.recall[name]["all"].per_query, both)


def test_differences_are_paired_with_no_weights(world):
    scores, sides, relevant = world
    found = fine_grained(scores, {"style": weights(3.0, 0.1, 0.1)}, relevant, k=4)
    assert found.unweighted == "none" and list(found.difference) == ["style"]
    plain, weighted = (by_hand(sides, v, relevant["style"], 4) for v in ((1, 1, 1), (3, 0.1, 0.1)))
    np.testing.assert_allclose(found.difference["style"]["style"].per_query, np.subtract(weighted, plain))


def test_totals_of_a_baseline_compete_under_the_same_rules(world):
    """Given as a baseline, the totals of a target must have its recall, also where examples were skipped."""
    _, sides, relevant = world
    out = (0, 3, 17)
    scores = group_scores(*sides, UNITS, skipped=out)
    w = weights(2.0, 0.5, 0.5)
    found = fine_grained(scores, {"w": w, "same": scores.total(w), "array": scores.total().numpy()}, relevant)
    for attribute, marks in relevant.items():
        expected = by_hand(sides, (2, 0.5, 0.5), marks, 10, out)
        np.testing.assert_allclose(found.recall["same"][attribute].per_query, expected)
        np.testing.assert_allclose(found.recall["w"][attribute].per_query, expected)
        assert not found.difference["array"][attribute].per_query.any()


def test_equal_scores_rank_the_earlier_example_first():
    total = np.array([[1.0, 2.0, 2.0, 1.0, 2.0]])
    assert rank(total, 4).tolist() == [[1, 2, 4, 0]]
    assert rank(torch.tensor(total), 3, np.array([False, True, False, False, False])).tolist() == [[2, 4, 0]]
    assert rank(np.tile([1.0, 2.0], (1, 500)), 500).tolist() == [list(range(1, 1000, 2))]
    unsigned = np.array([[0, 3, 5]], dtype=np.uint8)
    assert rank(unsigned, 3).tolist() == [[2, 1, 0]]


def test_queries_that_weights_were_learned_on_are_refused(world):
    scores, _, relevant = world
    seen = {"style": weights(1.0, 1.0, 1.0, seen=()), "subject": weights(1.0, 2.0, 1.0, seen=["query 3"])}
    with pytest.raises(UndeError, match=r"target 'subject' were learned on 1 of these 25 .* positions 3"):
        fine_grained(scores, seen, relevant)  # found behind weights that remember nothing
    found = fine_grained(scores, {"style": seen["style"]}, relevant)
    assert not found.checked and "not checked" in str(found)


def test_printed_as_the_table_of_the_paper(world):
    scores, _, relevant = world
    targets = {"None (w/o w)": None, "Rep. Dist.": torch.randn(Q, N), "Style": weights(2.0, 0.5, 0.5)}
    found = fine_grained(scores, targets, relevant, k=5)
    upper, lower, notes = (part.splitlines() for part in str(found).split("\n\n"))
    assert re.split(r"\s{2,}", upper[0]) == ["Recall@5, %", "style", "subject", "all"]
    for line, (name, row) in zip(upper[1:], found.recall.items(), strict=True):
        assert re.split(r"\s{2,}", line) == [
            name,
            *(f"{100 * e.mean:.1f} ± {100 * e.ci95:.1f}" for e in row.values()),
        ]
    assert [line.split("  ")[0] for line in lower] == ["− None (w/o w)", "Rep. Dist.", "Style"]
    last = found.difference["Style"]["all"]
    assert lower[2].endswith(f"{100 * last.mean:+.1f} ± {100 * last.ci95:.1f}")
    assert len({len(line) for line in (*upper, *lower)}) == 1
    assert notes == ["95 % intervals (half widths), 25 queries"]


def test_as_json(world):
    scores, _, relevant = world
    found = fine_grained(scores, {"style": weights(2.0, 0.5, 0.5)}, relevant, k=5)
    read = json.loads(json.dumps(found.as_dict()))
    assert read["k"] == 5 and read["unweighted"] == "none" and read["queries_checked"] is True
    assert read["recall"]["style"]["subject"]["mean"] == found.recall["style"]["subject"].mean
    assert list(read["difference"]) == ["style"]
    assert read["difference"]["style"]["all"]["mean"] == found.difference["style"]["all"].mean


def test_any_object_that_ranks_will_do():
    marks = np.eye(3, dtype=bool)
    scores = SimpleNamespace(
        query_digests=[],
        shape=(3, 3),
        top=lambda k, weights=None: SimpleNamespace(indices=torch.tensor([[0], [1], [0]])),
    )
    found = fine_grained(scores, {"baseline": torch.eye(3)}, {"style": marks}, k=1)
    assert found.recall["none"]["style"].per_query.tolist() == [1, 1, 0]
    assert found.recall["baseline"]["style"].per_query.tolist() == [1, 1, 1]
    assert found.recall["none"]["style"].mean == recall_at_k(np.array([[0], [1], [0]]), marks).mean


MARKS = np.ones((Q, N), dtype=bool)


@pytest.mark.parametrize(
    ("targets", "relevant", "k", "message"),
    [
        ({}, {"all": MARKS}, 10, "called 'all', which names the sum"),
        ({}, {}, 10, r"relevant is empty: expected \{attribute: \(Q, N\) marks\}"),
        ({}, MARKS, 10, "relevant is a ndarray"),
        ({}, {"style": MARKS[:3]}, 10, r"relevant\['style'\] has shape \(3, 40\): expected \(25, 40\)"),
        ({}, {"a": MARKS, "b": ~MARKS}, 10, r"relevant\['b'\] marks no contributor of any query"),
        (
            {"none": np.zeros((Q, N))},
            {"a": MARKS},
            10,
            "target 'none' is a ndarray: that name is for no weights",
        ),
        ({"x": np.zeros((N, Q))}, {"a": MARKS}, 10, r"target 'x' has shape \(40, 25\): expected \(25, 40\)"),
        ({"x": np.zeros(3)}, {"a": MARKS}, 10, r"target 'x' must have shape \(Q, N\)"),
        ({"x": np.full((Q, N), np.nan)}, {"a": MARKS}, 10, "NaN or infinite values, the first at query 0"),
        ({"x": np.zeros((Q, N))}, {"a": MARKS}, 41, "expected 1 ≤ k ≤ 40"),
    ],
)
def test_bad_input(world, targets, relevant, k, message):
    refused(message, fine_grained, world[0], targets, relevant, k=k)


@pytest.mark.parametrize("k", [0, 3])
def test_bad_k_of_a_ranking(k):
    refused(f"k is {k}: expected 1 to 2", rank, np.zeros((1, 3)), k, np.array([True, False, False]))
