"""Plans against what really happens, on models small enough to build."""

from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from reality import CASES, diffusion, made, metered, passes, tensors

import pca
import toy
from unde import Index, UndeError, methods
from unde.data import Rows, parse_bytes
from unde.gradients import make_units, plan_coverage
from unde.gradients.feature_pass import Measurement, settle
from unde.groups import trainable
from unde.index import shard_writer as shards
from unde.plan import plan
from unde.plan.passes import measure
from unde.plan.shapes import batches_like, tokens
from unde.projection import Spec
from unde.tasks import CausalLM, Classification

pytestmark = pytest.mark.usefixtures("one_thread")
EKFAC = methods.EKFAC(projection="kron(8)")
MLP, EXAMPLES = CASES[0], 100
LEFT_OUT = ("log.jsonl", ".lock")  # how long it took, and who wrote


def on_meta(case):
    """A model, and the shape of an example."""
    with torch.device("meta"):
        model = case.model()
    example = case.data(1)
    if isinstance(case.task, CausalLM):
        return model, tokens(model, example["input_ids"].shape[1])
    one = isinstance(example, torch.Tensor)
    return model, example.to("meta") if one else tuple(x.to("meta") for x in example)


def planned(case, method=EKFAC, **options):
    """For a model on the meta device, from the shape of an example: not a number is known."""
    model, example = on_meta(case)
    if isinstance(case.task, CausalLM):
        options |= {"seq_len": example["input_ids"].shape[1]}
    else:
        options |= {"example": example}
    sizes = {"n_examples": EXAMPLES, "store_dtype": "float16"}
    return Index.plan(model, case.task, method=method, **(sizes | options))


planned_once = cache(planned)


def built(case, folder, method=EKFAC, **options):
    """With its kernel fitted."""
    model, data = made(case, EXAMPLES)
    options = {"store_dtype": "float16", "progress": False} | options
    index = Index.build(model, case.task, data, folder, method=method, **options)
    toy.training(index, index.method)
    return index


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and f.name not in LEFT_OUT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_passes(case):
    plan, (model, example) = planned_once(case), on_meta(case)
    real = passes(case, EKFAC, plan.pass_size)
    for name in ("training", "frozen", "features"):
        assert plan.flops[name] == round(real[name].flops * EXAMPLES / plan.pass_size) > 0
    found = measure(model, case.task, batches_like(example), trainable(model), EKFAC, EXAMPLES, 2 * 10**9)
    held = found.weights + found.own.projection
    assert found.weights + found.plain.peak == pytest.approx(real["training"].peak, rel=0.01)
    assert found.weights + found.frozen.peak == pytest.approx(real["frozen"].peak, rel=0.01)
    assert held + found.own.features.peak == pytest.approx(real["features"].peak, rel=0.01)
    assert held + found.own.checking.peak == pytest.approx(real["check"].peak, rel=0.1)
    assert plan.peak("check") == held + found.own.checking.peak


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_index_of_every_model(case, tmp_path):
    index, plan = built(case, tmp_path), planned_once(case)
    assert plan.pass_size == index.manifest.settled.pass_size
    assert plan.bytes_on_disk == size(tmp_path)
    assert plan.disk["moments of the kernel"] == size(tmp_path / "kernels")
    factors = toy.stored(index).shard(0, 0)["factors"]
    assert plan.disk["covariances"] == 4 * len(factors) * len(index.manifest.shards)
    assert plan.features == index.manifest.width
    assert list(plan.groups) == list(index.groups.names)


@pytest.mark.parametrize(
    "method",
    [
        methods.TracIn(projection="kron(4)"),
        methods.TRAK(projection="kron(4)"),
        methods.TRAK(projection="kron(4)", form="primal"),
        methods.LoGRA(projection="kron(4)"),
        methods.LoGRA(projection="pca(4)"),
        methods.EKFAC(projection="none"),
        methods.EKFAC(projection="pca(8)", fisher="sampled"),
    ],
    ids=str,
)
@pytest.mark.parametrize("store_dtype", ["float32", "bfloat16", "int8"])
def test_an_index_for_every_method(method, store_dtype, tmp_path):
    if store_dtype != "float32" and method.name not in ("tracin", "trak"):
        pytest.skip("bytes of a half are halves under every method")
    with toy.cut(16, 2):
        index = built(MLP, tmp_path, method, store_dtype=store_dtype)
        plan = planned(MLP, method, store_dtype=store_dtype)
    assert len(index.manifest.shards) == 4
    assert plan.pass_size == index.manifest.settled.pass_size == 16
    assert plan.bytes_on_disk == size(tmp_path)


@pytest.mark.parametrize(
    "method",
    [
        methods.DTRAK(projection="kron(4)"),
        methods.DAS(projection="kron(4)"),
        methods.JourneyTRAK(projection="kron(4)"),
        methods.JourneyTRAK(projection="kron(4)", training="per-step", inference_steps=5),
    ],
    ids=str,
)
def test_an_index_of_a_denoiser(method, tmp_path):
    case = diffusion()
    with toy.cut(16, 2):
        index = built(case, tmp_path, method, memory="40MB")
        plan = planned(case, method, memory="40MB")
    assert plan.pass_size == index.manifest.settled.pass_size
    assert plan.bytes_on_disk == size(tmp_path)
    assert plan.flops["features"] == _flops_of_features(index)


def _flops_of_features(index) -> int:
    """Of all shards, computed once more."""
    from unde.index.shard_writer import ShardWriter
    from unde.parallel.model_transport import BuildInputs

    given = BuildInputs(index.model, index.task, index.train_data)
    context = ShardWriter(index.folder, index.manifest, given)
    jobs = [(c, s) for c in range(index.manifest.terms) for s in range(len(index.manifest.shards))]
    with mock.patch("unde.index.background_writer.begin_shard"):
        return metered((), lambda: [shards.compute_shard(context, *job) for job in jobs]).flops


def test_several_steps_and_checkpoints_are_counted():
    steps = methods.JourneyTRAK(projection="kron(4)", training="per-step", inference_steps=5)
    one, five = (planned(diffusion(), method) for method in (methods.TRAK(projection="kron(4)"), steps))
    assert five.disk["features"] == 5 * one.disk["features"]
    assert five.disk["K g(n)"] == 5 * one.disk["K g(n)"]
    assert five.disk["moments of the kernel"] == one.disk["moments of the kernel"]  # that of the mean
    assert (
        6 * five.flops["features"] == 5 * one.flops["features"]
    )  # a step has one timestep, the mean has six
    assert "5 steps" in str(five)
    one, three = planned_once(MLP), planned(MLP, checkpoints=3)
    assert three.flops["features"] == 3 * one.flops["features"]
    assert three.flops["training"] == one.flops["training"]
    assert three.disk["features"] == 3 * one.disk["features"]
    assert three.disk["moments of the kernel"] == 3 * one.disk["moments of the kernel"]
    with pytest.raises(UndeError, match="it takes one checkpoint"):
        planned(diffusion(), steps, checkpoints=2)


def test_sampled_labels_are_another_index(tmp_path):
    method = methods.EKFAC(projection="kron(8)", fisher="sampled")
    plan, alone = planned(MLP, method), planned_once(MLP)
    built(MLP, tmp_path, method)
    assert plan.disk["gradients with sampled labels"] == size(tmp_path / "fisher")
    assert plan.flops["features"] == alone.flops["features"] == plan.flops["sampled labels"]
    assert plan.flops["kernel"] == alone.flops["kernel"]
    assert plan.peak("sampled labels") >= plan.peak("features")


def test_the_sample_for_directions():
    method = methods.LoGRA(projection="pca(8)")
    model, data = made(MLP, EXAMPLES)
    rows, names, plan = Rows(data), trainable(model), planned(MLP, method)
    options = {"seed": 0, "measure": "loss", "memory": 2 * 10**9}
    found = pca.fit(model, MLP.task, rows, names, Spec("pca", 8), **options)
    real = metered(
        (), lambda: pca.fit(model, MLP.task, rows, names, Spec("pca", 8), size=found.size, **options)
    )
    units = make_units(model, names, "kron(8)", 0)
    check = metered((), lambda: plan_coverage(model, MLP.task, rows, units))
    assert plan.flops["directions"] == real.flops - check.flops


@pytest.mark.parametrize("memory", ["2GB", "20MB"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes_are_settled_as_in_a_build(case, memory):
    """With more examples than are in a pass. torch takes a few other calls for tensors without content."""
    model, data = made(case, 400)
    rows, units = Rows(data, case.task.collate), make_units(model, trainable(model), "kron(8)", 0)
    what, budget = Measurement(units), parse_bytes(memory)
    coverage = plan_coverage(model, case.task, rows, units)
    with mock.patch("unde.gradients.feature_pass.MOST", 400):
        real, _ = settle(model, case.task, rows, what, coverage, budget)
        plan = planned(case, methods.TracIn(projection="kron(8)"), n_examples=400, memory=memory)
    assert plan.pass_size == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("memory", ["3MB", "300kB"])
def test_passes_keep_to_the_budget(memory, tmp_path):
    case = CASES[1]
    index, plan = (
        built(case, tmp_path, memory=memory, method="tracin"),
        planned(case, "tracin", memory=memory),
    )
    assert plan.pass_size == index.manifest.settled.pass_size
    assert plan.pass_size < planned(case, "tracin").pass_size
    assert plan.memory["features"].get("pass", 0) <= float(memory[:-2]) * {"k": 1e3, "M": 1e6}[memory[-2]]


def test_parameters_and_groups():
    one = planned_once(MLP)
    assert one.parameters == sum(p.numel() for p in MLP.model().parameters())
    assert one.groups["2"].parameters == 64 * 48 + 48
    assert one.groups["2"].features == 8 * 8 + 48


def test_options_of_a_build_mean_the_same():
    assert planned(MLP, "trak", batch_size=3) == planned(MLP, "trak")
    unnamed = plan(MLP.model(), MLP.task, tuple(tensors(MLP.data(1))), n_examples=EXAMPLES)
    assert unnamed == planned(MLP, "trak", store_dtype="float32")


def test_a_larger_model_than_any_memory():
    """Three layers of 2³⁵ weights: neither they nor their projections are made."""
    with torch.device("meta"):
        wide = torch.nn.Sequential(*(torch.nn.Linear(2**17, 2**18, bias=False) for _ in range(3)))
        wide[1], wide[2] = torch.nn.Linear(2**18, 2**17, bias=False), torch.nn.Linear(2**17, 2**18)
        batch = torch.empty(2, 2**17), torch.empty(2, dtype=torch.long)
    method = methods.TRAK(projection="sjlt(64)")
    plan_ = plan(wide, Classification(), batch, n_examples=1000, method=method)
    assert plan_.parameters == 3 * 2**35 + 2**18
    assert plan_.pass_size == 1  # the gradient of an example is larger than the budget
    assert plan_.features == 4 * 64
    assert plan_.memory["features"]["weights"] == 4 * plan_.parameters
    assert plan_.memory["features"]["projection"] == 20 * plan_.parameters  # an entry and its place, each


def test_leaving_parameters_out():
    whole, part = planned_once(MLP), planned(MLP, exclude=(r"^0\.",))
    assert set(part.groups) == {"2", "4"}
    saved = 2 * EXAMPLES * 48 * 64  # the backward pass need not go through the second layer
    assert whole.flops["frozen"] - part.flops["frozen"] == saved
    assert part.flops["frozen"] < part.flops["features"]
    assert part.flops["training"] == whole.flops["training"]
    assert part.flops["features"] < whole.flops["features"]


def test_the_model_is_not_touched():
    model, data = made(CASES[1], 4)
    model[0].bias.requires_grad_(False)
    before = {n: (id(t), t.clone(), t.requires_grad) for n, t in model.state_dict(keep_vars=True).items()}
    plan(model, Classification(), data, n_examples=4)
    assert model.training
    for n, t in model.state_dict(keep_vars=True).items():
        assert (id(t), t.requires_grad) == (before[n][0], before[n][2]) and t.grad is None
        assert torch.equal(t, before[n][1])


class Chooses(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x[:, :5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_examples": 0}, "n_examples 0: expected at least 1"),
        ({"queries": -1}, "queries -1: expected at least 1"),
        ({"batch_size": 0}, "batch_size 0: expected at least 1"),
        ({"store_dtype": "int3"}, "unknown store_dtype 'int3'"),
        ({"example": None}, "expected one of two things to plan with"),
        ({"seq_len": 8}, "expected one of two things to plan with"),
        ({"example": None, "seq_len": 1}, "at least 2 tokens"),
        ({"example": "text"}, "a batch of type str without a tensor"),
        ({"example": (torch.ones(2, 7), torch.ones(2).long())}, "cannot run on shapes alone"),
        ({"model": Chooses(30, 5)}, "cannot run on shapes alone"),
    ],
)
def test_bad_arguments(options, said):
    given = {"model": MLP.model(), "example": MLP.data(2), "n_examples": 10} | options
    with pytest.raises(UndeError, match=said):
        plan(given.pop("model"), Classification(), given.pop("example"), **given)


def test_longer_texts_than_the_model_reads():
    with pytest.raises(UndeError, match="the model reads 48 tokens at most"):
        plan(CASES[2].model(), CausalLM(), seq_len=49, n_examples=10)
