"""Mislabelled examples: areas, curves and the wall."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from refusals import refused
from report_dom import parse, words
from unde.ui.report import Item, MislabelPanel, RocCurve, ScoredItem
from unde.ui.report.mislabel import mislabel_section


def digit(index: int, label: int, true_label: int) -> Item:
    return Item(index, label=label, true_label=true_label, image=np.full((8, 8), index, np.uint8))


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    wrong = rng.random(80) < 0.3
    scores = np.round(rng.normal(size=80) + wrong, 1)  # rounded, so that there are ties
    curve = RocCurve.from_scores("w", torch.from_numpy(scores), torch.from_numpy(wrong))
    assert curve.auc == pytest.approx(roc_auc_score(wrong, scores), abs=1e-12)
    x, y = np.asarray(curve.false_positive_rate), np.asarray(curve.true_positive_rate)
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    # what is drawn is what is said
    assert np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) == pytest.approx(curve.auc)
    # Every threshold's rates lie on the curve.
    for threshold in np.unique(scores):
        at = ((scores >= threshold)[~wrong].mean(), (scores >= threshold)[wrong].mean())
        on_curve = [abs(a - at[0]) + abs(b - at[1]) < 1e-9 for a, b in zip(x, y)]
        between = any(
            abs((x1 - x0) * (at[1] - y0) - (y1 - y0) * (at[0] - x0)) < 1e-9
            and x0 <= at[0] <= x1
            and y0 <= at[1] <= y1
            for x0, y0, x1, y1 in zip(x, y, x[1:], y[1:])
        )
        assert any(on_curve) or between


def test_straight_stretches_need_no_points():
    curve = RocCurve.from_scores("w", np.arange(100)[::-1], np.arange(100) < 30)
    assert (curve.auc, len(curve.true_positive_rate)) == (1.0, 3)


@pytest.mark.parametrize(
    ("scores", "wrong", "says"),
    [
        ([1.0, 2.0], [True], "expected"),
        ([1.0, 2.0], [True, True], "2 wrong of 2"),
        ([1.0, 2.0], [False, False], "0 wrong of 2"),
        ([1.0, float("nan")], [True, False], "NaN"),
    ],
)
def test_bad_rankings_are_refused(scores, wrong, says):
    refused(says, RocCurve.from_scores, "w", scores, wrong)


def test_rates_beyond_one_are_refused():
    refused("true_positive_rate", RocCurve, "w", [0.0, 1.0], [0.0, 1.2], 0.5)


def test_the_wall_shows_hits_and_misses():
    found = [ScoredItem(digit(1, 3, true_label=8), 5.0), ScoredItem(digit(2, 4, true_label=4), 2.5)]
    curves = [RocCurve("unweighted", [0, 1], [0, 1], 0.5), RocCurve("weighted", [0, 0, 1], [0, 0.9, 1], 0.95)]
    panel = MislabelPanel(found, curves, examples=200, mislabelled=20, ranked_by="self-influence")
    root = parse(mislabel_section(panel))
    hit, miss = root.all("li.example")
    assert "hit" in hit.classes
    assert words(hit.one(".mark")) == "✓found"
    assert (hit.one("s").text, hit.one("b").text, hit.one(".score").text) == ("3", "8", "+5.00")
    assert "miss" in miss.classes
    assert words(miss.one(".label")) == "4"
    assert [words(area) for area in root.all(".areas div")] == ["unweighted0.500", "weighted0.950"]
    lead = words(root.one("p.lead"))
    assert "20 of 200 labels are wrong (10.0%); of the first 2, 1 are, where chance would give 0.2." in lead
    # The strokes in the legend are those of the curves.
    drawn = [curve.classes for curve in root.all("polyline")]
    assert [key.one("line").classes for key in root.all("svg.key")] == drawn
    assert drawn[0] != drawn[1]


def test_without_truth_there_is_no_verdict():
    root = parse(mislabel_section(MislabelPanel([ScoredItem(Item(4, label="dog"), 2.0)])))
    assert words(root.one("h2")) == "Suspected labels"
    assert not root.all(".mark")
    assert not root.all("svg")
