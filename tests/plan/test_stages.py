"""What stages say that they need, against what they take under the meter."""

import gc
from functools import partial

import pytest
import torch
from reality import Denoiser, diffusion
from torch import nn

import toy
from unde import Groups, Index, UndeError, learn_weights, methods
from unde.gradients.meter import Meter
from unde.index import kernel_cache as kernels
from unde.index import score_needs as scoring
from unde.index import shard_writer as shards
from unde.index.shard_writer import ShardWriter
from unde.index.weight_needs import learning
from unde.kernels.base import InMemory, Part, moments_of
from unde.kernels.low_rank import Truncated
from unde.parallel.model_transport import BuildInputs
from unde.tasks import Classification

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES, QUERIES = 2048, 40
F32 = torch.float32


@pytest.fixture(autouse=True)
def four_shards():
    with toy.cut(128, 4):
        yield


@pytest.fixture
def tensors_alone(monkeypatch):
    """The meter sees tensors, and no files that are put together in memory."""
    monkeypatch.setattr(kernels, "WRITTEN", 0)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 10)
        )


def data(n: int):
    return torch.randn(n, 40), torch.randint(10, (n,))


def build(folder, method, memory="2GB", store_dtype="float16", examples=EXAMPLES, **options) -> Index:
    options |= {"store_dtype": store_dtype, "memory": memory, "progress": False}
    return Index.build(net(), Classification(), data(examples), folder, method=method, **options)


def costs(index, method) -> kernels.Costs:
    sizes = kernels.sizes_of(index.manifest, F32)
    return kernels.costs(index.manifest, method.kernel.on(sizes), sizes)


def decomposed(index, method) -> int:
    """torch has no formula for matrix factors: d³ operations for an inverse, 9 d³ for eigenvectors."""
    settled = method.kernel.on(kernels.sizes_of(index.manifest, F32))
    needs = settled.needs()
    if isinstance(settled, Truncated):
        seen = 2 * settled.sizes.width * settled.tried * settled.kept  # V
        return needs.fit.flops - seen + sum(r.finish for r in needs.rounds)
    if method.name != "ekfac":
        return needs.fit.flops * index.manifest.terms
    squares = [t for name, t in needs.moments.items() if not name.startswith("values")]
    return sum(9 * len(t) ** 3 for t in squares) * index.manifest.terms


ILL = {"relative": False, "damping": 1e-3}  # all in float64


@pytest.mark.parametrize("joined", [2**26, 2**22, 2**19])  # all shards are read together, or one at a time
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (methods.TRAK(projection="kron(16)"), {}),
        (methods.TRAK(projection="kron(16)", **ILL), {}),
        (methods.TRAK(projection="kron(8)", **ILL), {}),
        (methods.TRAK(projection="kron(32)"), {"examples": 256, "store_dtype": "float32"}),
        (methods.TRAK(projection="kron(32)"), {"examples": 1024}),
        (methods.TRAK(projection="kron(32)", **ILL), {"examples": 1024}),
        (methods.TRAK(projection="kron(16)", form="svd(64)"), {}),
        (methods.TRAK(projection="kron(16)", form="svd(64)", **ILL), {}),
        (methods.TRAK(projection="kron(16)", form="svd(700)", **ILL), {"store_dtype": "float32"}),
        (methods.LoGRA(projection="kron(24)"), {}),
        (methods.LoGRA(projection="kron(24)", **ILL), {"store_dtype": "float32"}),
        (methods.LoGRA(projection="kron(24)"), {"examples": 256, "store_dtype": "float32"}),
        (methods.EKFAC(projection="kron(16)"), {}),
        (methods.EKFAC(projection="kron(32)"), {"store_dtype": "float32"}),
        (methods.EKFAC(projection="none"), {}),
    ],
    ids=str,
)
def test_kernels(method, options, joined, tmp_path, monkeypatch, tensors_alone):
    monkeypatch.setattr("unde.kernels.base.JOINED", joined)
    index = build(tmp_path, method, **options)
    found = costs(index, method)
    with Meter() as meter:
        toy.training(index, index.method)
    assert sum(found.memory.values()) == pytest.approx(meter.peak, rel=0.05)
    assert found.flops == meter.flops + decomposed(index, method)
    assert sum(found.disk.values()) == _size(tmp_path / "kernels")


def _size(folder) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "method", [methods.LoGRA(projection="kron(16)"), methods.EKFAC(projection="kron(16)")]
)
def test_kernels_of_several_checkpoints(method, tmp_path, tensors_alone):
    states = [{k: v * s for k, v in net().state_dict().items()} for s in (1, 1.1, 1.2)]
    index = build(tmp_path, method, checkpoints=states)
    found = costs(index, method)
    with Meter() as meter:
        made = toy.training(index, method)
        assert found.held == pytest.approx(meter.live, rel=0.01)
    assert made.mixes is not None
    assert sum(found.memory.values()) == pytest.approx(meter.peak, rel=0.05)
    assert found.flops == meter.flops + decomposed(index, method)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_kernels_of_the_steps_of_a_trajectory(form, tmp_path, tensors_alone):
    """One kernel, that of the mean over steps; K g(n) of each step."""
    case = diffusion()
    method = methods.JourneyTRAK(projection="kron(6)", training="per-step", inference_steps=4, form=form)
    index = Index.build(Denoiser(), case.task, case.data(600), tmp_path, method=method, progress=False)
    found = costs(index, method)
    with Meter() as meter:
        toy.training(index, method)
    assert found.flops == meter.flops + decomposed(index, method)
    assert sum(found.memory.values()) == pytest.approx(meter.peak, rel=0.05)


@pytest.mark.parametrize(
    "method",
    [
        methods.TRAK(projection="kron(16)"),
        methods.TRAK(projection="kron(16)", form="svd(64)"),
        methods.LoGRA(projection="kron(16)"),
        methods.EKFAC(projection="kron(16)"),
    ],
    ids=str,
)
def test_what_a_kernel_asks_of_the_budget(method, tmp_path):
    """One byte less than it says is refused, what it says is not."""
    index = build(tmp_path, method, examples=800)
    needs = method.kernel.on(kernels.sizes_of(index.manifest, F32)).needs().matrices
    with pytest.raises(UndeError, match="the memory budget is"):
        toy.training(toy.reopen(index, memory=needs - 1), method)
    toy.training(toy.reopen(index, memory=needs), method)


@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_moments_are_those_that_are_kept(blocks):
    features = torch.randn(30, 12)
    parts = [Part("a.weight", slice(0, 6)), Part("a.bias", slice(6, 8)), Part("b.weight", slice(8, 12))]
    source = InMemory(features, parts)
    settled = methods.LoGRA(projection="none", blocks=blocks).kernel.on(source.sizes)
    real, said = moments_of(settled, source), settled.needs().moments
    assert {k: (t.shape, t.dtype) for k, t in real.items()} == {
        k: (t.shape, t.dtype) for k, t in said.items()
    }


@pytest.mark.parametrize("store_dtype", ["float32", "float16", "int8", "factored(1)"])
@pytest.mark.parametrize(
    ("method", "memory", "examples", "queries"),
    [
        (methods.TracIn(projection="kron(16)"), "2GB", EXAMPLES, QUERIES),
        (methods.TracIn(projection="kron(16)"), "6MB", EXAMPLES, QUERIES),
        (methods.TracIn(projection="kron(16)"), "300kB", EXAMPLES, 20),  # some at a time
        (methods.LoGRA(projection="kron(16)"), "2GB", EXAMPLES, QUERIES),
    ],
)
def test_scoring_and_learning(method, memory, examples, queries, store_dtype, tmp_path):
    index = toy.reopen(build(tmp_path, method, "2GB", store_dtype, examples), memory=memory)
    asked, found = index.features(data(queries)), costs(index, method)
    given = (toy.training(index, method).mixes, found.held, queries, index.memory)
    learn = partial(learn_weights, k=3, weight_decay=0.1)  # as asked for: nothing is judged
    for planned, use in (
        (scoring.total(index.manifest, method, *given), lambda s: s.total()),
        (learning(index.manifest, index.groups, *given), learn),
    ):
        index._state.scorer._training.clear()
        gc.collect()
        with Meter():  # K is there
            index._state.scorer.training(method)
        meter = Meter()
        meter.hold([asked.features])
        with meter:
            use(index.score(asked))
        assert sum(planned.values()) - found.held == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.parametrize(
    ("projection", "memory", "some"),
    [("kron(4)", "2GB", [1, 3]), ("kron(4)", "400kB", [1, 2, 8]), ("kron(16)", "6MB", [20, 40])],
)
def test_learning_from_few_queries(projection, memory, some, tmp_path):
    """They are read with more training examples at once, and so are those that are left over of many."""
    method = methods.TracIn(projection=projection)
    index = toy.reopen(build(tmp_path, method, groups="tensor"), memory=memory)
    for queries in some:
        asked = index.features(data(queries))
        mixes = toy.training(index, method).mixes
        planned = learning(index.manifest, index.groups, mixes, 0, queries, index.memory)
        index._state.scorer._training.clear()
        gc.collect()
        meter = Meter()
        meter.hold([asked.features])
        with meter:
            learn_weights(index.score(asked), k=3, weight_decay=0.1)
        assert sum(planned.values()) == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.parametrize("memory", ["2GB", "200kB"])
@pytest.mark.parametrize(
    "method",
    [methods.DAS(projection="kron(6)", damping=0.1), methods.DTRAK(projection="kron(6)", damping=0.1)],
)
def test_scoring_of_denoisers(method, memory, tmp_path):
    """DAS needs leverages, for which it reads the features once more."""
    case = diffusion()
    index = Index.build(Denoiser(), case.task, case.data(600), tmp_path, method=method, progress=False)
    queries = index.features(case.data(QUERIES))
    toy.training(index, method)
    index = toy.reopen(index, memory=memory)
    planned = scoring.total(
        index.manifest, method, toy.training(index, method).mixes, 0, QUERIES, index.memory
    )
    meter = Meter()
    meter.hold([queries.features])
    with meter:
        index.score(queries).total()
    assert sum(planned.values()) == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.parametrize(
    "store_dtype", ["float32", "float16", "bfloat16", "int8", "int4", "factored(1)", "factored(4)"]
)
@pytest.mark.parametrize(
    "method", [methods.TracIn(projection="kron(16)"), methods.EKFAC(projection="kron(16)")]
)
def test_shards(method, store_dtype, tmp_path, tensors_alone):
    """Three passes wait while the fourth is computed, beside the shard before it, which is written meanwhile."""
    index = build(tmp_path, method, store_dtype=store_dtype)
    m, stored = index.manifest, toy.stored(index).shard(0, 0)
    content = shards.content(m, 512, F32)
    assert {k: (t.shape, t.dtype) for k, t in stored.items()} == {
        k: (t.shape, t.dtype) for k, t in content.items()
    }
    assert sum(shards.on_disk(m, F32).values()) == _size(tmp_path / "shards")
    covariances = content["factors"].nbytes if m.factors else 0
    behind = sum(t.nbytes for t in content.values())
    assert shards.waiting(m, F32) == 3 * 128 * 4 * m.width + 2 * covariances + behind
    context = ShardWriter(index.folder, m, BuildInputs(index.model, index.task, index.train_data))
    with Meter() as meter:
        shards.compute_shard(context, 0, 1)
    assert shards.writing(m, F32) - behind == pytest.approx(meter.peak, rel=0.1)


def test_groups_within_a_block_of_a_kernel(tmp_path):
    """Weight and bias of a layer are one block of LoGRA: to tell them apart K is applied twice."""
    method = methods.LoGRA(projection="kron(4)")
    index = build(tmp_path, method, examples=64)
    mixes = toy.training(index, method).mixes
    tensor = Groups.parse("tensor", index.model, ())
    assert scoring.passes(index.manifest, index.groups, mixes) == 1
    assert scoring.passes(index.manifest, tensor, mixes) == 2
    scores = index.score(index.features(data(3)))
    assert [len(s.asked.passes) for s in (scores, scores.regroup(tensor))] == [1, 2]
