"""Plans against what a build takes, on models small enough to build."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import models
import toy
from unde import Index, UndeError, methods
from unde.gradients.meter import Meter
from unde.index import shard_writer as shards
from unde.index import sizes
from unde.index.reader import shard_tensors
from unde.parallel.model_transport import BuildInputs
from unde.plan import plan
from unde.tasks import CausalLM, Classification, Diffusion, Task

EKFAC = methods.EKFAC(projection="kron(8)")
EXAMPLES = 100


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    task: Task

    def __str__(self) -> str:
        return self.name


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2),
        nn.GroupNorm(4, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=48, **tokens))


def diffusion() -> Case:
    from diffusers import DDPMScheduler

    task = Diffusion(DDPMScheduler(num_train_timesteps=100), timesteps=6)
    return Case("diffusion", lambda: models.Denoiser(12), lambda n: torch.rand(n, 2, 6, 6) * 2 - 1, task)


MLP = Case("mlp", mlp, lambda n: (torch.randn(n, 30), torch.randint(5, (n,))), Classification())
CONV = Case("conv", conv, lambda n: (torch.randn(n, 3, 12, 12), torch.randint(5, (n,))), Classification())
GPT2 = Case("gpt2", gpt2, lambda n: {"input_ids": torch.randint(60, (n, 40))}, CausalLM())


def inputs(case: Case) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.model(), case.data(EXAMPLES)


def planned(case: Case, method=EKFAC, **options):
    model, data = inputs(case)
    return Index.plan(model, case.task, data, method=method, **({"store_dtype": "float16"} | options))


def built(case: Case, folder, method=EKFAC, fit: bool = True, **options):
    """By default with its kernel fitted."""
    model, data = inputs(case)
    options = {"store_dtype": "float16", "progress": False} | options
    index = Index.build(model, case.task, data, folder, method=method, **options)
    if fit:
        toy.training(index, index.method)
    return index


def size(folder, *parents: str) -> int:
    """Bytes of the files below folders of these names."""
    files = [
        f for f in folder.rglob("*.safetensors") if set(parents) & set(f.parent.relative_to(folder).parts)
    ]
    return sum(f.stat().st_size for f in files)


def compared(case: Case, folder, method=EKFAC, **options):
    """An index and its plan, which agree about passes and bytes."""
    index, made = built(case, folder, method, **options), planned(case, method, **options)
    assert made.timing.pass_size == index.manifest.resolved.pass_size
    assert made.bytes_on_disk == size(folder, "shards", "kernels")
    return index, made


@pytest.mark.parametrize("case", [MLP, CONV, GPT2], ids=str)
def test_an_index_of_every_model(case, tmp_path):
    index, made = compared(case, tmp_path)
    assert made.disk["moments of the kernel"] == size(tmp_path, "kernels")
    factors = toy.stored(index).shard(0, 0)["factors"]
    assert made.disk["covariances"] == 4 * len(factors) * len(index.manifest.shards)
    assert made.features == index.manifest.width
    assert made.parameters == sum(p.numel() for p in index.model.parameters())
    assert list(made.groups) == list(index.groups.names)


SIMPLE = (
    methods.TracIn(projection="kron(4)"),
    methods.TRAK(projection="kron(4)"),
    methods.TRAK(projection="kron(4)", form="primal"),
)
OTHERS = (
    methods.LoGRA(projection="kron(4)"),
    methods.EKFAC(projection="none"),
    methods.EKFAC(projection="kron(8)", fisher="sampled"),
    methods.EKFAC(projection="kron(4)", fisher="true"),
)


@pytest.mark.parametrize(
    ("method", "store_dtype"),
    [
        *((method, dtype) for method in SIMPLE for dtype in ("float32", "float16", "int8")),
        *((method, "float32") for method in OTHERS),
    ],
    ids=str,
)
def test_an_index_for_every_method(method, store_dtype, tmp_path):
    with toy.cut(16, 2):
        index, made = compared(MLP, tmp_path, method, store_dtype=store_dtype)
    assert len(index.manifest.shards) == 4 and made.timing.pass_size == 16


STEPS = methods.JourneyTRAK(projection="kron(4)", training="per-step", inference_steps=5)


@pytest.mark.parametrize("method", [methods.DTRAK("kron(4)"), methods.DAS("kron(4)"), STEPS], ids=str)
def test_an_index_of_a_denoiser(method, tmp_path):
    with toy.cut(16, 2):
        compared(diffusion(), tmp_path, method, memory="40MB")


def test_several_steps_and_checkpoints_are_counted():
    one, five = (planned(diffusion(), method) for method in (methods.TRAK(projection="kron(4)"), STEPS))
    assert five.disk["features"] == 5 * one.disk["features"]
    assert five.disk["K g(n)"] == 5 * one.disk["K g(n)"]
    assert five.disk["moments of the kernel"] == one.disk["moments of the kernel"]  # that of the mean
    one, three = planned(MLP), planned(MLP, checkpoints=3)
    assert three.disk["features"] == 3 * one.disk["features"]
    assert three.disk["moments of the kernel"] == 3 * one.disk["moments of the kernel"]
    assert replace(one, checkpoints=3).minutes == pytest.approx(3 * one.minutes)
    with pytest.raises(UndeError, match="it takes one checkpoint"):
        planned(diffusion(), STEPS, checkpoints=2)


@pytest.mark.parametrize("memory", ["3MB", "300kB"])
def test_passes_keep_to_the_budget(memory, tmp_path):
    _, made = compared(CONV, tmp_path, "tracin", memory=memory)
    assert made.timing.pass_size < planned(CONV, "tracin").timing.pass_size


def test_minutes_grow_with_examples_and_shrink_with_workers():
    timing = planned(MLP, "tracin").timing
    assert timing.seconds > 0 and timing.preparation > 0
    with toy.cut(10, 1):
        many = planned(MLP, "tracin", n_examples=1000)
    many = replace(many, timing=replace(timing, seconds=6.0, preparation=60))
    assert many.shards == 100
    assert many.minutes == pytest.approx(1 + 100)
    assert [many.minutes_with(n) for n in (3, 100, 500)] == pytest.approx([1 + 34, 1 + 1, 1 + 1])
    assert replace(many, workers=10).minutes == pytest.approx(1 + 10)
    assert replace(many, workers=10).as_dict()["totals"]["minutes"] == pytest.approx(11)


REAL = """
import sys, time, torch, unde
from torch import nn
from unde.plan import peak_memory
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 28 * 28, 10))
data = torch.randn(60, 3, 32, 32), torch.randint(10, (60,))
given = model, unde.tasks.Classification(), data
options = {"method": "tracin", "memory": "400MB"}
if sys.argv[1] == "plan":
    plan = unde.Index.plan(*given, **options)
    print(plan.minutes * 60, plan.memory)
else:
    start = time.perf_counter()
    unde.Index.build(*given, sys.argv[2], progress=False, **options)
    print(time.perf_counter() - start, peak_memory())
"""


def test_minutes_and_memory_are_those_of_a_build(tmp_path):
    """Of whole processes. Seconds are compared loosely: other processes run on the same machine."""
    runs = [[sys.executable, "-c", REAL, what, str(tmp_path / "i")] for what in ("plan", "build")]
    texts = [subprocess.run(run, capture_output=True, text=True, check=True).stdout for run in runs]
    (seconds, memory), (real_seconds, real_memory) = (map(float, text.split()) for text in texts)
    assert 0.2 * real_seconds < seconds < 5 * real_seconds
    assert memory == pytest.approx(real_memory, rel=0.2)


def test_a_model_without_weights():
    with torch.device("meta"):
        wide = nn.Sequential(nn.Linear(2**17, 2**18, bias=False), nn.Linear(2**18, 2**17))
    made = plan(wide, Classification(), n_examples=1000, method=methods.TRAK(projection="sjlt(64)"))
    assert made.parameters == 2 * 2**35 + 2**17
    assert made.features == 3 * 64
    assert made.disk["features"] == 4 * 1000 * 3 * 64
    assert (made.timing, made.minutes, made.memory) == (None, None, None)
    assert "minutes and peak memory are measured where the model has weights" in str(made)
    assert plan(MLP.model(), MLP.task, n_examples=1000).timing is None


def test_options_of_a_build_mean_the_same():
    assert planned(MLP, "trak", batch_size=3).timing.pass_size == 3
    part = planned(MLP, exclude=(r"^0\.",))
    assert set(part.groups) == {"2", "4"}
    assert part.groups["2"].parameters == 64 * 48 + 48
    assert part.groups["2"].features == 8 * 8 + 48
    assert planned(MLP, "trak", store_dtype="auto").store_dtype == "float32"
    assert planned(MLP, "tracin", n_examples=10**6, store_dtype="auto").store_dtype == "int8"


def test_the_model_is_not_touched():
    model, data = inputs(CONV)
    model[0].bias.requires_grad_(False)
    before = {n: (id(t), t.clone(), t.requires_grad) for n, t in model.state_dict(keep_vars=True).items()}
    plan(model, Classification(), data)
    assert model.training
    for n, t in model.state_dict(keep_vars=True).items():
        assert (id(t), t.requires_grad) == (before[n][0], before[n][2]) and t.grad is None
        assert torch.equal(t, before[n][1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_examples": 0}, "n_examples 0: expected at least 1"),
        ({"workers": -1}, "workers -1: expected at least 1"),
        ({"batch_size": 0}, "batch_size 0: expected at least 1"),
        ({"checkpoints": 0}, "checkpoints 0: expected at least 1"),
        ({"store_dtype": "int3"}, "unknown store_dtype 'int3'"),
        ({"train_data": None}, "expected train_data, or n_examples"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(UndeError, match=words):
        plan(MLP.model(), MLP.task, **({"train_data": MLP.data(4)} | options))


@pytest.mark.parametrize(
    "method",
    [
        methods.TRAK(projection="kron(4)", form="primal"),
        methods.TRAK(projection="kron(4)", form="dual"),
        methods.LoGRA(projection="kron(4)"),
        methods.EKFAC(projection="kron(4)"),
    ],
    ids=str,
)
def test_what_a_kernel_asks_of_the_budget(method, tmp_path):
    """One byte less than it says is refused, what it says is not."""
    index = built(MLP, tmp_path, method, fit=False)
    needs = method.kernel.bind(sizes.sizes_of(index.manifest)).needs().memory
    assert planned(MLP, method).kernel_memory == needs
    with pytest.raises(UndeError, match="the memory budget is"):
        toy.training(toy.reopen(index, memory=needs - 1), method)
    toy.training(toy.reopen(index, memory=needs), method)


@pytest.mark.parametrize("store_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    "method", [methods.TracIn(projection="kron(16)"), methods.EKFAC(projection="kron(16)")]
)
def test_shards(method, store_dtype, tmp_path):
    index = built(MLP, tmp_path, method, store_dtype=store_dtype)
    m, stored = index.manifest, toy.stored(index).shard(0, 0)
    content = shard_tensors(m, EXAMPLES, torch.float32)
    assert {k: (t.shape, t.dtype) for k, t in stored.items()} == {
        k: (t.shape, t.dtype) for k, t in content.items()
    }
    assert sum(sizes.shard_bytes(m, torch.float32).values()) == size(tmp_path, "shards")


def test_a_shard_takes_two_copies_in_memory(tmp_path):
    """What a plan adds to the memory of its passes."""
    with toy.cut(16, 6):
        index = built(MLP, tmp_path, "tracin", store_dtype="int8")
    m = index.manifest
    writer = shards.ShardWriter(index.folder, m, BuildInputs(index.model, index.task, index.train_data))
    with Meter() as meter:
        shards.compute_shard(writer, 0, 0)
    assert meter.peak <= 2 * 4 * m.resolved.shard_size * m.width + 2**20
