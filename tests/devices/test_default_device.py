"""`torch.set_default_device`: programs that name no device get the numbers of the CPU."""

import copy

import pretended_device
import pytest
import torch
from settings import assert_near
from torch import nn

import toy
import unde
from unde import Index
from unde.default_device import host_default
from unde.evaluate import baseline_scores, tail_patch
from unde.methods import EKFAC, TRAK, TracIn
from unde.tasks import Classification


class Shifted(nn.Module):
    """Makes a tensor without a device, as programs with a default device do."""

    def __init__(self):
        super().__init__()
        self.inside = toy.net()

    def forward(self, x):
        return self.inside(x + 0.1 * torch.arange(toy.FEATURES))


def answers(model, data, queries, folder):
    """Of builds and questions; weights are given as a tensor."""
    task = Classification()
    for method in (TracIn(projection="none"), TRAK(projection="sjlt(20)"), EKFAC(projection="kron(3)")):
        given = {"train_data": data, "model": model, "task": task}
        toy.build(folder / method.name, method=method, **given)
        index = Index.open(folder / method.name, **given)
        scores = index.score(queries)
        yield scores.total(torch.linspace(0.5, 1.5, len(index.groups.names)))
        yield scores.top(3).values
        yield scores.by_group()
        yield index.self_influence()
        yield unde.learn_weights(scores, k=3, epochs=1).values
    yield scores.rescore(5).total()
    yield unde.attribute(model, task, data, queries, progress=False).total()
    yield baseline_scores(model, task, data, queries)["hidden-state similarity"]
    patched = tail_patch(model, task, data, queries, [[0, 1]] * 4, optimizer=torch.optim.AdamW, lr=0.01)
    yield torch.tensor(patched.summed.per_query, dtype=torch.float32, device="cpu")


def test_builds_and_questions(tmp_path, device, operations):
    model, data, queries = Shifted(), toy.data(22), toy.data(4, seed=5)
    here = list(answers(copy.deepcopy(model), data, queries, tmp_path / "cpu"))
    assert pretended_device.counts[0].operations == 0
    torch.set_default_device(device)
    try:
        data, queries = ([x.to(device) for x in both] for both in (data, queries))
        there = list(answers(model.to(device), tuple(data), tuple(queries), tmp_path / "device"))
    finally:
        torch.set_default_device(None)
    assert operations() > 100
    for a, b in zip(here, there, strict=True):
        assert b.device.type == "cpu"
        assert_near(b, a.to(b), 1e-4)


def test_the_default_is_changed_inside_alone():
    @host_default
    class Public:
        @classmethod
        def make(cls):
            return torch.zeros(1)

        @property
        def held(self):
            return torch.zeros(1)

        def found(self):
            return torch.zeros(1)

    with torch.device("meta"):
        public = Public()
        assert [x.device.type for x in (Public.make(), public.held, public.found())] == ["cpu"] * 3
        assert torch.zeros(1).is_meta
        with pytest.raises(ZeroDivisionError):
            host_default(lambda: 1 / 0)()
        assert torch.zeros(1).is_meta
