"""What an index may not mix: tasks with other settings, other content or other code, and nothing else."""

import dataclasses
import enum
import functools
import importlib.util
import json
import math
import os
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
from unde.tasks.identity import differences, same_but_code

SOURCE = '''
"""A task of somebody's own."""

from dataclasses import dataclass, field
from functools import cache, wraps

import torch
from torch.nn.functional import relu
from unde.tasks import Task

ALPHA = 0.5
UNUSED = 3
TABLE = torch.tensor([1.0, 2.0])


@dataclass
class Pair:
    left: float = 1.0
    right: float = 2.0
    more: list = field(default_factory=lambda: [29])

    def both(self):
        return self.left + self.right


class Base:
    def offset(self):
        return 7


class Offset(Base):
    def offset(self):
        return super().offset()


def inner(x):
    return x * ALPHA


def helper(x, power=2):
    """Squares."""
    return recursive(inner(x), 1) ** power


def recursive(x, n):
    return x if n == 0 else recursive(x, n - 1)


@cache
def cached():
    return 11


def scaled(factor):
    def decorate(f):
        @wraps(f)
        def wrapper(*args, **kwargs):
            return factor * f(*args, **kwargs)

        return wrapper

    return decorate


def back(task):
    return task.told()


def unused(x):
    return x - 5


def made(shift):
    def shifted(x):
        return x + shift

    return shifted


shifted = made(0.25)


class Mine(Task):
    rate = 0.125

    def loss(self, model, batch, scale=3.0):
        # squared
        x = relu(model(batch)) + TABLE.sum() + Pair().both() + Offset().offset() + cached()
        return shifted(helper(x)).sum(1) * scale * self.weight(x) * self.size + max(map(lambda v: v + 21, [1]))

    def weight(self, x: torch.Tensor) -> float:
        return self.deeper() + Mine.fixed() + back(self) + self.Inner.number

    class Inner:
        number = 31

    def told(self):
        return 37

    @scaled(13)
    def deeper(self):
        return 17

    @staticmethod
    def fixed():
        return 19

    @property
    def size(self):
        return 23

    def plot(self):
        return "line"
'''


def made(folder: Path, source: str, file: str = "mine.py") -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # data classes look there
    try:
        spec.loader.exec_module(module)
        return module.Mine()
    finally:
        del sys.modules[path.stem]


def changed(old: str, new: str) -> str:
    assert old in SOURCE
    return SOURCE.replace(old, new)


SAME = {
    "a comment": ("# squared", "# it is squared"),
    "layout": ("return shifted(helper(x))", "return shifted(\n            helper( x )\n        )"),
    "lines": ("ALPHA = 0.5\n", "\n\n\nALPHA = 0.5\n"),
    "a docstring": ('"""Squares."""', '"""Squares what it gets."""'),
    "no docstring": ('    """Squares."""\n', ""),
    "an annotation": ("def inner(x):", "def inner(x: torch.Tensor) -> torch.Tensor:"),
    "no annotation": ("x: torch.Tensor) -> float", "x)"),
    "an annotated variable": ("        x = relu", "        x: torch.Tensor = relu"),
    "how a constant is written": ("ALPHA = 0.5", "ALPHA = 5e-1"),
    "where a constant comes from": ("ALPHA = 0.5", "ALPHA = 1 / 2"),
    "a function that is not called": ("x - 5", "x - 6"),
    "a constant that is not named": ("UNUSED = 3", "UNUSED = 4"),
    "a method that is not called": ('"line"', '"points"'),
}

OTHER = {
    "an operator": ("+ TABLE.sum()", "- TABLE.sum()"),
    "a constant in the loss": ("v + 21", "v + 22"),
    "the type of a constant": ("return 7", "return 7.0"),
    "a module-level constant": ("ALPHA = 0.5", "ALPHA = 0.25"),
    "a module-level tensor": ("[1.0, 2.0]", "[1.0, 3.0]"),
    "a default": ("scale=3.0", "scale=4.0"),
    "a helper": ("** power", "* power"),
    "the default of a helper": ("power=2", "power=3"),
    "a helper of a helper": ("return x * ALPHA", "return x / ALPHA"),
    "a recursive helper": ("if n == 0", "if n <= 0"),
    "a cached helper": ("return 11", "return 12"),
    "a class": ("self.left + self.right", "self.left - self.right"),
    "a field": ("right: float = 2.0", "right: float = 3.0"),
    "a factory of a field": ("[29]", "[30]"),
    "a class in the class": ("number = 31", "number = 32"),
    "a method that a helper calls": ("return 37", "return 38"),
    "the base of a class": ("return 7", "return 8"),
    "a closed-over value": ("made(0.25)", "made(0.75)"),
    "a closure": ("x + shift", "x - shift"),
    "a decorator's value": ("@scaled(13)", "@scaled(14)"),
    "a decorator": ("factor * f(", "factor + f("),
    "a method": ("return 17", "return 18"),
    "a static method": ("return 19", "return 20"),
    "a property": ("return 23", "return 24"),
    "an imported function": ("import relu", "import gelu as relu"),
}


@pytest.mark.parametrize("what", SAME)
def test_the_same_code(tmp_path, what):
    one, other = (
        made(tmp_path / "a", SOURCE).identity(),
        made(tmp_path / "b", changed(*SAME[what])).identity(),
    )
    assert one == other
    assert one["source"]
    assert differences(one, other) == []


@pytest.mark.parametrize("what", OTHER)
def test_other_code(tmp_path, what):
    one, other = (
        made(tmp_path / "a", SOURCE).identity(),
        made(tmp_path / "b", changed(*OTHER[what])).identity(),
    )
    assert differences(one, other) == ["the code of loss() (another version)"]
    assert same_but_code(one, other)


def test_the_file_may_be_renamed(tmp_path):
    assert made(tmp_path, SOURCE).identity() == made(tmp_path, SOURCE, "other_name.py").identity()


def test_a_setting_of_a_class(tmp_path):
    one, other = made(tmp_path / "a", SOURCE), made(tmp_path / "b", changed("rate = 0.125", "rate = 0.5"))
    assert differences(one.identity(), other.identity()) == ["setting rate (0.125 there, 0.5 given)"]


def test_two_processes(tmp_path):
    """Not by addresses, nor by the order of sets."""
    (tmp_path / "mine.py").write_text(
        SOURCE + "    names = {'a', 'b', 'c'}\n    sets = [{'x', 'y', 1, None}]\n"
    )
    run = textwrap.dedent("""
        import json
        from mine import Mine
        task, space = Mine(), {}
        exec("typed = lambda x: x in {'p', 'q', 'r'}", space)
        task.typed = space["typed"]
        task.call, task.weights = lambda x: x in {"p", "q", "r"}, {"w": __import__("torch").ones(3)}
        print(json.dumps(task.identity()))
    """)
    (tmp_path / "run.py").write_text(run)
    found = []
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(unde.__file__).parents[1]), str(tmp_path)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, str(tmp_path / "run.py")],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert found[0]["source"] is False  # of one lambda
    assert found[0]["code"]["loss"] == made(tmp_path / "here", SOURCE).identity()["code"]["loss"]


def test_digests_stay_what_they_are(tmp_path):
    """Under any release of Python and of unde: with another digest, every index of such a task would be refused."""
    source = (
        "from unde.tasks import Task\n\n\nclass Mine(Task):\n    def loss(self, model, batch, scale=3.0):\n"
    )
    source += "        return [scale * x if x > 0 else None for x in model(*batch)][1:] + self.rest(-1)\n\n"
    source += "    def rest(self, n):\n        return f'{n:>3}', {'a': lambda x, *y, z=1, **k: not x}\n"
    assert made(tmp_path, source).identity()["code"] == {"loss": "c0019cbb172a7170ee37f8cc4c8f0a0a"}


# --- classes ---------------------------------------------------------------------------------------------


def squared(x):
    return x**2


class Own(Task):
    def loss(self, model, batch):
        return squared(model(batch)).sum(1)


class Heir(Own):
    def loss(self, model, batch):
        return 2 * super().loss(model, batch)


class Margin(Classification):
    """Overrides what the loss of unde calls."""

    def logits(self, model, batch):
        return model(batch[0]) * self.factor()

    def factor(self):
        return 2.0


def test_built_in_tasks_have_a_version_and_no_code():
    found = Classification().identity()
    assert found == {"name": "Classification", "settings": {}, "version": 1, "code": None, "source": True}
    one, other = CausalLM("mean").identity(), CausalLM("sum").identity()
    assert differences(one, other) == ["setting reduction ('mean' there, 'sum' given)"]
    assert not same_but_code(one, other)


def test_the_version_of_a_built_in_task(monkeypatch):
    one = Margin().identity()
    monkeypatch.setattr(Classification, "version", 2)
    other = Margin().identity()
    assert differences(one, other) == ["the version of Margin (1 there, 2 given)"]
    assert not same_but_code(one, other)


def test_an_inherited_loss_that_calls_an_overridden_method(monkeypatch):
    one = Margin().identity()
    assert "loss" in one["code"]
    assert "mask" not in one["code"]  # it reaches nothing of the user's
    monkeypatch.setattr(Margin, "factor", lambda self: 3.0)
    assert "the code of loss() (another version)" in differences(one, Margin().identity())
    assert same_but_code(one, Margin().identity())


def test_a_loss_that_calls_super(monkeypatch):
    one = Heir().identity()
    monkeypatch.setattr(Own, "loss", lambda self, model, batch: model(batch).sum(1))
    assert differences(one, Heir().identity()) == ["the code of loss() (another version)"]


def test_another_class():
    one, other = Own().identity(), Heir().identity()
    assert differences(one, other)[0] == "the task (Own there, Heir given)"
    assert not same_but_code(one, other)


def test_code_that_only_one_has():
    class Masked(Own):
        def mask(self, batch):
            return batch > 0

    words = differences(Own().identity(), Masked().identity())
    assert "the code of mask() (only given)" in words
    assert "the code of mask() (only there)" in differences(Masked().identity(), Own().identity())


@pytest.mark.parametrize("name", ["measure", "measures", "token_losses", "mask", "collate"])
def test_every_part_of_a_task_counts(name):
    def task(number):
        return type("Part", (Own,), {name: lambda self, *args, **kwargs: number})()

    one, other = task(1).identity(), task(2).identity()
    assert differences(one, other) == [f"the code of {name}() (another version)"]


def test_what_is_not_part_of_a_loss():
    class Perturbed(Own):
        def perturbations(self, model, examples):
            return []

    assert Perturbed().identity()["code"] == Own().identity()["code"]


def test_local_classes_and_closures():
    def task(alpha, function):
        class Local(Task):
            def loss(self, model, batch):
                return function(alpha * model(batch)).sum(1)

        return Local().identity()

    one = task(0.1, squared)
    assert one == task(0.1, squared)
    assert one["source"]
    assert differences(one, task(0.2, squared)) == ["the code of loss() (another version)"]
    assert differences(one, task(0.1, lambda x: x)) == ["the code of loss() (another version)"]
    assert one != task(torch.tensor(0.1), squared)
    assert (
        task(torch.tensor(0.1), squared)
        == task(torch.tensor(0.1), squared)
        != task(torch.tensor(0.2), squared)
    )
    assert task(0.1, F.relu) == task(0.1, F.relu) != task(0.1, F.gelu)


def test_a_helper_of_another_module_counts_by_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "far_away.py").write_text("def helper(x):\n    return x\n\ndef other(x):\n    return x\n")
    source = "from far_away import helper\nfrom unde.tasks import Task\n\n\nclass Mine(Task):\n"
    source += "    def loss(self, model, batch):\n        return helper(model(batch))\n"
    one = made(tmp_path / "a", source).identity()
    del sys.modules["far_away"]
    (tmp_path / "far_away.py").write_text(
        "def helper(x):\n    return x * 1000\n\ndef other(x):\n    return x\n"
    )
    importlib.invalidate_caches()
    assert one == made(tmp_path / "b", source).identity()
    assert one != made(tmp_path / "c", source.replace("import helper", "import other as helper")).identity()
    del sys.modules["far_away"]


def test_a_decorated_loss(tmp_path):
    source = changed("    def loss(self", "    @torch.enable_grad()\n    def loss(self")
    one, other = made(tmp_path / "a", source).identity(), made(tmp_path / "b", SOURCE).identity()
    assert one["source"]
    assert one["code"] != other["code"]
    inside = made(tmp_path / "c", source.replace("v + 21", "v + 22")).identity()
    assert differences(one, inside) == ["the code of loss() (another version)"]


def test_a_decorated_loss_that_calls_super():
    def task(number):
        class Below(Task):
            def loss(self, model, batch):
                return model(batch).sum(1) * number

        class Above(Below):
            @torch.enable_grad()
            def loss(self, model, batch):
                return super().loss(model, batch)

        return Above().identity()

    assert task(1) == task(1)
    assert differences(task(1), task(2)) == ["the code of loss() (another version)"]


def test_many_helpers_are_read_once_each(tmp_path):
    layers = 25
    calls = [(f"a{i}", f"b{i}") for i in range(layers)]
    source = "from unde.tasks import Task\n\n\ndef a0(x):\n    return x\n\n\ndef b0(x):\n    return x\n"
    for (a, b), names in zip(calls, calls[1:]):
        source += "".join(f"\n\ndef {name}(x):\n    return {a}(x) + {b}(x)\n" for name in names)
    source += (
        f"\n\nclass Mine(Task):\n    def loss(self, model, batch):\n        return {calls[-1][0]}(batch)\n"
    )
    deep = source.replace("def b0(x):\n    return x", "def b0(x):\n    return -x")
    one, other = made(tmp_path / "a", source).identity(), made(tmp_path / "b", deep).identity()
    assert differences(one, other) == ["the code of loss() (another version)"]


def test_code_without_source():
    def task(text):
        space = {"Task": Task, "__name__": "typed"}
        exec("class Mine(Task):\n    def loss(self, model, batch):\n        " + text, space)
        return space["Mine"]().identity()

    one = task("return model(batch) * 2")
    assert one["source"] is False
    assert one == task("return (model(batch)  *  2)")
    words = differences(one, task("return model(batch) * 3"))
    assert words == [
        "the code of loss() (another version; compared without its source, so that layout may count)"
    ]
    assert one != task("return model(batch) + 2")
    assert task("return model.a(batch)") != task("return model.b(batch)")


# --- settings --------------------------------------------------------------------------------------------


class BuildInputs(Task):
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
    "shapes": (
        lambda: torch.ones(3),
        torch.ones(4),
        "tensor value (float32 (3,) there, float32 (4,) given)",
    ),
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
    "lambdas": (lambda: lambda x: x + 1, lambda x: x + 2, "the code of value (another version)"),
    "closures": (lambda: factory(1), factory(2), "the code of value (another version)"),
    "functions": (
        lambda: F.relu,
        F.gelu,
        "setting value (torch.nn.functional.relu there, torch._C._nn.gelu given)",
    ),
    "built-in functions": (
        lambda: torch.sin,
        torch.cos,
        "setting value (torch._VariableFunctionsClass.sin there, torch._VariableFunctionsClass.cos given)",
    ),
    "partial arguments": (
        lambda: functools.partial(squared, x=1),
        functools.partial(squared, x=2),
        "setting value.keywords.x (1 there, 2 given)",
    ),
    "partial functions": (
        lambda: functools.partial(lambda x: x, 1),
        functools.partial(lambda x: -x, 1),
        "the code of value.function (another version)",
    ),
    "enums": (lambda: Colour.RED, Colour.BLUE, "setting value (Colour.RED there, Colour.BLUE given)"),
    "data classes": (lambda: Config(0.1), Config(0.2), "setting value.alpha (0.1 there, 0.2 given)"),
    "name spaces": (
        lambda: SimpleNamespace(a=1),
        SimpleNamespace(a=2),
        "setting value.a (1 there, 2 given)",
    ),
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
    one, again = BuildInputs(make()).identity(), BuildInputs(make()).identity()
    assert one == again
    assert json.loads(json.dumps(one)) == one  # as a manifest keeps it
    assert differences(one, BuildInputs(other).identity()) == [words]
    assert same_but_code(one, BuildInputs(other).identity()) == words.startswith("the code")


def test_what_can_only_be_told_by_its_type():
    """The state of a generator changes with its use; the place of a tensor changes no number."""
    assert (
        BuildInputs(np.random.default_rng(0)).identity() == BuildInputs(np.random.default_rng(1)).identity()
    )
    assert BuildInputs(torch.device("cpu")).identity() == BuildInputs(torch.device("cuda:1")).identity()
    assert (
        BuildInputs(torch.ones(2, device="meta")).identity()
        == BuildInputs(torch.zeros(2, device="meta")).identity()
    )


def test_code_is_kept_as_a_digest():
    found = BuildInputs([lambda x: x + 1]).identity()["settings"]["value"]
    assert list(found[0]) == ["$code"]
    assert len(found[0]["$code"]) == 32


def test_the_mode_of_a_module_does_not_count():
    assert BuildInputs(layer(0).eval()).identity() == BuildInputs(layer(0).train()).identity()


def test_the_code_of_an_object(monkeypatch):
    one = BuildInputs(Scale(1)).identity()
    monkeypatch.setattr(Scale, "__call__", lambda self, x: -x)
    assert differences(one, BuildInputs(Scale(1)).identity()) == ["the code of value (another version)"]
    words = ["the code of value (another version)", "setting value.factor (1 there, 2 given)"]
    assert differences(one, BuildInputs(Scale(2)).identity()) == words


def test_the_code_of_a_module():
    def module(sign):
        class Own(nn.Module):
            def forward(self, x):
                return sign * x

        return Own()

    one, other = BuildInputs(module(1)).identity(), BuildInputs(module(-1)).identity()
    assert differences(one, other) == ["the code of value (another version)"]


def test_lambdas_on_one_line():
    pair = [lambda x: x + 1, lambda x: x + 2]
    one, other = (BuildInputs(f).identity() for f in pair)
    assert one != other
    assert one["source"] == (sys.version_info >= (3, 11))


def test_circles():
    task = BuildInputs([])
    task.itself, task.bound = task, task.loss
    task.value.append(task.value)
    assert task.identity() == task.identity()
    json.dumps(task.identity())


def test_an_attribute_can_be_left_out():
    class Counting(BuildInputs):
        def identity(self):
            found = super().identity()
            del found["settings"]["value"]
            return found

    assert Counting(1).identity() == Counting(2).identity()


# --- diffusion -------------------------------------------------------------------------------------------


def ddpm(**options):
    from diffusers import DDPMScheduler

    return DDPMScheduler(**{"num_train_timesteps": 100} | options)


def test_what_a_diffusion_task_is():
    one = Diffusion(ddpm(), 4).identity()
    assert one == Diffusion(ddpm(), [0, 25, 50, 75], rows=3).identity()
    task = Diffusion(ddpm(), 4)
    task.cutting = task.cutting.brief()
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
    words = differences(BuildInputs(ddpm()).identity(), BuildInputs(ddpm(clip_sample=False)).identity())
    assert words == ["setting value.clip_sample (True there, False given)"]


def test_a_cutting_of_ones_own_counts():
    from unde.tasks.batching import Whole

    class Twice(Whole):
        times = 2

        def passes(self, batch, ids):
            yield from [batch] * self.times

    class Cut(Own):
        cutting = Twice()

    one = Cut().identity()
    Cut.cutting = Twice()
    assert one == Cut().identity()
    Twice.times = 3
    assert differences(one, Cut().identity()) == ["the code of cutting (another version)"]
