import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import Estimate, lds, paired


def test_interval_is_students_t_of_the_mean_as_scipy_has_it():
    values = np.random.default_rng(0).normal(0.2, 0.1, size=13)
    low, high = stats.t.interval(0.95, 12, loc=values.mean(), scale=stats.sem(values))
    e = Estimate(values)
    assert (e.mean - e.ci95, e.mean + e.ci95) == pytest.approx((low, high), rel=1e-12)


def test_undefined_queries_take_no_part_and_are_counted_and_shown():
    values = np.array([0.1, np.nan, 0.4, 0.3, np.nan])
    e, clean = Estimate(values), Estimate(values[~np.isnan(values)])
    assert (e.mean, e.ci95, e.undefined) == (clean.mean, clean.ci95, 2)
    assert len(e.per_query) == 5
    assert str(e) == f"{clean} (undefined for 2 of 5 queries)"


@pytest.mark.parametrize("bad", [[], [np.nan, np.nan], [0.1, np.inf], [[0.1, 0.2]], ["a"]])
def test_what_cannot_be_averaged_is_refused(bad):
    with pytest.raises(UndeError):
        Estimate(np.array(bad))


def test_one_query_has_a_mean_and_no_interval():
    e = Estimate(torch.tensor([0.5], dtype=torch.bfloat16))
    assert e.mean == 0.5
    assert math.isnan(e.ci95)
    assert str(e) == "0.5 (one query, no interval)"
    assert json.loads(json.dumps(e.as_dict(), allow_nan=False))["ci95"] is None


def test_an_estimate_cannot_be_changed_and_does_not_follow_the_array_it_came_from():
    values = np.array([0.1, 0.3])
    e = Estimate(values)
    values[0] = 9
    assert e.mean == pytest.approx(0.2)
    with pytest.raises(ValueError):
        e.per_query[0] = 9


@pytest.mark.parametrize(
    ("mean", "half", "shown"),
    [(12.3, 0.94, "12.30 ± 0.94"), (0.1234, 0.0056, "0.1234 ± 0.0056"), (1234.0, 56.0, "1234 ± 56")],
)
def test_printed_to_two_digits_of_the_interval(mean, half, shown):
    spread = half / stats.t.ppf(0.975, 3) * math.sqrt(3)  # ±spread twice: sd = spread·√(4/3), n = 4
    assert str(Estimate(mean + spread * np.array([1, -1, 1, -1]))) == shown


def test_format_codes_are_those_of_numbers():
    e = Estimate(np.array([0.1, 0.2, 0.3]))
    assert f"{e:+.1%}" == f"{e.mean:+.1%} ± {e.ci95:.1%}"
    assert f"{e}" == str(e)


def test_paired_is_the_paired_t_interval():
    rng = np.random.default_rng(1)
    a = rng.normal(size=20)
    b = a + 0.1 + 0.01 * rng.normal(size=20)
    d = paired(Estimate(a), Estimate(b))
    interval = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (d.mean - d.ci95, d.mean + d.ci95) == pytest.approx((interval.low, interval.high))
    assert d.ci95 < Estimate(a).ci95 / 10


def test_paired_leaves_out_what_is_undefined_in_either():
    d = paired(Estimate(np.array([np.nan, 1.0, 2.0])), Estimate(np.array([1.0, np.nan, 5.0])))
    assert (d.mean, d.undefined) == (3.0, 2)


def test_paired_refuses_other_numbers_of_queries():
    refused("3 queries with 2", paired, Estimate(np.zeros(3)), Estimate(np.zeros(2)))


def test_paired_refuses_bootstraps_that_do_not_belong_together():
    rng = np.random.default_rng(0)
    scores, masks = rng.normal(size=(4, 12)), rng.random((16, 12)) < 0.5
    utility = rng.normal(size=(16, 4))
    a = lds(scores, masks, utility, bootstrap=20, seed=0)
    for other in (
        lds(scores, masks, utility, bootstrap=20, seed=1),
        lds(scores, masks, utility + 1, bootstrap=20, seed=0),
        lds(scores, masks, utility),
    ):
        refused("bootstrap draws", paired, a, other)
