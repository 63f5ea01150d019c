"""Diffusion methods on indexes that were appended to and from which examples were removed."""

import pytest
import torch
from denoisers import ddpm, images, toy

from unde import Index
from unde.diffusion import sample
from unde.methods import DAS, DTRAK, JourneyTRAK
from unde.tasks import Diffusion

METHODS = {
    "d-trak": DTRAK(projection="kron(3)"),
    "das": DAS(projection="kron(3)"),
    "journey": JourneyTRAK(projection="kron(3)"),
    "journey-per-step": JourneyTRAK(projection="kron(3)", training="per-step", inference_steps=3),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_as_built_at_once(tmp_path, method):
    model, task, x = toy(), Diffusion(ddpm(), timesteps=3), images(14)
    options = {"method": method, "progress": False, "memory": "50MB"}
    index = Index.build(model, task, x[:8], tmp_path / "i", **options)
    index.append(x[8:], progress=False)
    index.remove(indices=[2, 9])
    left = torch.tensor([i for i in range(14) if i not in (2, 9)])
    whole = Index.build(model, task, x[left], tmp_path / "w", **options)
    if "journey" in method.name:
        queries = sample(model, ddpm(clip_sample=False), (2, 4, 4), [1, 2], steps=3, progress=False).queries(
            journey=True
        )
    else:
        queries = images(3, seed=5)
    got, want = index.score(queries).total(), whole.score(queries).total()
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert index.verify()
