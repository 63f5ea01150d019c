"""Explainers for quanda: by the interface that quanda 0.5 has, and with quanda itself where it is installed."""

import inspect
import sys
import types
from abc import ABC, abstractmethod

import pytest
import torch
from torch.utils.data import TensorDataset

import toy
from refusals import refused
from unde import Index, Weights
from unde.integrations.quanda import explainer
from unde.methods import TracIn
from unde.tasks import Classification

TRAIN, ASK = toy.data(22), toy.data(4, seed=1)

# As quanda 0.5.0 has them.
SIGNATURES = {
    "__init__": ["self", "model", "train_dataset", "task", "checkpoints", "checkpoints_load_func", "kwargs"],
    "explain": ["self", "test_data", "targets"],
    "self_influence": ["self", "batch_size"],
}


class Explainer(ABC):
    """What unde needs of quanda's base class, with its signatures."""

    accepted_tasks: list = []  # noqa: RUF012

    def __init__(
        self,
        model,
        train_dataset,
        task="image_classification",
        checkpoints=None,
        checkpoints_load_func=None,
        **kwargs,
    ):
        if task not in self.accepted_tasks:
            raise ValueError(task)
        self.model, self.train_dataset = model, train_dataset
        self.device = str(next(model.parameters()).device)
        self.checkpoints = (
            [] if checkpoints is None else checkpoints if isinstance(checkpoints, list) else [checkpoints]
        )
        self.checkpoints_load_func = checkpoints_load_func

    @abstractmethod
    def explain(self, test_data, targets): ...

    def self_influence(self, batch_size=32):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def base(monkeypatch):
    """quanda itself if it is here, else a stand-in of the same interface."""
    try:
        from quanda.explainers import Explainer as real

        return real
    except ImportError:
        module = types.ModuleType("quanda.explainers")
        module.Explainer = Explainer  # ty: ignore[unresolved-attribute]
        monkeypatch.setitem(sys.modules, "quanda", types.ModuleType("quanda"))
        monkeypatch.setitem(sys.modules, "quanda.explainers", module)
        return Explainer


def made(cls, **options):
    return cls(model=toy.net(), train_dataset=TensorDataset(*TRAIN), **options)


def own(tmp_path, **options):
    return toy.build(tmp_path / "own", method=TracIn(projection="none"), **options)


def test_the_interface_is_that_of_quanda(base):
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(base, name)).parameters) == parameters
    cls = explainer()
    assert issubclass(cls, base) and not inspect.isabstract(cls)
    taken = inspect.signature(cls.__init__).parameters
    assert [*taken][:6] == SIGNATURES["__init__"][:-1]
    assert {"model_id", "cache_dir"} <= set(taken)  # by which metrics keep explainers apart
    for name in ("explain", "self_influence"):
        assert list(inspect.signature(getattr(cls, name)).parameters) == SIGNATURES[name]
    assert inspect.signature(cls.self_influence).parameters["batch_size"].default == 32


def test_explanations_are_our_scores(tmp_path):
    index = own(tmp_path)
    found = made(explainer(TracIn(projection="none")))
    torch.testing.assert_close(found.explain(test_data=ASK[0], targets=ASK[1]), index.score(ASK).total())
    torch.testing.assert_close(found.explain(ASK[0], ASK[1].tolist()), index.score(ASK).total())
    torch.testing.assert_close(found.self_influence(batch_size=3), index.self_influence())
    w = Weights(torch.tensor([0.4, 1.6]), index.groups.names)
    weighted = made(explainer(TracIn(projection="none"), weights=w))
    torch.testing.assert_close(weighted.explain(ASK[0], ASK[1]), index.score(ASK).total(w))
    torch.testing.assert_close(weighted.self_influence(), index.self_influence(w))


def test_an_index_is_kept_and_found(tmp_path):
    cls = explainer(TracIn(projection="none"), groups="tensor")
    found = made(cls, cache_dir=str(tmp_path), model_id="m")
    scores = found.explain(*ASK)
    there = Index.open(tmp_path / "m", model=toy.net(), task=Classification())
    assert len(there.groups) == 4
    torch.testing.assert_close(there.score(ASK).total(), scores)
    torch.testing.assert_close(made(cls, cache_dir=str(tmp_path), model_id="m").explain(*ASK), scores)
    other = cls(model=toy.net(5), train_dataset=TensorDataset(*TRAIN), cache_dir=str(tmp_path), model_id="m")
    refused("already holds another index", other.explain, *ASK)
    alone = made(cls)
    alone.explain(*ASK)
    folder = alone.index.folder
    assert folder.exists()
    alone._temporary.cleanup()
    assert not folder.exists()


def test_checkpoints_are_added_up(tmp_path):
    states = {"a": toy.net(3).state_dict(), "b": toy.net(4).state_dict()}

    def load(model, path):
        model.load_state_dict(states[path])
        return 1.0

    cls = explainer(TracIn(projection="none"))
    found = made(cls, checkpoints=["a", "b"], checkpoints_load_func=load)
    want = own(tmp_path, model=toy.net(4), checkpoints=[states["a"], states["b"]]).score(ASK).total()
    torch.testing.assert_close(found.explain(*ASK), want)
    assert torch.equal(found.model[0].weight, states["b"]["0.weight"])
    one = made(cls, checkpoints="a", checkpoints_load_func=load)
    torch.testing.assert_close(
        one.explain(*ASK), toy.build(tmp_path / "one", model=toy.net(3)).score(ASK).total()
    )


def test_texts_come_as_dicts(tmp_path):
    pytest.importorskip("transformers")
    from hf_toy import gpt2

    g = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(0, 99, (7,), generator=g).tolist(), "text": "for people"}
        for _ in range(5)
    ]
    for row in rows:
        row["labels"] = row["input_ids"]
    found = explainer("tracin")(model=gpt2(), train_dataset=rows, task="causal_lm")
    ids = torch.tensor([r["input_ids"] for r in rows[:2]])
    scores = found.explain(test_data={"input_ids": ids, "attention_mask": torch.ones_like(ids)}, targets=ids)
    assert scores.shape == (2, 5) and scores.argmax(1).tolist() == [0, 1]  # they are training examples
    torch.testing.assert_close(scores.diagonal(), found.self_influence()[:2])


def test_mistakes(monkeypatch):
    refused(r"unknown weights 'lern'.*Did you mean 'learn'", explainer, weights="lern")
    with pytest.raises(ValueError, match="regression"):
        made(explainer(), task="regression")
    for name in [n for n in sys.modules if n.partition(".")[0] == "quanda"]:
        monkeypatch.setitem(sys.modules, name, None)
    refused("this needs quanda: pip install 'quanda'", explainer)


def test_metrics_of_quanda():
    """Numbers that quanda computes itself, against the same written out."""
    metrics = pytest.importorskip("quanda.metrics.downstream_eval")
    heuristics = pytest.importorskip("quanda.metrics.heuristics")
    data, model = TensorDataset(*TRAIN), toy.net()
    found = explainer(TracIn(projection="none"))(model=model, train_dataset=data)
    scores = found.explain(*ASK)
    metric = metrics.ClassDetectionMetric(model=model, train_dataset=data, s=3)
    metric.update(explanations=scores, test_targets=ASK[1])
    top = scores.topk(3).indices
    want = (TRAIN[1][top] == ASK[1][:, None]).float().mean()
    assert metric.compute()["score"] == pytest.approx(float(want))
    spread = heuristics.TopKCardinalityMetric(model=model, train_dataset=data, top_k=3)
    spread.update(explanations=scores)
    assert spread.compute()["score"] == pytest.approx(len(top.unique()) / top.numel())
