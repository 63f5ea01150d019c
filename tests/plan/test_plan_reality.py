"""Plans against what really happens, on models small enough to build."""

from functools import cache
from pathlib import Path

import pytest
import torch
from reality import CASES, made, metered, passes, tensors

import toy
from unde import Index, UndeError, methods
from unde.data import Rows
from unde.features import make_units, pca, plan_coverage
from unde.groups import trainable
from unde.plan import plan
from unde.projection import Spec
from unde.tasks import CausalLM, Classification

pytestmark = pytest.mark.usefixtures("one_thread")
EKFAC = methods.EKFAC(projection="kron(8)")
MLP, EXAMPLES, BATCH = CASES[0], 100, 8


@cache
def planned(case, method=EKFAC, **options):
    """For a model on the meta device, from the shape of an example: not a number is known."""
    with torch.device("meta"):
        model = case.model()
    if isinstance(case.task, CausalLM):
        options |= {"seq_len": case.data(1)["input_ids"].shape[1]}
    else:
        options |= {"example": tuple(x.to("meta") for x in tensors(case.data(1)))}
    sizes = {"n_examples": EXAMPLES, "batch_size": BATCH, "store_dtype": "float16"}
    return Index.plan(model, case.task, method=method, **(sizes | options))


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_passes_of_a_batch(case):
    real, plan = passes(case, EKFAC, BATCH), planned(case)
    for name in ("training", "frozen", "features"):
        assert plan.flops[name] == round(real[name].flops * EXAMPLES / BATCH) > 0
    memory = {
        stage: plan.peak(stage) - parts.get("moments", 0) - parts.get("shards being written", 0)
        for stage, parts in plan.memory.items()
    }
    assert memory["features"] == pytest.approx(real["features"].peak, rel=0.01)
    assert memory["training with Adam"] == pytest.approx(real["training"].peak, rel=0.01)
    assert memory["check"] == pytest.approx(real["check"].peak, rel=0.1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_on_disk(case, tmp_path):
    (model, data), plan = made(case, EXAMPLES), planned(case)
    index = Index.build(
        model, case.task, data, tmp_path, method=EKFAC, batch_size=8, store_dtype="float16", progress=False
    )
    toy.training(index, index.method)
    assert plan.bytes_on_disk == pytest.approx(size(tmp_path), rel=0.01)
    assert plan.disk["kernel applied"] == pytest.approx(size(tmp_path / "kernels"), rel=0.01)
    assert plan.disk["covariances"] == 4 * len(index._shard(0, 0)["factors"]) * len(index.manifest.shards)
    assert plan.features == index.manifest.width
    assert list(plan.groups) == list(index.groups.names)


def test_bytes_on_disk_of_directions_and_sampled_labels(tmp_path):
    method = methods.EKFAC(projection="pca(8)", fisher="sampled")
    model, data = made(MLP, EXAMPLES)
    Index.build(model, MLP.task, data, tmp_path, method=method, batch_size=8, progress=False)
    plan = planned(MLP, method, store_dtype="float32")
    assert plan.bytes_on_disk - plan.disk["kernel applied"] == pytest.approx(size(tmp_path), rel=0.02)
    file = tmp_path / "projection.safetensors"
    assert plan.disk["directions"] == pytest.approx(file.stat().st_size, rel=0.1)
    assert plan.flops["features"] == 2 * planned(MLP).flops["features"]


def test_the_sample_for_directions():
    method = methods.LoGRA(projection="pca(8)")
    model, data = made(MLP, EXAMPLES)
    rows, names, plan = Rows(data), trainable(model), planned(MLP, method)
    units = make_units(model, names, "kron(8)", 0)
    check = metered((), lambda: plan_coverage(model, MLP.task, rows, units))
    options = {"seed": 0, "measure": "loss", "batch_size": BATCH, "memory": 2**30}
    real = metered((), lambda: pca.fit(model, MLP.task, rows, names, Spec("pca", 8), **options))
    assert plan.flops["directions"] == real.flops - check.flops


def test_parameters_groups_and_checkpoints():
    one, three = planned(MLP), planned(MLP, checkpoints=3)
    assert one.parameters == sum(p.numel() for p in MLP.model().parameters())
    assert one.groups["2"].parameters == 64 * 48 + 48
    assert one.groups["2"].features == 8 * 8 + 48
    assert three.flops["features"] == 3 * one.flops["features"]
    assert three.flops["training"] == one.flops["training"]
    assert three.disk["features"] == 3 * one.disk["features"]


def test_a_larger_model_than_any_memory():
    """Three layers of 2³⁵ weights: neither they nor their projections are made."""
    with torch.device("meta"):
        wide = torch.nn.Sequential(*(torch.nn.Linear(2**17, 2**18, bias=False) for _ in range(3)))
        wide[1], wide[2] = torch.nn.Linear(2**18, 2**17, bias=False), torch.nn.Linear(2**17, 2**18)
        batch = torch.empty(2, 2**17), torch.empty(2, dtype=torch.long)
    method = methods.TRAK(projection="sjlt(64)")
    plan_ = plan(wide, Classification(), batch, n_examples=1000, method=method, batch_size=2)
    assert plan_.parameters == 3 * 2**35 + 2**18
    assert plan_.features == 4 * 64
    assert plan_.memory["features"]["weights"] == 4 * plan_.parameters
    assert plan_.memory["features"]["projection"] == 20 * plan_.parameters  # an entry and its place, each


def test_leaving_parameters_out():
    whole, part = planned(MLP), planned(MLP, exclude=(r"^0\.",))
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
    plan(model, Classification(), data, n_examples=4, batch_size=2)
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
        ({"store_dtype": "int8"}, "unknown store_dtype 'int8'"),
        ({"example": None}, "expected one of two things to plan with"),
        ({"seq_len": 8}, "expected one of two things to plan with"),
        ({"example": None, "seq_len": 1}, "at least 2 tokens"),
        ({"example": "text"}, "a batch of type str without a tensor"),
        ({"example": (torch.ones(2, 7), torch.ones(2).long())}, "cannot run on shapes alone"),
        ({"model": Chooses(30, 5)}, "cannot run on shapes alone"),
    ],
)
def test_bad_arguments(options, said):
    given = {"model": MLP.model(), "example": MLP.data(2), "n_examples": 10, "batch_size": 4} | options
    with pytest.raises(UndeError, match=said):
        plan(given.pop("model"), Classification(), given.pop("example"), **given)


def test_longer_texts_than_the_model_reads():
    with pytest.raises(UndeError, match="the model reads 48 tokens at most"):
        plan(CASES[2].model(), CausalLM(), seq_len=49, n_examples=10)
