"""`unde.evaluate.search` against loops over single settings, folds and queries."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unde import UndeError, learn_weights
from unde.evaluate import lds, mislabel_auc, recall_at_k, search
from unde.evaluate.calibration import crossfit_folds
from unde.scoring import from_arrays

Q, N, KS, DECAYS = 24, 40, (5, 10, 50), (0.0, 1.0)


def contributions(seed=0):
    """One group of signal, two of noise, one of them large: (Q, N, 3)."""
    generator = torch.Generator().manual_seed(seed)
    influence = torch.randn(Q, N, generator=generator).relu() ** 3
    noise = torch.randn(Q, N, 2, generator=generator) * torch.tensor([1.0, 3.0])
    return torch.cat([influence[..., None], noise], dim=2)


@pytest.fixture(scope="module")
def case():
    c = contributions()
    masks = np.random.default_rng(0).random((16, N)) < 0.5
    utility = masks @ c[:, :, 0].T.numpy() + np.random.default_rng(1).normal(size=(16, Q))
    marks = c[:, :, 0].numpy() > 2
    return SimpleNamespace(c=c, scores=from_arrays(c), masks=masks, utility=utility, marks=marks)


def learned(c, rows, k, decay):
    return learn_weights(c[rows], k=k, weight_decay=decay).values


def test_candidates_are_those_of_learn_weights_and_the_best_is_taken(case):
    found = search(case.scores, (case.masks, case.utility), KS, DECAYS)
    assert [(c.k, c.weight_decay) for c in found.without] == [(None, None)]
    assert {(c.k, c.weight_decay) for c in found.candidates} == {
        (k, d) for k in (5, 10) for d in DECAYS
    }  # 50 > N
    for c in found.candidates:
        want = learned(case.c, slice(None), c.k, c.weight_decay)
        torch.testing.assert_close(c.weights.values, want, rtol=1e-4, atol=1e-5)
        assert c.value == pytest.approx(lds(case.c @ want, case.masks, case.utility).mean, abs=1e-3)
    assert found.best is max(found.candidates, key=lambda c: c.value)
    assert found.weights is found.best.weights
    plain = lds(case.c.sum(2), case.masks, case.utility)
    np.testing.assert_allclose(found.unweighted.per_query, plain.per_query, atol=1e-9)
    assert found.difference.mean > 0.1 and found.difference.ci95_total is not None
    assert "unweighted" in found.table() and "LDS" in str(found)
    assert found.as_dict()["candidates"][0]["value"] == found.best.value


def test_folds_are_judged_by_what_they_did_not_choose(case):
    found = search(case.scores, case.marks, KS, DECAYS, seed=3)
    assert found.measure == "Recall@10"
    want = np.empty(Q)
    for _, fold in crossfit_folds(0, Q, 3):
        settings = [learned(case.c, torch.from_numpy(~fold), k, d) for k in (5, 10) for d in DECAYS]
        recall = [recall_at_k((case.c @ w).topk(10).indices, case.marks).per_query for w in settings]
        want[fold] = max(recall, key=lambda r: r[~fold].mean())[fold]
    np.testing.assert_allclose(found.weighted.per_query, want, atol=1e-9)


def test_models_that_choose_do_not_judge(case):
    """Utilities of noise: what is chosen on all of them looks good, what is cross-fitted does not."""
    gains = []
    for seed in range(4):
        utility = np.random.default_rng(seed).normal(size=(16, Q))
        found = search(case.scores, (case.masks, utility), (1, 5, 20), (0.0, 0.3), lr=0.2, seed=seed)
        gains.append((found.best.value - found.without[0].value, found.difference.mean))
    chosen, fair = np.mean(gains, axis=0)
    assert chosen > fair + 0.01, (chosen, fair)


def test_dampings_are_searched_too(case):
    worse = from_arrays(case.c + 20 * contributions(seed=9)[torch.randperm(Q)])
    expected = search({0.1: worse, 10.0: case.scores}, case.marks, KS, DECAYS)
    assert {c.damping for c in expected.candidates} == {0.1, 10.0} and expected.best.damping == 10.0
    assert [c.damping for c in expected.without] == [10.0, 0.1]
    for asked in (
        {"scores": case.scores, "dampings": {0.1: worse, 10.0: case.scores}},
        {"scores": lambda d: case.scores if d == 10 else worse, "dampings": (0.1, 10.0)},
    ):
        found = search(truth=case.marks, ks=KS, decays=DECAYS, **asked)
        assert found.best.setting == expected.best.setting
        np.testing.assert_array_equal(found.weighted.per_query, expected.weighted.per_query)
    found = search(worse, case.marks, [1], [1.0], lambda d: case.scores)
    assert {c.damping for c in found.candidates} == {None, 0.01, 0.1, 1.0, 10.0, 100.0}


def test_wrong_labels_choose_by_opposition(case):
    wrong = np.zeros(Q, dtype=bool)
    wrong[:6] = True
    c = case.c.clone()
    c[:6, :10, 0] -= 4  # training examples pull against them
    found = search(c, wrong, [5], [0.0])
    assert found.measure == "AUC of wrong labels"
    opposition = [
        -(c @ w)[..., :].topk(10, largest=False).values.sum(1).numpy()
        for w in (torch.ones(3), found.weights.values)
    ]
    assert [found.without[0].value, found.best.value] == pytest.approx(
        [mislabel_auc(o, wrong) for o in opposition]
    )


def test_a_calibration_is_a_bank_of_its_queries(case):
    order = np.random.default_rng(2).permutation(Q)
    digests = case.scores.query_digests
    calibration = SimpleNamespace(
        query_digests=[digests[i] for i in order], masks=case.masks, utility=case.utility[:, order]
    )
    one, other = (search(case.scores, t, [5], [0.5]) for t in (calibration, (case.masks, case.utility)))
    np.testing.assert_array_equal(one.weighted.per_query, other.weighted.per_query)
    calibration.query_digests = ["x"] * Q
    with pytest.raises(UndeError, match="24 of 24 are not among its"):
        search(case.scores, calibration)


def test_what_does_not_fit_is_refused(case):
    bank = (case.masks, case.utility)
    for options, message in (
        ({"truth": case.marks[:, :-1]}, r"truth is a ndarray of shape \(24, 39\)"),
        ({"truth": bank, "ks": [41]}, r"nothing to search: ks is \[41\]"),
        ({"truth": bank, "decays": []}, "nothing to search"),
        ({"truth": bank, "decays": [-1.0]}, "weight_decay is -1.0"),
        ({"truth": bank, "dampings": (1, 2)}, "expected {damping: scores} or a function"),
        ({"truth": (case.masks, case.utility.T)}, "bank has masks"),
        ({"truth": np.arange(Q) < 2}, "2 of 24 labels are marked as wrong"),
        ({"truth": np.zeros((Q, N))}, "marks no contributor"),
    ):
        with pytest.raises(UndeError, match=message):
            search(case.scores, **options)
    with pytest.raises(UndeError, match="cannot be split in two folds"):
        search(case.c[:6], case.marks[:6])
