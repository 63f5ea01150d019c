"""Diffusion models in other processes: the same bits, noise and steps of trajectories included."""

import pytest
import torch
from denoisers import ddpm, images, index_of, toy

from toy import cut
from unde import Setup
from unde.methods import DAS, JourneyTRAK
from unde.parallel import Processes
from unde.tasks import Diffusion

N = 12


def make():
    return Setup(toy(), Diffusion(ddpm(), timesteps=4), images(N))


@pytest.fixture(scope="module")
def workers():
    pool = Processes(2)
    yield pool
    pool.close()


def built(folder, method, **who):
    setup = make()
    with cut(pass_size=2, shard_passes=2):
        return index_of(setup.model, setup.task, setup.train_data, folder, method=method, **who)


def files(folder):
    found = (p for p in folder.rglob("*.safetensors") if "scratch" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.parametrize(
    "method",
    [DAS(projection="kron(2)"), JourneyTRAK(projection="kron(2)", training="per-step", inference_steps=2)],
)
def test_the_same_bits(tmp_path, workers, method):
    here = built(tmp_path / "here", method)
    there = built(tmp_path / "there", method, executor=workers, recipe="test_diffusion_workers:make")
    assert len(here.manifest.shards) > 2
    if isinstance(method, DAS):  # journeys are asked with samples, not with images
        queries = images(5, seed=5)
        one, other = here.score(queries), there.score(queries)
        assert torch.equal(other.total(), one.total())
        assert other.top(3).indices.tolist() == one.top(3).indices.tolist()
    assert there.self_influence().tolist() == here.self_influence().tolist()
    assert files(there.folder) == files(here.folder)
