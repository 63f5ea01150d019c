"""A plan for several workers: what it deals out against a real index, and hours against a sum by hand."""

import json
import re

import pytest
import torch
from reality import Denoiser, diffusion
from test_plan_command import run, setup

import toy
from unde import Index, UndeError, methods
from unde.plan.workers import Rates, Reduced, Stage, Workers, rates_of
from unde.setup import Recipe
from unde.tasks import Classification

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = 150


def net():
    return torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5))


def data():
    return torch.randn(EXAMPLES, 12), torch.randint(5, (EXAMPLES,))


def planned(method, model=None, **options):
    rates = {"flops": "1G", "cpu_flops": "2G", "disk": "1MB"} | options
    given = {"n_examples": EXAMPLES, "method": method, "workers": 3, "store_dtype": "float16"} | rates
    return Index.plan(model or net(), Classification(), data(), **given).workers


def stage(workers, name):
    [found] = [s for s in workers.stages if s.name == name]
    return found


@pytest.mark.parametrize(
    "method",
    [methods.EKFAC(projection="kron(4)"), methods.TRAK(projection="kron(4)", form="primal")],
    ids=["ekfac", "trak"],
)
def test_against_an_index(method, tmp_path, monkeypatch):
    """As many jobs as shards, their bytes; partial files as long as the plan says, but for their headers."""
    with toy.cut(8, 2):
        index = Index.build(
            net(), Classification(), data(), tmp_path, method=method, store_dtype="float16", progress=False
        )
        monkeypatch.setattr("unde.kernels.base.JOINED", 4 * index.manifest.width * 16)  # a shard
        made = planned(method)
    shards = list((tmp_path / "shards").iterdir())
    features = stage(made, "features")
    assert (features.jobs, features.passes) == (len(shards), 19) == (10, 19)
    assert features.writes == sum(f.stat().st_size for f in shards)
    written = {}
    monkeypatch.setattr(
        "unde.index.kernel_cache.write_shard",
        lambda path, owner, tensors: (
            written.__setitem__(path.name, sum(t.nbytes for t in tensors.values())),
            kept(path, owner, tensors),
        ),
    )
    from unde.store.shards import write_shard as kept

    toy.training(index, method)
    for r in made.rounds:
        files = [n for name, n in written.items() if name.startswith(r.name)]
        assert (r.jobs, r.partial) == (len(files), sum(files))
        assert stage(made, f"kernel: {r.name}").writes == stage(made, f"merging {r.name}").reads == r.partial
    [moments] = tmp_path.rglob("moments.safetensors")
    assert made.merged == moments.stat().st_size
    assert [s.name for s in made.stages if s.alone][-1] == "K"
    rows = list(tmp_path.glob("kernels/*/0*.safetensors"))
    assert sum(f.stat().st_size for f in rows) == sum(s.writes for s in made.stages if s.name == "K g(n)")


def test_checkpoints_and_sampled_labels_are_dealt_out_too():
    with toy.cut(8, 2):
        made = planned(methods.EKFAC(projection="kron(4)", fisher="sampled"), checkpoints=3)
    features, probe = stage(made, "features"), stage(made, "features with sampled labels")
    assert features.jobs == probe.jobs == 30
    assert features.passes == probe.passes == 3 * 19
    assert stage(made, "start: reads the model").reads == 3 * 4 * (12 * 20 + 20 + 20 * 5 + 5)
    row = 2 * (16 + 16 + 16 + 5) + 4  # features in float16, and an exponent for each parameter
    assert stage(made, "kernel: eigenvalues").reads == 3 * EXAMPLES * row
    assert [r.jobs for r in made.rounds] == []  # all features are read at once
    assert stage(made, "kernel: covariances").jobs == 3


def test_hours_by_hand():
    rates = Rates(flops=100.0, cpu_flops=10.0, disk=5.0, measured=False)
    stages = (
        Stage("settling", model_flops=3600 * 100, alone=True),  # 1 h
        Stage("start", reads=1800 * 5, each=True),  # ½ h
        Stage("features", jobs=10, model_flops=36000 * 100, writes=0),  # 10 h, 1 h each
        Stage("kernel", jobs=4, flops=7200 * 10, reads=7200 * 5),  # 4 h, 1 h each
    )
    made = Workers(3, rates, stages, (Reduced("grams", 4, 8),), 2)
    assert made.hours(1) == pytest.approx(1 + 0.5 + 10 + 4)
    assert made.hours(3) == pytest.approx(1 + 0.5 + 4 + 2)  # the busiest has four shards and two jobs
    assert made.hours(10) == made.hours(1000) == pytest.approx(1 + 0.5 + 1 + 1)
    assert made.enough() == 10  # 8 have two shards at most, and 10 have one: more find nothing to do
    waiting = Workers(3, rates, (Stage("settling", model_flops=36000 * 100, alone=True), *stages[2:]), (), 0)
    assert waiting.enough() == 4  # 10 + 3 + 1 h; with 8 workers 10 + 2 + 1 h
    each = made.each()
    assert (each["features"]["jobs"], each["kernel"]["jobs"]) == (4, 2)
    assert each["kernel"]["reads"] == 3600 * 5


def test_the_command(monkeypatch):
    monkeypatch.setattr(Recipe, "make", lambda recipe: setup())
    given = ["mine:setup", "--method", "logra", "--workers", 4]
    told = json.loads(run(*given, "--flops", "1T", "--disk", "1GB", "--format", "json"))["workers"]
    assert (told["count"], told["rates"]["flops"], told["rates"]["disk"]) == (4, 1e12, 1e9)
    assert list(told["hours"]) == ["1", "4", "8", "64"]
    assert told["rates"]["measured"] and told["rates"]["cpu_flops"] > 1e8
    assert told["merged"] > 0 and "merging grams" not in {s["name"] for s in told["stages"]}  # one job
    table = run("mine:setup", "--method", "tracin", "--workers", 4, "--flops", "1T", "--cpu-flops", "20G")
    assert "kernel" not in table[table.index("4 workers") :] and "reduction" not in table
    assert "4 workers, each with 1 TFLOP/s in passes, 20 GFLOP/s on its processor\n" in table
    assert re.search(r"^features +1 +1 +1 ", table, re.MULTILINE)
    assert "note: reading and writing is not in the hours" in table
    assert re.search(r"from 1 workers on, twice as many save less than a tenth$", table, re.MULTILINE)


def test_without_a_rate_there_are_no_hours():
    made = Workers(2, Rates(None, 1e9, 1e9, measured=False), (Stage("features", 4, 8, 100),), (), 0)
    assert "hours" not in made.as_dict()
    assert "note: hours need the operations that a worker does in a second" in str(made)
    assert "times as fast" not in str(made) and "–" in str(made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers 0: expected at least 1"),
        ({"workers": None}, "flops is a rate of one worker: say how many there are"),
        ({"flops": "fast"}, "cannot read the rate 'fast': expected operations a second, such as 200T"),
        ({"cpu_flops": -1}, "cannot read the rate -1"),
        ({"disk": "slow"}, "cannot read memory 'slow'"),
    ],
)
def test_errors(options, said):
    with pytest.raises(UndeError, match=said):
        planned(methods.TracIn(projection="kron(4)"), **options)


def test_the_rate_of_the_processor_is_measured_unless_it_is_given():
    assert rates_of(None, "3G", None) == Rates(None, 3e9, None, measured=False)
    assert rates_of(None, None, None).measured


def test_steps_of_a_trajectory():
    """The kernel is that of the mean over steps, and K g(n) is made of each; the dual form reads Φ twice for it."""
    case = diffusion()
    method = methods.JourneyTRAK(projection="kron(6)", training="per-step", inference_steps=4, form="dual")
    given = {"n_examples": 60, "method": method, "workers": 2}
    plan = Index.plan(Denoiser(), case.task, case.data(2), **given)
    features = plan.disk["features"]  # of all four steps
    assert plan.workers.stages[3].reads == features
    assert stage(plan.workers, "K g(n)").reads == (1 + 2 * 4) * features
    assert stage(plan.workers, "K g(n)").jobs == stage(plan.workers, "features").jobs == 4
