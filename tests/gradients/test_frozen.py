"""What makes features cheap: no weight gradient is computed, and no input is kept at its full width."""

import gc

import pytest
import torch
from torch import nn

from cases import BY_NAME
from oracles import plan
from unde.data import Rows
from unde.gradients import Collector
from unde.tasks import Classification, Task

HOOKED = ["mlp", "resnet-batchnorm", "resnet-groupnorm", "gpt2", "llama", "nanogpt", "shared"]


class Spying(Task):
    """Runs another task and looks at the model and the graph between its forward and its backward pass."""

    def __init__(self, task, look):
        self.task, self.look = task, look
        self.saved = []  # shapes that autograd saves for the backward pass

    def loss(self, model, batch):
        with torch.autograd.graph.saved_tensors_hooks(self.save, lambda x: x):
            value = self.task.loss(model, batch)
        self.look(model, value)
        return value

    def save(self, tensor):
        self.saved.append(tuple(tensor.shape))
        return tensor


def leaves(value):
    """The tensors at which the graph of `value` would accumulate gradients."""
    todo, seen, found = [value.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [n for n, _ in node.next_functions]
    return found


def run(name, projection, look, frozen=True):
    model, task, rows = BY_NAME[name].make(torch.float32)
    units, coverage = plan(model, task, rows, projection)
    spy = Spying(task, look)
    if frozen:
        with Collector(model, spy, units, coverage) as collector:
            collector(rows.batch([0, 1, 2, 3]), [0, 1, 2, 3])
    else:
        spy.loss(model, rows.batch([0, 1, 2, 3])).sum().backward()


@pytest.mark.parametrize("name", HOOKED)
def test_no_weight_gradient_is_computed(name):
    looks = []

    def look(model, value):
        mine = {id(p) for p in model.parameters()}
        looks.append([x for x in leaves(value) if id(x) in mine])
        assert not any(p.requires_grad for p in model.parameters())

    run(name, "kron(2)", look)
    assert looks == [[]]


def test_the_spy_sees_weight_gradients_where_there_are_some():
    looks = []
    run("gpt2", "kron(2)", lambda model, value: looks.append((leaves(value), model)), frozen=False)
    found, model = looks[0]
    assert {id(x) for x in found} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", ["vit", "raw-parameters"])
def test_copies_of_raw_parameters_are_the_only_leaves(name):
    looks = []
    run(name, "kron(2)", lambda model, value: looks.append((leaves(value), model)))
    found, model = looks[0]
    mine = {id(p) for p in model.parameters()}
    assert not any(id(x) in mine for x in found)
    expanded = [p for n, p in model.named_parameters() if BY_NAME[name].expected(n) == ["expanded"]]
    copies = [x for x in found if x.dim() > 0]  # the other is the one that starts the graph
    assert sorted(x[0].numel() for x in copies) == sorted(p.numel() for p in expanded)


WIDE = 173  # a width that no other tensor has


class Deep(nn.Module):
    """Linear layers with nothing between them: no backward pass but that of weights needs their inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 3)
        )

    def forward(self, x):
        return self.layers(x).mean(1)


def wide_inputs():
    """Where the data of living tensors that are as wide as an input starts."""
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (5, 7, WIDE)]
    return {x.untyped_storage().data_ptr() for x in alive}


@pytest.mark.parametrize(("projection", "kept"), [("kron(4)", 0), ("none", 3)])
def test_inputs_are_not_kept_at_full_width(projection, kept):
    torch.manual_seed(0)
    model, rows = Deep(), Rows((torch.randn(5, 7, 6), torch.randint(3, (5,))))
    units, coverage = plan(model, Classification(), rows, projection)
    before, counts = wide_inputs(), []
    spy = Spying(Classification(), lambda *_: counts.append(len(wide_inputs() - before)))
    with Collector(model, spy, units, coverage) as collector:
        collector(rows.batch(range(5)), range(5))
    assert counts == [kept]
    inputs = {(5, 7, WIDE), (35, WIDE)}
    assert not inputs & set(spy.saved)
    spy.loss(model, rows.batch(range(5)))  # as in training
    assert inputs & set(spy.saved)


@pytest.mark.parametrize("name", HOOKED)
def test_nothing_is_kept_between_batches(name):
    """Not even until the garbage collector comes: graphs in circles would wait for it with all they hold."""
    model, task, rows = BY_NAME[name].make(torch.float32)
    units, coverage = plan(model, task, rows, "kron(2)")
    with Collector(model, task, units, coverage) as collector:
        collector(rows.batch(range(5)), range(5))
        counts = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                collector(rows.batch(range(5)), range(5))
                counts.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
        finally:
            gc.enable()
    assert len(set(counts)) == 1, counts
