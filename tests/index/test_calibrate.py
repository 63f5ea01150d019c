"""`Index.calibrate`: predictions against totals in a loop, halves that are kept, what is asked afterwards."""

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import toy
import unde
from unde import Index, UndeError
from unde.evaluate import Bank, TrainingSpec
from unde.index import calibrate as module
from unde.index.calibrate import Predictor
from unde.index.calibration import DAMPINGS, Calibration, Setting, list_settings
from unde.methods import DAS, EKFAC, TRAK, LoGRA, TracIn
from unde.store import layout
from unde.tasks import Classification

N = 40
QUERIES = toy.data(30, seed=5)


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def training(**other):
    return TrainingSpec(
        model=toy.net, data=toy.data(N), loss=loss, optimizer=partial(torch.optim.Adam, lr=0.05), epochs=4,
        batch_size=8, **other,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    model, method = training()(np.arange(N), 0), EKFAC(projection="none", fisher="sampled")
    return toy.build(tmp_path_factory.mktemp("built") / "i", N, model=model, method=method)


@pytest.fixture
def index(built, tmp_path):
    return toy.copied(built, tmp_path / "i")


def masks(count=6, seed=0):
    return np.random.default_rng(seed).random((count, N)) < 0.5


@pytest.mark.parametrize(
    "method",
    [TracIn(), TRAK(damping=0.01), TRAK(damping=10.0), TRAK(form="dual"), TRAK(fisher="sampled"), LoGRA(),
     LoGRA(damping_scope="model"), EKFAC(), EKFAC(fisher="sampled"), TracIn(cosine=True)],
    ids=str,
)  # fmt: skip
def test_predictions_are_sums_of_scores_over_subsets(index, method):
    scores = index.score(QUERIES, method)
    members = masks()
    predictor = Predictor(index._state.scorer, scores.queries, scores.query_digests, members)
    made = predictor.predict(scores.method)
    if scores.method.linear:
        want = np.stack([scores.by_group()[:, m].sum(1).numpy() for m in members])
    else:
        want = np.stack([scores.total()[:, m].sum(1, keepdim=True).numpy() for m in members])
    np.testing.assert_allclose(made, want, rtol=2e-3, atol=2e-5 * np.abs(want).max())


def test_predictions_of_the_last_checkpoint_are_those_of_its_scores(tmp_path):
    built = partial(toy.build, n=N, method=TRAK(projection="none"))
    several = built(tmp_path / "all", checkpoints=toy.states(0, 1, 2))
    alone = built(tmp_path / "last", model=toy.net(2))
    features = several.features(QUERIES).features
    scores = several._state.scorer.scores(several.method, features, [""] * 30, last_checkpoint=True)
    torch.testing.assert_close(3 * scores.total(), alone.score(QUERIES).total(), rtol=1e-4, atol=1e-6)
    setting = Setting(several.method, last_checkpoint=True)
    predictor = Predictor(several._state.scorer, scores.queries, scores.query_digests, masks())
    made = predictor.predict(setting.method, setting.terms(several._state.stored)).sum(2)
    np.testing.assert_allclose(made, masks() @ scores.total().numpy().T, rtol=1e-3, atol=1e-5)


def test_settings_of_an_index(index, tmp_path):
    curves = list_settings(index._state.stored)
    families = {curve[0].family for curve in curves}
    assert {"TracIn", "TRAK", "TRAK, sampled Fisher", "LoGRA, one λ", "EKFAC, sampled Fisher"} <= families
    names = [s.name for curve in curves for s in curve]
    assert len(set(names)) == len(names)
    trak = next(c for c in curves if c[0].family == "TRAK")
    assert [s.method.damping for s in trak] == list(DAMPINGS)
    assert min(DAMPINGS) == 0.001 and max(DAMPINGS) == 100
    stored = type("Stored", (), {"method": DAS("none"), "manifest": type("M", (), {"terms": 1})})
    (curve,) = list_settings(stored)
    assert {type(s.method) for s in curve} == {DAS} and len(curve) > 3


def test_calibrated_scores_are_used_and_said(index, capsys):
    made = index.calibrate(training(), QUERIES, halves=6)
    assert (made.halves, made.trainings, made.how) == (6, 8, "retrain")
    assert 0 <= made.ceiling <= 1 and made.seconds > 0
    assert set(made.baselines) == {"hidden-state similarity", "loss"}
    assert made.settings[0]["lds"] == max(s["lds"] for s in made.settings)
    assert "of at most 100" in str(replace(made, ceiling=1.0))
    assert "as much as the noise between seeds leaves" in str(replace(made, ceiling=-1.0))
    capsys.readouterr()
    opened = Index.open(index.folder, model=index.model, task=Classification())
    scores = opened.score(toy.data(3, seed=9))
    said = capsys.readouterr().err
    assert re.sub(r"\s+", " ", said).count(str(made)) == 1 and "retrained models" in said
    assert scores.method == made.method
    assert opened.score(toy.data(3, seed=9)) and not capsys.readouterr().err  # once is enough
    plain = opened.uncalibrated().score(toy.data(3, seed=9))
    assert plain.method == index.method and plain.default_weights is None


def test_a_calibration_reads_back_and_its_weights_are_used(index, tmp_path):
    made = index.calibrate(training(), QUERIES, halves=5, baselines=False)
    again = Calibration.load(index.folder / layout.CALIBRATION)
    assert str(again) == str(made) and again.method == made.method and again.index == index.manifest.id
    assert again.expected.mean == made.expected.mean and again.expected.ci95_total == made.expected.ci95_total
    made.save(tmp_path / "c.json")
    assert (tmp_path / "c.json").read_bytes() == (index.folder / layout.CALIBRATION).read_bytes()
    assert index.verify()
    values = torch.linspace(0.5, 1.5, len(index.groups))
    weights = unde.Weights(values, list(index.groups.names), ["00"])
    index._calibration = replace(made, weights=weights)
    scores = index.score(toy.data(3, seed=9))
    torch.testing.assert_close(scores.total(), scores.total(weights.values))
    assert torch.equal(scores.top(4).indices, scores.top(4, weights.values).indices)
    plain = scores.total(torch.ones(len(values)))
    assert not torch.allclose(scores.total(), plain)
    torch.testing.assert_close(index.score(toy.data(3, seed=9), made.method).total(), plain)
    bank = masks(12), np.random.default_rng(0).random((12, 3))
    both = unde.evaluate.compare(scores, weights, *bank, bootstrap=0)
    assert both.unweighted.mean == unde.evaluate.lds(plain, *bank).mean
    assert scores.regroup({"all": list(index.groups.names)}).default_weights is None


@pytest.mark.parametrize(
    "change", [lambda c: c | {"ceiling": 0.99}, lambda c: c | {"version": 99}, lambda c: []]
)
def test_a_damaged_calibration_is_refused(index, change):
    index.calibrate(training(), QUERIES, halves=4, baselines=False)
    path = index.folder / layout.CALIBRATION
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert not index.verify()
    opened = Index.open(index.folder, model=index.model, task=Classification())
    with pytest.raises(UndeError, match="calibrate again"):
        opened.score(toy.data(3, seed=9))


def test_an_index_that_changed_is_not_used_as_calibrated(index, capsys):
    index.calibrate(training(), QUERIES, halves=4, baselines=False)
    index.append(toy.data(4, seed=77), progress=False)
    capsys.readouterr()
    assert index.calibration is None
    assert "has changed since it was calibrated" in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert index.score(toy.data(3, seed=9)).method == index.method


class Counting:
    """A training that says how often it was called, and can fail."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at, self.train = [], fail_at, training()

    def __call__(self, indices, seed):
        if len(self.calls) == self.fail_at:
            raise RuntimeError("diverged")
        self.calls.append((len(indices), seed))
        return self.train(indices, seed)


def test_halves_are_kept_and_more_can_be_added(index):
    first = Counting()
    index.calibrate(first, QUERIES, halves=4, baselines=False)
    assert len(first.calls) == 6 and {n for n, _ in first.calls} == {N // 2}
    again = Counting()
    index.calibrate(again, QUERIES, halves=7, baselines=False)
    assert len(again.calls) == 3  # one more for each half; the two second seeds are there
    other = Counting()
    index.calibrate(other, toy.data(30, seed=6), halves=4, baselines=False)
    assert len(other.calls) == 6  # other queries: nothing of the first is taken for theirs


def test_a_damaged_half_is_named_and_trained_again(index):
    index.calibrate(Counting(), QUERIES, halves=4, baselines=False)
    part = sorted((index.folder / layout.CALIBRATION_HALVES).rglob("model-*.safetensors"))[2]
    toy.flip(part, -1)
    [problem] = index.verify().problems
    assert problem.name.endswith(part.name) and "next calibration trains them again" in problem.advice
    again = Counting()
    index.calibrate(again, QUERIES, halves=4, baselines=False)
    assert len(again.calls) == 1 and index.verify()


def test_a_training_that_fails_loses_nothing(index):
    failing = Counting(fail_at=3)
    with pytest.raises(UndeError, match=r"diverged[\s\S]*3 of 6 models are kept"):
        index.calibrate(failing, QUERIES, halves=4, baselines=False)
    rest = Counting()
    assert index.calibrate(rest, QUERIES, halves=4, baselines=False).halves == 4
    assert len(rest.calls) == 3


def test_models_that_diverge_are_an_error(index):
    def nan(indices, seed):
        model = toy.net()
        torch.nn.init.constant_(model[0].weight, float("nan"))
        return model

    with pytest.raises(UndeError, match="did the training diverge"):
        index.calibrate(nan, QUERIES, halves=4, baselines=False)


def minutes():
    """A clock that is a minute later at every look."""
    clock = iter(np.arange(0.0, 1e6, 60.0))
    return SimpleNamespace(monotonic=lambda: next(clock))


def test_the_budget_ends_the_training_between_models(index, monkeypatch):
    options = {"halves": 16, "baselines": False}
    monkeypatch.setattr(module, "time", minutes())
    said = "budget of 3 min is too short for 4 halves.*models that are trained are kept"
    with pytest.raises(UndeError, match=said):
        index.calibrate(Counting(), QUERIES, budget="3min", **options)
    monkeypatch.setattr(module, "time", minutes())
    assert 4 <= index.calibrate(Counting(), toy.data(30, seed=6), budget="8min", **options).halves < 16


def test_it_stops_early_when_the_choice_is_sure(index, monkeypatch):
    monkeypatch.setattr(module, "is_sure", lambda *_: True)
    assert index.calibrate(Counting(), QUERIES, halves=16, baselines=False).halves == module.SURE_FROM


def test_sure_is_what_no_other_setting_beats():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(12, 80, 1))
    utility = truth[:, :, 0] + rng.normal(size=(12, 80))
    far = {"a": truth, "b": rng.normal(size=truth.shape)}
    assert module.is_sure(far, utility, "a") and not module.is_sure(far, utility, "b")
    close = {"a": truth + rng.normal(size=(12, 80, 1)), "b": truth + rng.normal(size=(12, 80, 1))}
    assert not (module.is_sure(close, utility, "a") and module.is_sure(close, utility, "b"))


def test_local_training_continues_from_the_final_model(index):
    made = index.calibrate(training(), QUERIES, how="local", halves=4, baselines=False)
    assert made.how == "local" and "no estimate" in str(made)
    start = module._retraining(index._state, training(), "local")
    first = start.initial_model(0)
    assert start.epochs == 1 and start.schedule is None
    for (name, a), (_, b) in zip(first.named_parameters(), index.model.named_parameters()):
        assert torch.equal(a, b) and a is not b, name


def test_a_bank_of_the_same_queries_trains_nothing(index):
    rng = np.random.default_rng(0)
    utility = rng.random((8, 30))
    made = index.calibrate(queries=QUERIES, bank=(masks(8), utility), baselines=False)
    assert made.how == "bank" and made.trainings == 0 and made.ceiling is None
    bank = Bank(None, masks(8), {"eval": utility[:, None]}, np.zeros((8, 1)), np.zeros((8, 1)), {})
    assert index.calibrate(queries=QUERIES, bank=bank, baselines=False).expected.mean == made.expected.mean


def test_processes_train_halves(index, tmp_path):
    options = {"halves": 4, "baselines": False}
    made = index.calibrate(importable_training, QUERIES, executor="processes:2", **options)
    twin = toy.build(tmp_path / "twin", N, model=index.model, method=index.method)
    here = twin.calibrate(importable_training, QUERIES, **options)
    assert made.halves == here.halves == 4 and made.expected.mean == here.expected.mean


def importable_training(indices, seed):
    return training()(indices, seed)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"train": None}, "there is no way to train"),
        ({"train": "SGD"}, "train is a str"),
        ({"train": importable_training, "how": "local"}, "how='local' continues"),
        ({"how": "again"}, "'again'"),
        ({"halves": 2}, "halves is 2"),
        ({"budget": "soon"}, "budget is 'soon'"),
        ({"queries": None}, "queries is missing"),
        ({"queries": toy.data(N)}, "also in the training data"),
        ({"queries": toy.data(1, seed=5)}, "1 query cannot tell settings apart"),
        ({"bank": (masks(8)[:, :5], np.zeros((8, 30)))}, "the bank is of other data"),
        ({"bank": (masks(8), np.zeros((8, 29)))}, "the bank is of other data"),
        ({"bank": (masks(3), np.zeros((3, 30)))}, "S ≥ 4"),
        ({"bank": (masks(8), np.zeros((8, 30)))}, "nothing to predict"),
        ({"bank": (masks(8), np.full((8, 30), np.nan))}, "did a training diverge"),
        ({"bank": 3}, "bank is a int"),
    ],
)
def test_bad_input_is_one_clear_error(index, asked, said):
    with pytest.raises(UndeError, match=re.escape(said)):
        index.calibrate(**({"train": training(), "queries": QUERIES, "baselines": False} | asked))
    assert not (index.folder / layout.CALIBRATION).exists()


def test_an_index_without_its_model_cannot_be_calibrated(index):
    with pytest.raises(UndeError, match=r"pass model=, task= to Index\.open"):
        Index.open(index.folder).calibrate(training(), QUERIES)
