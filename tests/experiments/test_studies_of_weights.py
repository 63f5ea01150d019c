"""The small mathematics of the weight studies: the reference, reliability, and rules left out."""

import sys
import types

import numpy as np
import torch
from experiments.shared import banks
from experiments.shared.banks import Recipe
from experiments.studies import calibration, reliability
from experiments.studies import lds as lds_study
from torch import nn

from refusals import refused
from unde import Index
from unde.evaluate import Bank
from unde.index.settings import list_settings
from unde.methods import TRAK
from unde.tasks import Classification


def planted(queries: int = 12, subsets: int = 40, groups: int = 4) -> tuple[torch.Tensor, np.ndarray]:
    """Predictions of groups, of which the first is what retraining did and the others are noise."""
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randn(subsets, queries, groups, generator=generator)
    return predicted, predicted[:, :, 0].numpy() ** 3  # ranks are kept


def test_reference_finds_the_group_that_foretells():
    w = lds_study.fitted(*planted())
    assert torch.isclose(w.mean(), torch.tensor(1.0), atol=1e-5)
    assert w[0] > 3 * w[1:].max()


def test_halves_are_disjoint_and_all():
    fitting, judging = lds_study.halves(7)
    assert not (fitting & judging).any()
    assert (fitting | judging).all()


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
