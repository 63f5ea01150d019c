"""Better, worse or the same: the count that the page of results begins with."""

import doctest

import pytest
from experiments.pages import book, verdicts
from experiments.pages.verdicts import count, evidence, holm, p_value
from experiments.studies import group_strength
from scipy.stats import norm

from experiments import tables


def cell(mean, ci95=0.01, total=0.02):
    return {"mean": mean, "ci95": ci95, "ci95_total": total}


@pytest.mark.parametrize("module", [verdicts, book, tables, group_strength])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_p_values_are_those_of_the_normal_distribution():
    assert p_value(-0.03, 0.0196) == pytest.approx(2 * norm.sf(3.0))


def test_holm_is_its_definition():
    p = [0.011, 0.2, 0.0001, 0.012, 0.04]
    # sorted: 0.0001 ≤ .05/5, 0.011 ≤ .05/4, 0.012 ≤ .05/3, 0.04 > .05/2
    assert holm(p) == [True, False, True, True, False]
    assert holm([]) == []


def test_gains_must_beat_the_subsets_and_losses_only_the_queries():
    assert evidence(cell(0.015)) > 0.05 > evidence(cell(-0.015))
    assert evidence({"mean": 0.015, "ci95": 0.01, "ci95_total": None}) < 0.05


def test_correction_is_over_all_cells():
    borderline = cell(-0.0105)
    assert verdicts.verdicts([borderline]) == ["worse"]
    assert verdicts.verdicts([borderline] + [cell(0.0)] * 9) == ["same"] * 10


def test_count_and_mean_over_cells():
    found = count({"x": [cell(-0.0105), cell(0.1)], "y": [cell(0.0, 0.0, 0.0)]})
    assert (found.cells, found.better, found.worse) == (3, 1, 0)
    assert found.pooled == pytest.approx((0.1 - 0.0105) / 3)


def test_errors_of_one_bank_count_as_one_and_banks_as_independent():
    together = count({"x": [cell(0.1)] * 4})
    apart = count({name: [cell(0.1)] for name in "wxyz"})
    assert together.ci95 == pytest.approx(0.02) and apart.ci95 == pytest.approx(0.01)
