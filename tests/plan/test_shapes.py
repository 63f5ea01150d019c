"""Models, batches and projections as shapes: alike the real ones in all that costs anything."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from unde.errors import UndeError
from unde.gradients import make_units
from unde.plan import plan
from unde.plan.shapes import Undrawn, batches_like, matrices, no_numbers, undrawn_units, without_numbers
from unde.projection import Projection, Spec
from unde.tasks import Classification

pytestmark = pytest.mark.usefixtures("one_thread")


def held(p):
    """Shapes of the matrices; of a sparse one, the bytes of its entries and their places."""
    sides = []
    for m in (p._rows, p._cols, p._flat):
        if m is not None and m.is_sparse:
            sides.append((m.values().nbytes + m.indices().nbytes,))
        else:
            sides.append(None if m is None else tuple(m.shape))
    return sides


@pytest.mark.parametrize("spec", ["none", "kron(4)", "pca(4)", "sjlt(7)", "dense(5)", "dense(5, normal)"])
@pytest.mark.parametrize("shape", [(), (3,), (40,), (3, 2), (3, 40), (40, 3), (40, 30), (9, 4, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projections_are_like_drawn_ones(spec, shape, dtype, monkeypatch):
    drawn = Projection(spec, "weight", shape).to(torch.device("cpu"), dtype)
    monkeypatch.setattr(np.random, "Philox", None)  # nothing is drawn from here on
    with no_numbers():
        undrawn = Undrawn(Spec.parse(spec), shape, dtype)
        feature = undrawn(torch.empty(6, *shape, dtype=dtype))
    assert vars(undrawn).keys() == vars(drawn).keys()
    plain = ("R", "C", "size", "dtype", "device", "factored")
    assert [getattr(undrawn, a) for a in plain] == [getattr(drawn, a) for a in plain]
    assert held(undrawn) == held(drawn)
    real = drawn(torch.ones(6, *shape, dtype=dtype))
    assert (feature.shape, feature.dtype) == (real.shape, real.dtype)


def test_units_are_like_real_ones():
    model = nn.Sequential(nn.Conv2d(2, 9, 3), nn.Linear(30, 5))
    names = [n for n, _ in model.named_parameters()][::-1]
    with no_numbers():
        fake = undrawn_units(without_numbers(model), names, "kron(3)")
    real = make_units(model, names, "kron(3)", 0)
    assert [(u.name, u.shape, u.columns) for u in fake] == [(u.name, u.shape, u.columns) for u in real]
    assert [m.shape for m in matrices(fake)] == [m.shape for m in matrices(real)]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.table = torch.arange(3.0)  # no buffer


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_numbers(device):
    with torch.device(device):
        model = Tied()
    model.embed.weight.requires_grad_(False)
    weight, table = model.embed.weight, model.table
    with no_numbers():
        fake = without_numbers(model)
        out = fake.head(fake.embed(torch.zeros(2, dtype=torch.long)) * fake.scale + fake.table)
    assert out.shape == (2, 7) and out.device.type == "cpu"
    assert fake.embed.weight is fake.head.weight
    assert not fake.embed.weight.requires_grad
    assert model.embed.weight is weight and model.table is table and type(weight) is nn.Parameter


def test_batches_of_any_size():
    example = {"x": torch.ones(4, 3), "y": torch.zeros(4, dtype=torch.long), "t": torch.ones(5), "name": "a"}
    batch = batches_like(example)(9)
    shapes = {k: tuple(v.shape) for k, v in batch.items() if k != "name"}
    assert shapes == {"x": (9, 3), "y": (9,), "t": (5,)}
    assert batch["y"].dtype == torch.long and batch["name"] == "a"


def test_garbage_that_others_froze_stays_frozen_and_no_other():
    batch, others = (torch.randn(2, 4), torch.zeros(2).long()), gc.get_freeze_count() > 0
    try:
        for frozen, change in ((False, gc.unfreeze), (True, gc.freeze)):
            change()
            plan(nn.Linear(4, 3), Classification(), batch, n_examples=4)
            with pytest.raises(UndeError, match="cannot run on shapes alone"):
                plan(nn.Linear(5, 3), Classification(), batch, n_examples=4)
            assert (gc.get_freeze_count() > 0) == frozen
    finally:
        (gc.freeze if others else gc.unfreeze)()
