"""Identity of tasks: name, version, settings and tensors count, and nothing else."""

import dataclasses
import enum
import functools
import json
import math
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unde
from unde.tasks import CausalLM, Classification, Diffusion, Task
from unde.tasks.base import differences


def squared(x):
    return x**2


class Plain(Task):
    rate = 0.125

    def loss(self, model, batch):
        return squared(model(batch)).sum(1) * self.rate


class Heir(Plain):
    pass


def test_built_in_tasks():
    assert Classification().identity() == {"name": "Classification", "settings": {}, "version": 1}
    one, other = CausalLM("mean").identity(), CausalLM("sum").identity()
    assert differences(one, other) == ["setting reduction ('mean' there, 'sum' given)"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", 2, ["the version of Heir (1 there, 2 given)"]),
        ("rate", 0.5, ["setting rate (0.125 there, 0.5 given)"]),
        ("loss", lambda self, model, batch: model(batch).sum(1), []),  # code does not count
    ],
)
def test_attributes_of_a_class(monkeypatch, name, value, words):
    one = Heir().identity()
    monkeypatch.setattr(Plain, name, value)
    assert differences(one, Heir().identity()) == words
    assert (one == Heir().identity()) == (not words)


def test_another_class():
    assert differences(Plain().identity(), Heir().identity()) == ["the task (Plain there, Heir given)"]


def test_two_processes(tmp_path, capsys):
    """Neither addresses nor the order of sets count."""
    (tmp_path / "run.py").write_text(
        textwrap.dedent("""
            import json, torch
            from unde.tasks import Task

            class Mine(Task):
                names = {"a", "b", "c"}
                sets = [{"x", "y", 1, None}]

            task = Mine()
            task.call, task.weights = lambda x: x in {"p", "q", "r"}, {"w": torch.ones(3)}
            print(json.dumps(task.identity()))
        """)
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(unde.__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "run.py")]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    runpy.run_path(str(tmp_path / "run.py"), run_name="__main__")
    assert json.loads(capsys.readouterr().out) == json.loads(there)


class Holder(Task):
    def __init__(self, value):
        self.value = value

    def loss(self, model, batch):
        return model(batch).sum(1)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    alpha: float = 0.1
    names: tuple = ("a", "b")


class Scale:
    """An object of the module in which the task is."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


def smooth(p):
    return nn.CrossEntropyLoss(label_smoothing=p)


def layer(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def factory(n):
    return lambda x: x + n


VALUES = {
    "numbers": (lambda: 0.1, 0.2, "setting value (0.1 there, 0.2 given)"),
    "texts": (lambda: "mean", "sum", "setting value ('mean' there, 'sum' given)"),
    "none": (lambda: None, 1, "setting value (None there, 1 given)"),
    "true is not one": (lambda: True, 1, "setting value (True there, 1 given)"),
    "not a number": (lambda: math.nan, math.inf, "setting value (nan there, inf given)"),
    "scalars of NumPy": (lambda: np.float32(0.5), np.float32(0.25), "setting value (0.5 there, 0.25 given)"),
    "lists": (lambda: [1, 2], [1, 3], "setting value ([1, 2] there, [1, 3] given)"),
    "long lists": (lambda: list(range(500)), list(range(1, 501)), "setting value (other content)"),
    "sets": (lambda: {"a", "b"}, {"a", "c"}, "setting value (['a', 'b'] there, ['a', 'c'] given)"),
    "dicts": (
        lambda: {"a": 1, "b": {"c": 2}},
        {"a": 1, "b": {"c": 3}},
        "setting value.b.c (2 there, 3 given)",
    ),
    "keys called code": (lambda: {"code": 1}, {"code": 2}, "setting value.code (1 there, 2 given)"),
    "a key": (lambda: {"a": 1}, {"a": 1, "b": 2}, "setting value.b (none there, 2 given)"),
    "keys that are numbers": (lambda: {1: 2}, {1: 3}, "setting value.1 (2 there, 3 given)"),
    "tensors": (lambda: torch.ones(3), torch.zeros(3), "tensor value (other content)"),
    "shapes": (lambda: torch.ones(3), torch.ones(4), "tensor value (float32 (3,) there, float32 (4,) given)"),
    "half precision": (
        lambda: torch.ones(2).bfloat16(),
        torch.zeros(2).bfloat16(),
        "tensor value (other content)",
    ),
    "sparse": (
        lambda: torch.eye(2).to_sparse(),
        torch.ones(2, 2).to_sparse(),
        "tensor value (other content)",
    ),
    "arrays": (lambda: np.arange(3), np.arange(1, 4), "tensor value (other content)"),
    "tensors in a list": (
        lambda: [1, {"w": torch.ones(2)}],
        [1, {"w": torch.zeros(2)}],
        "tensor value[1].w (other content)",
    ),
    "modules": (lambda: layer(0), layer(1), "module value (other content)"),
    "kinds of modules": (lambda: nn.ReLU(), nn.GELU(), "module value (ReLU there, GELU given)"),
    "settings of modules": (lambda: smooth(0.1), smooth(0.2), "module value (other content)"),
    "functions": (lambda: F.relu, F.gelu, "setting value (relu there, gelu given)"),
    "built-in functions": (
        lambda: torch.sin,
        torch.cos,
        "setting value (_VariableFunctionsClass.sin there, _VariableFunctionsClass.cos given)",
    ),
    "partial arguments": (
        lambda: functools.partial(squared, x=1),
        functools.partial(squared, x=2),
        "setting value.keywords.x (1 there, 2 given)",
    ),
    "enums": (lambda: Colour.RED, Colour.BLUE, "setting value (Colour.RED there, Colour.BLUE given)"),
    "data classes": (lambda: Config(0.1), Config(0.2), "setting value.alpha (0.1 there, 0.2 given)"),
    "name spaces": (lambda: SimpleNamespace(a=1), SimpleNamespace(a=2), "setting value.a (1 there, 2 given)"),
    "objects": (lambda: Scale(1), Scale(2), "setting value.factor (1 there, 2 given)"),
    "slots": (lambda: Slotted(1), Slotted(2), "setting value.factor (1 there, 2 given)"),
    "methods": (lambda: Scale(1).__call__, Scale(2).__call__, "setting value.of.factor (1 there, 2 given)"),
    "bytes": (lambda: b"ab", b"ac", "setting value (other content)"),
    "types": (
        lambda: torch.float32,
        torch.float16,
        "setting value ('torch.float32' there, 'torch.float16' given)",
    ),
    "paths": (lambda: Path("a"), Path("b"), "setting value ('a' there, 'b' given)"),
    "kinds of objects": (
        lambda: np.random.default_rng(0),
        torch.Generator(),
        "setting value (numpy.random._generator.Generator there, torch._C.Generator given)",
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_settings_count(kind):
    make, other, words = VALUES[kind]
    one, again = Holder(make()).identity(), Holder(make()).identity()
    assert one == again
    assert json.loads(json.dumps(one)) == one  # as a manifest keeps it
    assert differences(one, Holder(other).identity()) == [words]


def test_what_can_only_be_told_by_its_type():
    """The state of a generator changes with its use; the place of a tensor changes no number."""
    assert Holder(np.random.default_rng(0)).identity() == Holder(np.random.default_rng(1)).identity()
    assert Holder(torch.device("cpu")).identity() == Holder(torch.device("cuda:1")).identity()
    assert Holder(torch.ones(2, device="meta")).identity() == Holder(torch.zeros(2, device="meta")).identity()


def test_the_mode_of_a_module_does_not_count():
    assert Holder(layer(0).eval()).identity() == Holder(layer(0).train()).identity()


def test_circles():
    task = Holder([])
    task.itself, task.bound = task, task.loss
    task.value.append(task.value)
    assert task.identity() == task.identity()
    json.dumps(task.identity())


def test_an_attribute_can_be_left_out():
    class Counting(Holder):
        def identity(self):
            found = super().identity()
            del found["settings"]["value"]
            return found

    assert Counting(1).identity() == Counting(2).identity()


def ddpm(**options):
    from diffusers import DDPMScheduler

    return DDPMScheduler(**{"num_train_timesteps": 100} | options)


def test_what_a_diffusion_task_is():
    one = Diffusion(ddpm(), 4).identity()
    assert one == Diffusion(ddpm(), [0, 25, 50, 75], rows=3).identity()
    task = Diffusion(ddpm(), 4)
    task.batching = task.batching.reduced()
    assert one == task.identity()
    other = Diffusion(ddpm(beta_end=0.1), 5, seed=1, vae=nn.Linear(2, 2)).identity()
    assert differences(one, other) == [
        "tensor alphas (other content)",
        "module inputs.vae (None there, Linear given)",
        "setting seed (0 there, 1 given)",
        "setting timesteps ([0, 25, 50, 75] there, [0, 20, 40, 60, 80] given)",
    ]
    spaced = Diffusion(ddpm(timestep_spacing="trailing"), 4).identity()
    assert differences(one, spaced) == [
        "setting scheduler.timestep_spacing ('leading' there, 'trailing' given)"
    ]


def test_a_scheduler_for_sampling_has_the_same_numbers():
    from diffusers import DDIMScheduler

    assert Diffusion(DDIMScheduler.from_config(ddpm().config)).identity() == Diffusion(ddpm()).identity()


def test_a_scheduler_of_a_task_of_ones_own_counts_by_its_config():
    words = differences(Holder(ddpm()).identity(), Holder(ddpm(clip_sample=False)).identity())
    assert words == ["setting value.clip_sample (True there, False given)"]


def test_a_cutting_of_ones_own_counts():
    from unde.tasks.base import Batching

    class Twice(Batching):
        def __init__(self, times):
            self.times = times

    class Cut(Plain):
        batching = Twice(2)

    one = Cut().identity()
    Cut.batching = Twice(2)
    assert one == Cut().identity()
    Cut.batching = Twice(3)
    assert differences(one, Cut().identity()) == ["setting batching.times (2 there, 3 given)"]
