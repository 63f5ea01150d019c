"""What a benchmark of a diffusion model runs: every timestep of every image, a few noisy images at a time."""

import pytest
from denoisers import ddpm, images, toy

from unde import bench
from unde.tasks import Diffusion


@pytest.mark.parametrize("run", [bench.plain_pass, bench.frozen_pass])
def test_each_pass_goes_backward_before_the_next(run):
    model, seen = toy(), []
    model.first.register_forward_hook(lambda module, args, out: seen.append(("forward", len(args[0]))))
    model.last.register_full_backward_hook(
        lambda module, given, grads: seen.append(("backward", len(grads[0])))
    )
    task = Diffusion(ddpm(), timesteps=5, rows=4)
    run(model, task, [images(2), images(1, seed=1)])
    # Two images at one, two and two timesteps; one image at two and at three.
    sizes = [2, 4, 4, 2, 3]
    assert seen == [(way, size) for size in sizes for way in ("forward", "backward")]
