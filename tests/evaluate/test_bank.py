import os
import random
from functools import partial
from pathlib import Path

import bank_jobs
import numpy as np
import pytest
import torch
from bank_jobs import assert_same, run

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import Bank

MODELS = 2 * bank_jobs.SUBSETS


def test_shapes_and_values(reference):
    assert reference.masks.shape == (bank_jobs.SUBSETS, bank_jobs.N_TRAIN)
    assert reference.masks.dtype == bool
    assert set(reference.masks.sum(1)) == {bank_jobs.N_TRAIN // 2}
    assert {name: values.shape for name, values in reference.utility.items()} == {
        "near": (bank_jobs.SUBSETS, 5),
        "noise": (bank_jobs.SUBSETS, 3),
    }
    np.testing.assert_array_equal(reference.utility["near"], reference.by_seed["near"].mean(1))
    assert len(np.unique(reference.seeds)) == len(np.unique(reference.by_seed["near"][..., 0])) == MODELS
    assert (reference.seconds > 0).all()


def test_one_model_can_be_made_again_from_its_seed(reference):
    seed = int(reference.seeds[3, 1])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    weight = bank_jobs.train(np.flatnonzero(reference.masks[3]), seed)
    near = bank_jobs.utility(weight)["near"].detach().numpy()
    np.testing.assert_array_equal(near, reference.by_seed["near"][3, 1])


def test_queries_meet_the_same_noise_for_every_model(reference):
    assert len(np.unique(reference.by_seed["noise"].reshape(-1, 3), axis=0)) == 1


def test_one_file_remains_and_opens_alike(reference):
    assert [file.name for file in reference.path.parent.iterdir()] == ["bank.npz"]
    assert_same(Bank.open(reference.path), reference)


def test_provenance(reference):
    plan = reference.provenance["plan"]
    assert plan["name"] == "linear regression"
    assert (plan["n_train"], plan["alpha"], plan["seed"]) == (30, 0.5, 0)
    (environment,) = reference.provenance["environments"]
    assert environment["models"] == MODELS
    assert environment["torch"] == torch.__version__
    assert environment["cpus"] == os.cpu_count()
    assert environment["threads_per_model"] == 1


def test_the_callers_random_state_and_threads_are_left_alone(tmp_path):
    before = torch.get_num_threads()
    torch.manual_seed(1)
    np.random.seed(1)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    bank = run(tmp_path / "b", subsets=1, utility=bank_jobs.count_threads, threads=before + 1)
    assert bank.utility["queries"].tolist() == [[before + 1]]
    assert (torch.rand(1), np.random.rand()) == expected
    assert torch.get_num_threads() == before


def test_failure_in_this_process_keeps_what_is_done_and_its_cause(tmp_path, reference):
    path = tmp_path / "bank"
    with pytest.raises(UndeError, match="RuntimeError: no luck today") as caught:
        run(path, train=bank_jobs.fail_on_some)
    assert isinstance(caught.value.__cause__, RuntimeError)
    first = int(np.argmax(reference.masks[:, 5]))
    assert f"model {2 * first} (subset {first}, seed {reference.seeds[first, 0]})" in str(caught.value)
    assert f"{2 * first} of {MODELS} models are kept" in str(caught.value)
    seeds = []
    assert_same(run(path, train=lambda i, seed: seeds.append(seed) or bank_jobs.train(i, seed)), reference)
    assert seeds == reference.seeds.ravel()[2 * first :].tolist()  # nothing was trained twice


def test_a_finished_bank_is_not_trained_again(reference):
    def train(indices, seed):
        raise AssertionError("trained again")

    assert_same(run(reference.path, train=train, processes=4), reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.4}, "alpha is 0.5 there and 0.4 here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"subsets": 11, "n_train": 31}, "n_train is 30 there and 31 here; subsets is 10 there and 11 here"),
        ({"name": "vit"}, "name is 'linear regression' there and 'vit' here"),
        ({"stratify": np.zeros(30)}, "stratify is None there"),
        ({"seeds_per_subset": 1}, "seeds_per_subset is 2 there and 1 here"),
    ],
)
def test_another_plan_is_refused_for_finished_and_unfinished_banks(tmp_path, reference, change, message):
    refused(message, run, reference.path, **change)
    refused("no luck today", run, tmp_path / "bank", train=bank_jobs.fail_on_some)
    refused(message, run, tmp_path / "bank", **change)


def test_the_default_name_tells_trainings_apart(tmp_path):
    bank = run(tmp_path / "b", name=None, train=partial(bank_jobs.train, pause=0.001), subsets=1)
    assert bank.provenance["plan"]["name"] == "bank_jobs.train(pause=0.001), bank_jobs.utility"
    with pytest.raises(UndeError, match=r"pause=0.001.* there and .*pause=0.002"):
        run(tmp_path / "b", name=None, train=partial(bank_jobs.train, pause=0.002), subsets=1)


@pytest.mark.parametrize(
    ("utility", "message"),
    [
        (
            lambda model: np.array([0.1, np.nan]),
            r"utility\['queries'\] has 1 NaN .* query 1: did the training",
        ),
        (lambda model: np.ones((2, 2)), r"utility\['queries'\] must have shape \(Q,\)"),
        (lambda model: {3: np.ones(2)}, "names must be strings"),
        (lambda model: {}, "at least one named set"),
        (lambda model: None, "must hold real numbers, not object"),
    ],
)
def test_bad_utility_stops_at_the_first_model(tmp_path, utility, message):
    refused(message, run, tmp_path / "bank", utility=utility)


def test_utility_that_changes_its_queries_is_refused(tmp_path):
    sizes = iter([3, 3, 4, 3])
    for _ in range(2):  # also when the odd one is already on disk
        with pytest.raises(UndeError, match=r"\(4,\).*model 2 and .*\(3,\).* for another"):
            run(tmp_path / "bank", utility=lambda model: np.ones(next(sizes)))


def test_nonsense_counts(tmp_path):
    for change in ({"processes": 0}, {"threads": 0}):
        refused("expected at least 1", run, tmp_path / "bank", **change)
    assert not list(Path(tmp_path).iterdir())
