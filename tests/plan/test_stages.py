"""Memory and operations of the stages after the features, against real ones under the same meter."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

import toy
from unde import Groups, Index, UndeError, learn_weights, methods
from unde.features import make_units
from unde.features.meter import Meter
from unde.groups import trainable
from unde.plan import stages
from unde.plan.stages import Run
from unde.tasks import Classification

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES, BATCH, QUERIES = 2048, 128, 40


@pytest.fixture(autouse=True)
def four_shards(monkeypatch):
    monkeypatch.setattr("unde.index.build.SHARD_BATCHES", 4)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 10)
        )


def data(n: int):
    return torch.randn(n, 40), torch.randint(10, (n,))


def sizes(method, memory="2GB", store_dtype="float16", examples=EXAMPLES) -> Run:
    model = net()
    return Run(
        method=method,
        units=make_units(model, trainable(model), str(method.projection), 0),
        groups=Groups.by_layer(model),
        examples=examples,
        batch_size=BATCH,
        store_dtype=store_dtype,
        checkpoints=1,
        queries=QUERIES,
        memory=int(float(memory[:-2]) * {"G": 1e9, "M": 1e6, "k": 1e3}[memory[-2]]),
    )


def build(folder, method, memory="2GB", store_dtype="float16", examples=EXAMPLES) -> Index:
    options = {"batch_size": BATCH, "store_dtype": store_dtype, "memory": memory, "progress": False}
    return Index.build(net(), Classification(), data(examples), folder, method=method, **options)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (methods.TRAK(projection="kron(16)"), {}),
        (methods.TRAK(projection="kron(16)"), {"memory": "40MB"}),
        (methods.TRAK(projection="kron(16)"), {"memory": "85MB"}),  # two shards at a time
        (methods.TRAK(projection="kron(16)", relative=False, damping=1e-3), {}),
        (methods.TRAK(projection="kron(8)", relative=False, damping=1e-3), {"memory": "8MB"}),
        (methods.TRAK(projection="kron(32)"), {"examples": 256, "store_dtype": "float32"}),
        (methods.TRAK(projection="kron(32)"), {"examples": 1024, "memory": "60MB"}),
        (methods.LoGRA(projection="kron(24)"), {}),
        (methods.LoGRA(projection="kron(24)"), {"memory": "30MB", "store_dtype": "float32"}),
        (methods.EKFAC(projection="kron(16)"), {}),
        (methods.EKFAC(projection="kron(32)"), {"store_dtype": "float32"}),
    ],
    ids=str,
)
def test_kernels(method, options, tmp_path):
    index, run = build(tmp_path, method, **options), sizes(method, **options)
    with Meter() as meter:
        toy.training(index, index.method)
    memory, flops = stages.kernel(run)
    assert sum(memory.values()) == pytest.approx(meter.peak, rel=0.05)
    inverted = 0  # torch has no formula for matrix factors; a matrix of d × d takes d³ operations
    if method.name == "logra":
        inverted = sum(d**3 for d in (24 * 24 + 48, 24 * 24 + 48, 24 * 24 + 48, 48 * 10 + 10))
    elif method.name == "trak":
        inverted = min(run.width, run.examples) ** 3
    assert flops == meter.flops + inverted


@pytest.mark.parametrize(
    "method", [methods.TRAK(projection="kron(16)"), methods.LoGRA(projection="kron(16)")]
)
def test_what_a_kernel_asks_of_the_budget(method, tmp_path):
    """One byte less than planned is refused by the index, the planned number is not."""
    index, needs = build(tmp_path, method, examples=800), stages.kernel_needs(sizes(method, examples=800))
    index.memory = needs - 1
    with pytest.raises(UndeError, match="the memory budget is"):
        toy.training(index, method)
    index.memory = needs
    toy.training(index, method)


def test_what_ekfac_asks_of_the_budget(tmp_path):
    method = methods.EKFAC(projection="kron(16)")
    index, needs = build(tmp_path, method, examples=80), stages.kernel_needs(sizes(method, examples=80))
    index.memory = needs - 1
    with pytest.raises(UndeError, match="the memory budget is"):
        toy.training(index, method)
    index.memory = needs
    toy.training(index, method)


@pytest.mark.parametrize("memory", ["2GB", "6MB", "300kB"])
@pytest.mark.parametrize("store_dtype", ["float32", "float16"])
def test_scoring_and_learning(memory, store_dtype, tmp_path):
    learn = partial(learn_weights, k=3, weight_decay=0.1)  # as asked for: nothing is judged
    method = methods.TracIn(projection="kron(16)")
    run, index = sizes(method, memory, store_dtype), build(tmp_path, method, memory, store_dtype)
    queries = index.features(data(QUERIES))
    for planned, use in ((stages.scoring, lambda s: s.total()), (stages.learning, learn)):
        index._training.clear()
        gc.collect()
        meter = Meter()
        meter.hold([queries.features])
        with meter:
            use(index.score(queries))
        assert sum(planned(run).values()) == pytest.approx(meter.peak, rel=0.1)


def test_shards_that_are_being_written():
    """Three batches wait while the fourth is computed; the shard before is held, packed, and twice a file."""
    method = methods.TracIn(projection="kron(16)")
    run, alone = sizes(method), sizes(method, examples=512)
    batch = 4 * BATCH * run.width
    assert stages.shard_buffers(run) == 3 * batch + 4 * batch + 3 * (4 * batch // 2)
    assert stages.shard_buffers(sizes(method, store_dtype="float32")) == 3 * batch + 4 * batch + 2 * (
        4 * batch
    )
    assert stages.shard_buffers(alone) == 3 * batch
