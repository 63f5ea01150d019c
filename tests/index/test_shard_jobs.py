"""Jobs: a shard is the same bytes whoever computes it, in whatever order, in this process or in another."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import projects
import pytest
import torch

import toy
from unde import UndeError, methods
from unde.data import Rows, parse_bytes
from unde.index.builder import BuildSettings, begin_index
from unde.index.shard_writer import ShardWriter, compute_shard, list_missing
from unde.parallel.model_transport import BuildInputs
from unde.setup import Recipe
from unde.store import layout

HERE = Path(__file__).parent
METHOD = methods.EKFAC(projection="kron(3)", damping=0.1, fisher="empirical")  # as Index.build settles it


def begun(folder: Path, recipe: Recipe | None = None, setup=None, **options) -> ShardWriter:
    """An index with a manifest and without shards."""
    setup = setup or projects.make()
    given = BuildInputs(
        setup.model, setup.task, Rows(setup.train_data), options.pop("checkpoints", None), recipe
    )
    layout.prepare(folder)
    options = {"store_dtype": "float32", "memory": parse_bytes("50MB")} | options
    with toy.cut():
        return begin_index(folder, given, METHOD, BuildSettings(methods.EKFAC(), **options))


def built(folder: Path, **options) -> dict[str, bytes]:
    return toy.content(toy.build(folder, method=METHOD, **options).folder)


STATES = toy.states(1, 2)


@pytest.mark.parametrize("seed", range(4))
def test_shards_in_any_order_are_those_of_a_serial_build(tmp_path, seed):
    context = begun(tmp_path / "i", checkpoints=STATES)
    jobs = list_missing(context)
    assert sorted(jobs) == [(c, s) for c in range(2) for s in range(3)]
    random.Random(seed).shuffle(jobs)
    for job in jobs:
        compute_shard(context, *job)
    context.close()
    assert toy.content(tmp_path / "i") == built(tmp_path / "serial", checkpoints=STATES)


def test_settled_once_whatever_the_budget_and_the_threads_of_who_goes_on(tmp_path):
    first = begun(tmp_path / "i")
    compute_shard(first, 0, 1)
    first.close()
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = begun(tmp_path / "i", memory=2000)
        assert again.manifest == first.manifest
        assert again.manifest.resolved.threads == 1
        assert list_missing(again) == [(0, 0), (0, 2)]
        for job in list_missing(again):
            compute_shard(again, *job)
            assert torch.get_num_threads() == 2  # one inside, those of the caller after
        again.close()
    finally:
        torch.set_num_threads(own)
    assert toy.content(tmp_path / "i") == built(tmp_path / "serial")


@pytest.mark.parametrize("recipe", [Recipe("projects:make"), Recipe("projects:make", {"n": 22})])
def test_a_context_travels_by_its_recipe(tmp_path, recipe):
    context = begun(tmp_path / "i", recipe)
    sent = pickle.loads(pickle.dumps(context))
    assert sent.inputs.model is not context.inputs.model
    for job in list_missing(context):
        compute_shard(sent, *job)
    sent.close()
    assert toy.content(tmp_path / "i") == built(tmp_path / "serial")


def test_another_process_computes_the_same_bytes(tmp_path):
    context = begun(tmp_path / "i", Recipe("projects:make"))
    (tmp_path / "context").write_bytes(pickle.dumps(context))
    code = (
        "import pickle, sys; sys.path[:0] = sys.argv[2:]\n"
        "from unde.index.shard_writer import compute_shard, list_missing\n"
        "context = pickle.loads(open(sys.argv[1], 'rb').read())\n"
        "for job in reversed(list_missing(context)): compute_shard(context, *job)\n"
        "context.close()\n"
        "assert 'torch._dynamo' not in sys.modules"  # a second for every worker, for nothing
    )
    command = [sys.executable, "-c", code, tmp_path / "context", HERE, HERE.parent]
    subprocess.run(command, check=True, timeout=120)
    assert toy.content(tmp_path / "i") == built(tmp_path / "serial")


def test_what_is_pickled_holds_no_model(tmp_path):
    setup = projects.make()
    setup.model.big = torch.nn.Parameter(torch.zeros(10**6), requires_grad=False)
    inputs = BuildInputs(setup.model, setup.task, Rows(setup.train_data), recipe=Recipe("projects:make"))
    context = ShardWriter(tmp_path, begun(tmp_path / "i").manifest, inputs)
    assert len(pickle.dumps(context)) < 20_000


@pytest.mark.parametrize(
    ("recipe", "make", "said"),
    [
        (Recipe("projects:moody"), projects.moody, "projects:moody makes a model with other weights"),
        (Recipe("projects:make", {"n": 23}), projects.make, "projects:make gives other data here"),
    ],
)
def test_a_recipe_that_makes_something_else_is_refused(tmp_path, recipe, make, said):
    context = begun(tmp_path / "i", recipe, make())
    with pytest.raises(UndeError, match=said):
        pickle.loads(pickle.dumps(context))
