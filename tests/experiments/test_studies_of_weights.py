"""The small mathematics of the weight studies: folds, predictions, reliability."""

import sys
import types

import numpy as np
import torch
from experiments.shared import banks, crossfit
from experiments.shared.banks import Recipe
from experiments.studies import calibration, reliability
from torch import nn

from refusals import refused
from unde import Index
from unde.evaluate import Bank, lds
from unde.index.calibration import list_settings
from unde.methods import TRAK
from unde.scoring import from_arrays
from unde.tasks import Classification


def planted(queries: int = 12, models: int = 40, groups: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of groups, of which the first is what retraining did and the others are noise."""
    predicted = np.random.default_rng(0).normal(size=(models, queries, groups))
    return predicted, predicted[:, :, 0] ** 3  # ranks are kept


def test_folds_judge_what_they_did_not_choose_on():
    predicted, utility = planted()
    for known in ({"eval": utility}, {"eval": utility, "learn": utility}):
        found = crossfit.folds(types.SimpleNamespace(utility=known))
        assert len(found) == (2 if "learn" in known else 4)
        judged = np.zeros(utility.shape, dtype=int)
        for fold in found:
            assert not (fold.models & fold.judging_models).any()
            assert fold.role == "learn" or not (fold.queries & fold.judging_queries).any()
            judged[np.ix_(fold.judging_models, fold.judging_queries)] += 1
        assert (judged == 1).all()
        single = predicted.transpose(2, 0, 1)  # each group alone is a candidate
        assert [fold.choose(single, known[fold.role]) for fold in found] == [0] * len(found)
        e = crossfit.estimate([single[0]] * len(found), utility, found)
        assert e.mean == 1.0 and e.ci95_total is not None
        assert crossfit.estimate([single[1]] * len(found), utility, found).mean < 0.5


def test_models_that_judge_in_several_folds_count_once():
    """The interval over models is about that of all models at once, however many folds share them."""
    predicted, utility = planted(queries=60, models=64)
    bank, noisy = types.SimpleNamespace(utility={"eval": utility, "learn": utility}), predicted.mean(2)
    widths = [
        crossfit.estimate([noisy] * n, utility, crossfit.folds(bank, n)).subset_bootstrap.standard_error()
        for n in (2, 4, 8)
    ]
    expected = crossfit.of_predictions(noisy, utility).subset_bootstrap.standard_error()
    np.testing.assert_allclose(widths, expected, rtol=0.35)


def test_predictions_of_groups_sum_to_those_of_scores():
    scores = from_arrays(
        torch.randn(5, 30, 3, generator=torch.Generator().manual_seed(0)), groups=["a", "b", "c"]
    )
    masks, w = np.random.default_rng(0).random((8, 30)) < 0.5, torch.tensor([[1.0, 1, 1], [0.5, 2, 0]])
    parts, whole = crossfit.resolved(scores, masks), crossfit.predicted(scores, masks, w)
    np.testing.assert_allclose(parts @ w.double().numpy().T, whole.transpose(1, 2, 0), atol=1e-4)
    np.testing.assert_allclose(whole[0].T, (scores.total() @ masks.T.astype(np.float32)).numpy(), atol=1e-4)
    truth = scores.total().double().numpy() @ masks.T
    expected = lds(scores.total(), masks, truth.T)
    np.testing.assert_allclose(crossfit.of_predictions(whole[0], truth.T).per_query, expected.per_query)


def bank(path, seed: int, subsets: int, noise: float, n_train: int = 30) -> Bank:
    """Utilities that are one function of the subset, plus noise of the seed."""
    data = np.linspace(-1, 1, n_train)

    def train(indices, train_seed):
        return data[indices].sum() + noise * np.random.default_rng([train_seed, seed]).normal()

    return Bank.run(
        path,
        train=train,
        utility=lambda model: {"eval": np.array([model, -model])},
        n_train=n_train,
        subsets=subsets,
        name=str(seed),
    )


def test_reliability_is_one_without_noise_and_low_with_much(tmp_path, monkeypatch):
    monkeypatch.setattr(reliability, "FOLDER", tmp_path)
    for name, noise in (("still", 0.0), ("noisy", 100.0)):
        bank(tmp_path / f"{name}.npz", 1, 12, noise)
        bank(tmp_path / f"{name}-again.npz", 2, 8, noise)
        monkeypatch.setitem(reliability.BANKS, name, (name, f"{name}-again"))
    still, noisy = reliability.run("still"), reliability.run("noisy")
    assert still == {"models": 12, "twice": 8, "r": 1.0, "ci95": 0.0, "ceiling": 1.0, "accuracy": None}
    assert noisy["r"] < 0.8 and noisy["ci95"] > 0.1


def test_reliability_refuses_other_subsets(tmp_path, monkeypatch):
    monkeypatch.setattr(reliability, "FOLDER", tmp_path)
    monkeypatch.setitem(reliability.BANKS, "one", ("one", "one-again"))
    bank(tmp_path / "one.npz", 1, 12, 0.0)
    bank(tmp_path / "one-again.npz", 2, 8, 0.0, n_train=40)
    refused("other subsets than one", reliability.run, "one")


def test_a_bank_of_other_seeds_has_the_same_subsets(monkeypatch):
    """The first of them, trained by the same recipe with the seed after."""
    first = Recipe("models", lambda indices, seed: (len(indices), seed), lambda model: {}, 30, 64)
    fake = types.SimpleNamespace(recipe=lambda: first)
    monkeypatch.setitem(sys.modules, "experiments.shared.toybank", fake)
    monkeypatch.setitem(banks.MADE_BY, "toy", ("toybank", ()))
    assert banks.recipe("toy") is first
    again = banks.recipe("toy-again")
    assert again.train(np.arange(5), 7) == (5, 8)
    assert (again.subsets, again.n_train, again.name) == (16, 30, "models, other seeds")
    refused("no recipe for a bank 'toys-again'", banks.recipe, "toys-again")


def test_studies_that_read_the_inside_of_an_index(tmp_path):
    """Each of these calls what the package does not publish."""
    torch.manual_seed(0)
    model, x, method = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(900, 6), TRAK()
    data, queries = (x, x[:, :3].argmax(1)), (torch.randn(120, 6), torch.randint(3, (120,)))
    index = Index.build(model, Classification(), data, tmp_path / "index", method=method, progress=False)
    cell = types.SimpleNamespace(
        methods={"TRAK": method},
        index_for=lambda method: index,
        queries=lambda role: queries,
    )
    masks = np.random.default_rng(0).random((8, 900)) < 0.5
    curves = list_settings(index._state.stored)
    found = calibration._predictions(cell, index, tmp_path / "index", "eval", masks, curves)
    assert {p.shape[:2] for p in found.values()} == {(8, 120)}
