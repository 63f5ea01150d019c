import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from unde.errors import UndeError
from unde.weights.objective import OBJECTIVES, objective

NORMALISED = [name for name in OBJECTIVES if name != "no-norm"]


def by_sorting(scores: np.ndarray, k: int, name: str, positive: int) -> float:
    """The formulas of the paper's ablation, for one query, with the sign turned."""
    ranked = np.sort(scores)[::-1]
    top, bottom, norm = ranked[:k].mean(), ranked[-k:].mean(), np.sqrt((scores**2).sum())
    return {
        "top-k": top / norm,
        "supervised": scores[positive] / norm,
        "bottom-k": -bottom / norm,
        "top-k-bottom-k": (top - bottom) / norm,
        "no-norm": top,
    }[name]


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_objective_is_the_formula(name, data):
    n = data.draw(st.integers(2, 30))
    scores = data.draw(arrays(np.float64, (3, n), elements=st.integers(-50, 50).map(lambda i: i / 8)))
    scores[:, 0] += 0.37  # not all zero
    k = data.draw(st.integers(1, n))
    positives = data.draw(arrays(np.int64, 3, elements=st.integers(0, n - 1)))
    given_positives = torch.from_numpy(positives) if name == "supervised" else None
    got = objective(torch.from_numpy(scores), k, name, given_positives)
    expected = [by_sorting(row, k, name, p) for row, p in zip(scores, positives)]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_normalised_objectives_have_no_unit(name, unit):
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    positives = torch.arange(4)
    expected = objective(scores, 5, name, positives)
    assert expected.abs().min() > 0.01
    torch.testing.assert_close(objective(unit * scores, 5, name, positives), expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_zero_scores_count_zero_and_pull_nowhere(name):
    scores = torch.zeros(2, 6, requires_grad=True)
    value = objective(scores, 2, name, torch.tensor([0, 1]))
    value.sum().backward()
    assert value.tolist() == [0, 0]
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slope_is_that_of_finite_differences(name):
    scores = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positives = torch.tensor([3, 0, 7])
    torch.autograd.gradcheck(lambda s: objective(s, 3, name, positives), scores.requires_grad_())


def test_unknown_objective_suggests_the_nearest():
    with pytest.raises(UndeError, match=r"unknown objective 'topk'.*Did you mean 'top-k'"):
        objective(torch.ones(3), 1, "topk")
