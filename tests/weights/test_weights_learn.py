import json

import pytest
import torch
from weights_fakes import CosineScores, FakeScores, random_scores, signal_model

from unde.errors import UndeError
from unde.scoring.arrays import ArrayScores
from unde.weights import learn_weights
from unde.weights.learn import SOLVERS


@pytest.mark.parametrize("solver", SOLVERS)
def test_signal_model_gives_alpha_over_sigma_squared(solver):
    values, optimum = signal_model()
    options = {"epochs": 40, "lr": 0.05} if solver == "adamw" else {}
    learned = learn_weights(FakeScores(values), k=10, weight_decay=0.0, solver=solver, **options).values
    assert optimum.max() / optimum.min() > 20
    # 40 · 390 draws of noise: 1 % sampling error on σ², about 5 % on α from 400 rows of signal.
    assert torch.corrcoef(torch.stack([learned, optimum]))[0, 1] > 0.99
    torch.testing.assert_close(learned, optimum, rtol=0.2, atol=0.05)


@pytest.mark.parametrize("objective", ["supervised", "bottom-k", "top-k-bottom-k"])
def test_other_losses_find_the_same_optimum(objective):
    values, optimum = signal_model()
    signed = -values if objective == "bottom-k" else values
    positives = [0] * 40 if objective == "supervised" else None
    learned = learn_weights(
        FakeScores(signed), k=10, weight_decay=0.0, objective=objective, positives=positives
    )
    assert torch.corrcoef(torch.stack([learned.values, optimum]))[0, 1] > 0.9


def test_permutations_of_groups_and_of_training_examples():
    values, order = random_scores(), torch.tensor([3, 0, 4, 1, 2])
    plain = learn_weights(FakeScores(values), solver="fixed-point")
    permuted = learn_weights(FakeScores(values[:, :, order]), solver="fixed-point")
    torch.testing.assert_close(permuted.values, plain.values[order], rtol=1e-5, atol=1e-6)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    for solver in SOLVERS:
        plain, permuted = (learn_weights(FakeScores(v), solver=solver) for v in (values, values[:, order]))
        torch.testing.assert_close(permuted.values, plain.values, rtol=1e-5, atol=1e-6)


def test_noise_depends_on_the_seed_alone_and_hides_the_signal():
    values, optimum = signal_model()
    plain, noisy, again, other = (
        learn_weights(
            FakeScores(values), k=3, weight_decay=0.0, solver="fixed-point", noise=s, seed=seed
        ).values
        for s, seed in ((0.0, 0), (3.0, 0), (3.0, 0), (3.0, 1))
    )
    assert torch.equal(noisy, again)
    assert not torch.allclose(noisy, other, rtol=1e-3)
    errors = [(w - optimum).norm() for w in (plain, noisy)]
    assert errors[0] < 0.5 * errors[1]


def test_adamw_seed_is_the_start():
    scores = FakeScores(random_scores())
    first, again, other = (
        learn_weights(scores, k=5, solver="adamw", epochs=1, seed=seed).values for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_solver_is_algorithm_1_unless_another_is_named():
    values = random_scores()
    assert learn_weights(FakeScores(values)).provenance["solver"] == "adamw"
    assert learn_weights(FakeScores(values), solver="fixed-point").provenance["converged"] is True
    for weights in (
        learn_weights(CosineScores(values), k=5, epochs=1),
        learn_weights(FakeScores(values), k=5, objective="no-norm", epochs=1),
    ):
        assert weights.provenance["solver"] == "adamw"


def test_weights_carry_where_they_come_from():
    asked = {
        "k": 4,
        "weight_decay": 0.2,
        "noise": 0.5,
        "seed": 9,
        "solver": "adamw",
        "epochs": 3,
        "lr": 0.02,
        "penalty": 0.1,
    }
    weights = learn_weights(FakeScores(random_scores()), **asked)
    record = json.loads(json.dumps(weights.provenance))
    objective = record.pop("objective")
    data = {"method": "fake", "scores": {"index": "abc"}, "queries": 12, "examples": 60}
    assert record == asked | data
    assert len(objective["curve"]) == 3
    assert objective["name"] == "top-k"
    assert 0 < objective["unweighted"] < 1
    assert weights.groups == ["g0", "g1", "g2", "g3", "g4"]
    assert weights.query_digests == [f"q{i}" for i in range(12)]


def test_concepts_get_weights_of_their_own():
    sources = {"subject": FakeScores(random_scores(seed=1)), "style": FakeScores(random_scores(seed=2))}
    learned = learn_weights(sources, k=5)
    assert list(learned) == ["subject", "style"]
    for name, source in sources.items():
        assert torch.equal(learned[name].values, learn_weights(source, k=5).values)
    positives = {"subject": [0] * 12, "style": [1] * 12}
    learned = learn_weights(sources, objective="supervised", positives=positives)
    alone = learn_weights(sources["style"], objective="supervised", positives=[1] * 12)
    assert torch.equal(learned["style"].values, alone.values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 61}, "k is 61: expected a whole number from 1 to 60"),
        ({"k": 0}, "k is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"noise": -1.0}, "noise is -1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"objective": "top"}, "unknown objective 'top'.*Did you mean 'top-k'"),
        ({"solver": "adam"}, "unknown solver 'adam'.*Did you mean 'adamw'"),
        (
            {"solver": "fixed-point", "objective": "no-norm"},
            "does not cover objective 'no-norm'.*solver='adamw'",
        ),
        ({"solver": "adamw", "epochs": 0}, "epochs=0"),
        ({"solver": "adamw", "lr": 0.0}, "lr=0.0"),
        ({"solver": "adamw", "weight_decay": 200.0}, "lr·weight_decay.*must not exceed 1"),
        ({"objective": "supervised"}, "needs positives: expected 12 indices"),
        ({"objective": "supervised", "positives": [0] * 11}, r"shape \(11,\).*expected 12 indices"),
        ({"objective": "supervised", "positives": [0.5] * 12}, "torch.float32.*expected 12 indices"),
        ({"objective": "supervised", "positives": [60] * 12}, "from 60 to 60: .*from 0 to 59"),
        ({"objective": "supervised", "positives": [-1] * 12}, "from -1 to -1"),
        ({"positives": [0] * 12}, "only used by objective 'supervised'"),
        ({"positives": {"a": [0] * 12}}, "give both or neither by name"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(UndeError, match=message):
        learn_weights(FakeScores(random_scores()), **options)


def test_bad_scores_are_refused():
    for shape in ((0, 60, 5), (12, 0, 5)):
        with pytest.raises(UndeError, match=f"{shape[0]} queries and {shape[1]} training examples"):
            learn_weights(FakeScores(torch.zeros(shape)))
    with pytest.raises(UndeError, match=r"does not cover method 'fake-cosine'.*use solver='adamw'"):
        learn_weights(CosineScores(random_scores()), k=5, solver="fixed-point")
    with pytest.raises(UndeError, match="named as the scores are, by concept: a"):
        learn_weights({"a": FakeScores(random_scores())}, objective="supervised", positives=[0] * 12)
    with pytest.raises(UndeError, match=r"shape \(2, 3, 4\): expected .* 1 group names"):
        ArrayScores(torch.zeros(2, 3, 4), ["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("memory", [2**30, 1])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_query_with_bad_contributions_is_named(bad, memory, solver):
    values = random_scores()
    values[7, 31, 2] = bad
    with pytest.raises(UndeError, match="query 7 are NaN or infinite \\(group 'g2'\\)"):
        learn_weights(FakeScores(values, memory=memory, rows=20), k=5, solver=solver)


@pytest.mark.parametrize(("solver", "decay"), [("fixed-point", 0.1), ("adamw", 0.5)])
def test_each_solver_has_a_weight_decay_of_its_own(solver, decay):
    scores = FakeScores(random_scores())
    found = learn_weights(scores, k=5, solver=solver)
    assert torch.equal(found.values, learn_weights(scores, k=5, solver=solver, weight_decay=decay).values)
    assert not torch.equal(found.values, learn_weights(scores, k=5, solver=solver, weight_decay=3.0).values)


def test_few_groups_k_and_decay_that_fail_are_told(capsys):
    scores = FakeScores(random_scores(queries=20))
    for k, options in (
        (5, {"weight_decay": 0.0}),
        (3, {"weight_decay": 0.5}),
        (3, {"weight_decay": 1.0, "solver": "fixed-point"}),
    ):
        learn_weights(scores, k=k, epochs=1, **options)
        assert capsys.readouterr().err == ""
    for options in ({"weight_decay": 0.1}, {"solver": "fixed-point"}):
        learn_weights(scores, k=3, epochs=1, **options)
        assert "nearly all weight to one or two groups" in capsys.readouterr().err
    learn_weights(FakeScores(random_scores(queries=19)), epochs=1)
    assert "learned from 19 queries: expected 20 or more" in capsys.readouterr().err


@pytest.mark.parametrize("memory", [2**30, 1])
@pytest.mark.parametrize("solver", SOLVERS)
def test_scores_that_say_nothing_are_refused(memory, solver, capsys):
    values = random_scores(queries=20)

    def learn(v):
        return learn_weights(FakeScores(v, memory=memory, rows=20), solver=solver, epochs=1)

    for bad, message in (
        (values[:1].repeat(20, 1, 1), "all 20 queries have the same scores"),
        (values[:, :, :1], "have one group"),
        (-values.abs(), "no contribution is positive"),
    ):
        with pytest.raises(UndeError, match=message):
            learn(bad)
    capsys.readouterr()
    learn(values.abs())
    assert "no contribution is negative" in capsys.readouterr().err
