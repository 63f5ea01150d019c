"""How many noisy images go through the model at once: as many as the memory budget holds, and no matter to features."""

import pytest
import torch
from denoisers import ddpm, images, index_of, toy
from test_diffusion_task import unet

from refusals import refused
from toy import stored
from unde import bench
from unde.data import Rows
from unde.diffusion import sample
from unde.gradients import Collector, make_units, plan_coverage
from unde.gradients.meter import Meter
from unde.groups import trainable
from unde.methods import DAS, JourneyTRAK, TracIn
from unde.tasks import Diffusion
from unde.tasks.base import even_slices, with_batching
from unde.tasks.timesteps import ROWS

MB = 2**20


def rows_seen(model, run):
    seen = []
    first = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    handle = first.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    result = run()
    handle.remove()
    return seen, result


def every(index):
    return stored(index).rows(torch.arange(len(index)))[0]


def built(model, data, folder, memory, method, **options):
    task = Diffusion(ddpm(), timesteps=6, **options)
    return index_of(model, task, data, folder, method=method, memory=memory)


@pytest.mark.parametrize("method", [TracIn(projection="none"), DAS(projection="none")], ids=["tracin", "das"])
def test_features_do_not_depend_on_the_budget(tmp_path, method):
    model, data = toy(), images(11)
    seen, small = rows_seen(model, lambda: built(model, data, tmp_path / "small", 1, method))
    assert seen[-66:] == [1] * 66  # after planning, one image at one timestep at a time
    seen, large = rows_seen(model, lambda: built(model, data, tmp_path / "large", "1GB", method))
    assert seen[-1:] == [66]  # all images at all timesteps
    torch.testing.assert_close(every(small), every(large), rtol=1e-4, atol=1e-6)
    for name in ("loss", "beside") if small.method.extra_measures else ("loss",):
        one, other = (stored(index).values(name) for index in (small, large))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_queries_keep_to_the_budget_of_their_index(tmp_path):
    model, data = toy(), images(4)
    method = JourneyTRAK(projection="none")
    asked = sample(model, ddpm(), (2, 4, 4), range(3), steps=5).queries(journey=True)
    small = built(model, data, tmp_path / "small", 1, method)
    large = built(model, data, tmp_path / "large", "1GB", method)
    seen, one = rows_seen(model, lambda: small.features(asked))
    assert seen[-15:] == [1] * 15
    seen, other = rows_seen(model, lambda: large.features(asked))
    assert seen[-1] == 15
    torch.testing.assert_close(one.features, other.features, rtol=1e-4, atol=1e-6)


def collector(model, data, **options):
    task, rows = Diffusion(ddpm(), timesteps=12, **options), Rows(data)
    units = make_units(model, trainable(model, ()), "kron(4)", 0)
    return Collector(model, task, units, plan_coverage(model, task, rows, units)), rows


@pytest.mark.parametrize("budget", [2 * MB, 5 * MB])
def test_a_pass_takes_what_the_budget_allows_and_no_more(budget):
    model = unet()
    data = {"latents": images(6), "encoder_hidden_states": torch.randn(6, 3, 6)}
    collect, rows = collector(model, data)
    with collect:
        collect.fit(budget, rows.batch([0]))
        assert 1 < collect.task.batching.rows < ROWS
        with Meter() as meter:
            collect(rows.batch(range(6)), list(range(6)))
    assert (
        0.5 * budget < meter.peak <= 1.05 * budget
    )  # passes are of equal size; the noise is drawn beside them


def test_a_batch_is_not_cut_if_it_fits():
    model = toy()
    collect, rows = collector(model, images(ROWS + 7))
    with collect:
        collect.fit(2**30, rows.batch([0]))
        seen, _ = rows_seen(model, lambda: collect(rows.batch(range(ROWS + 7)), list(range(ROWS + 7))))
    assert seen == [ROWS + 7] * 12


def test_rows_that_are_given_are_kept():
    collect, rows = collector(toy(), images(6), rows=7)
    with collect:
        collect.fit(1, rows.batch([0]))
        seen, _ = rows_seen(collect.model, lambda: collect(rows.batch(range(6)), list(range(6))))
        assert seen == [6] * 12
    collect, rows = collector(toy(), images(6), rows=4)
    with collect:
        seen, _ = rows_seen(collect.model, lambda: collect(rows.batch(range(6)), list(range(6))))
        assert seen == [3] * 24


def test_checks_look_at_two_timesteps():
    """So that they take little memory whatever the budget is; of a trajectory, too."""
    model, data = toy(), images(4)
    task = Diffusion(ddpm(), timesteps=50)
    units = make_units(model, trainable(model, ()), "kron(4)", 0)
    asked = sample(model, ddpm(), (2, 4, 4), range(3), steps=20).queries(journey=True)
    for rows in (Rows(data), Rows(asked)):
        seen, _ = rows_seen(model, lambda rows=rows: plan_coverage(model, task, rows, units))
        assert max(seen) == 6
    assert task.batching.reduced().timesteps == [0, 50]
    assert len(task.timesteps) == 50


def test_the_size_of_passes_is_no_part_of_an_index():
    """What was built under one budget is found again under another, and by hand-set rows."""
    task = Diffusion(ddpm(), timesteps=6)
    for rows in (None, 1, 7):
        assert Diffusion(ddpm(), timesteps=6, rows=rows).identity() == task.identity()
    assert with_batching(task, task.batching.reduced()).identity() == task.identity()
    assert Diffusion(ddpm(), timesteps=5).identity() != task.identity()


def test_no_rows():
    refused("rows is 0: expected at least 1", Diffusion, ddpm(), rows=0)


@pytest.mark.parametrize(("count", "most"), [(10, 3), (3, 10), (1, 1), (7, 0), (80, 79)])
def test_parts_are_few_and_equal(count, most):
    parts = [list(range(count))[cut] for cut in even_slices(count, most)]
    assert [i for part in parts for i in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert len(parts) == -(-count // max(1, most))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("run", [bench.plain_pass, bench.frozen_pass])
def test_each_pass_of_a_benchmark_goes_backward_before_the_next(run):
    """It runs every timestep of every image, a few noisy images at a time."""
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
