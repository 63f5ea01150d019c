"""Sampling against diffusers' own pipelines and a loop written out."""

import pytest
import torch
from denoisers import ddpm, gradient, images, index_of, toy

from refusals import refused
from unde import Index, UndeError
from unde.diffusion import sample
from unde.methods import TRAK, JourneyTRAK
from unde.tasks import Diffusion

SHAPE = (2, 4, 4)


def scheduler():
    return ddpm(clip_sample=False)


def test_equals_a_ddim_loop():
    from diffusers import DDIMScheduler

    model, given = toy(condition=3), torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(1, 3)
    made = sample(
        model, scheduler(), SHAPE, [4, 5, 6], given={"condition": given}, unconditional={"condition": nothing},
        guidance=2.0, steps=5, batch_size=2, progress=False,
    )  # fmt: skip
    ddim = DDIMScheduler.from_config(scheduler().config)
    ddim.set_timesteps(5)
    x = made.trajectory[1:2, 0]
    for i, t in enumerate(ddim.timesteps):
        torch.testing.assert_close(made.trajectory[1:2, i], x, rtol=1e-4, atol=1e-5)
        assert int(made.timesteps[1, i]) == int(t)
        with torch.no_grad():
            plain, guided = (model(x, t[None], condition=c) for c in (nothing, given[1:2]))
        x = ddim.step(plain + 2.0 * (guided - plain), int(t), x).prev_sample
    torch.testing.assert_close(made.latents[1:2], x, rtol=1e-4, atol=1e-5)


def test_a_seed_is_an_image_whatever_its_batch():
    one = sample(toy(), scheduler(), SHAPE, [7], steps=4, progress=False)
    many = sample(toy(), scheduler(), SHAPE, [3, 9, 7], steps=4, batch_size=2, progress=False)
    torch.testing.assert_close(many.latents[2], one.latents[0])
    assert not torch.allclose(many.latents[0], many.latents[1])


def test_roles_have_seeds_of_their_own():
    learn = sample(toy(), scheduler(), SHAPE, range(3), steps=2, progress=False)
    with pytest.raises(UndeError, match=r"seeds \[2\] serve another role"):
        sample(toy(), scheduler(), SHAPE, range(2, 5), steps=2, apart_from=learn, progress=False)
    sample(toy(), scheduler(), SHAPE, range(3, 5), steps=2, apart_from=[learn], progress=False)


def journeys(model, made):
    """(Q, steps, P) gradients of the simple loss at every x_t, with the noise beside the final image as target."""
    alphas = scheduler().alphas_cumprod
    rows = []
    for q in range(len(made)):
        row = []
        for x, t in zip(made.trajectory[q], made.timesteps[q]):
            a = alphas[t]
            target = (x - a.sqrt() * made.latents[q]) / (1 - a).sqrt()
            row.append(gradient(model, ((model(x[None], t[None]) - target) ** 2).mean()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_journey_trak_with_averaged_training(tmp_path):
    model, x, task = toy(), images(9), Diffusion(scheduler(), timesteps=4)
    made = sample(model, scheduler(), SHAPE, [1, 2, 3], steps=5, progress=False)
    index = index_of(model, task, x, tmp_path / "i", method=TRAK(projection="none", damping=0.1))
    got = index.score(made.queries(journey=True), JourneyTRAK(damping=0.1)).total()
    phi = torch.stack([gradient(model, task.loss(model, x[i : i + 1]).sum()) for i in range(9)])
    gram = phi.T @ phi
    lam = 0.1 * gram.diagonal().mean()
    k = torch.linalg.inv(gram.double() + lam * torch.eye(len(gram)))
    want = journeys(model, made).mean(1).double() @ k @ phi.T.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_journey_trak_step_by_step(tmp_path):
    """1/T' Σ_t ⟨g_t(q), K g_t(n)⟩, K of the mean over steps."""
    model, x, task = toy(), images(9), Diffusion(scheduler(), timesteps=4)
    made = sample(model, scheduler(), SHAPE, [1, 2, 3], steps=5, progress=False)
    method = JourneyTRAK(damping=0.1, training="per-step", inference_steps=5, projection="none")
    index = index_of(model, task, x, tmp_path / "i", method=method, batch_size=4)
    got = index.score(made.queries(journey=True)).total()
    steps = [
        torch.stack([
            gradient(model, Diffusion(scheduler(), timesteps=[int(t)]).loss(model, row[None]).sum()) for row in x
        ])
        for t in made.timesteps[0]
    ]  # fmt: skip
    phi = torch.stack(steps).mean(0).double()
    gram = phi.T @ phi
    k = torch.linalg.inv(gram + 0.1 * gram.diagonal().mean() * torch.eye(len(gram)))
    q = journeys(model, made).double()
    want = sum(q[:, t] @ k @ steps[t].T.double() for t in range(5)) / 5
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    reopened = Index.open(tmp_path / "i", model=model, task=task)
    torch.testing.assert_close(reopened.score(made.queries(journey=True)).total(), got)


def test_bad_journeys(tmp_path):
    model, task = toy(), Diffusion(scheduler(), timesteps=4)
    made = sample(model, scheduler(), SHAPE, [1, 2], steps=5, progress=False)
    index = index_of(model, task, images(6), tmp_path / "i", method="trak")
    whole = made.queries(journey=True)
    timeless = {k: v for k, v in whole.items() if k != "timesteps"}
    short = {"trajectory": whole["trajectory"][:, 1:], "timesteps": whole["timesteps"][:, 1:]}
    no_trajectory = "Journey-TRAK follows the trajectory"
    for queries, says in (
        (made.queries(), no_trajectory),
        ([{"latents": x} for x in made.latents], no_trajectory),
        (made.latents, no_trajectory),
        (whole | {"timesteps": made.timesteps.flip(1)}, "of another sampler or scheduler"),
        (whole | short, r"timesteps \[60, 40, 20\].* is of another sampler"),
        (timeless, r"a trajectory of shape \(2, 5, 2, 4, 4\) with timesteps None"),
    ):
        refused(says, index.score, queries, "journey-trak")
    with pytest.raises(UndeError, match="needs the features of 50 steps, the index holds 1"):
        index.score(whole, JourneyTRAK(training="per-step"))


def test_bad_requests():
    refused("different from the others", sample, toy(), scheduler(), SHAPE, [1, 1])
    with pytest.raises(UndeError, match=r"2 rows of 'condition' for 3 seeds"):
        sample(toy(3), scheduler(), SHAPE, [1, 2, 3], given={"condition": torch.zeros(2, 3)})
    with pytest.raises(UndeError, match="guidance needs a conditional model"):
        sample(toy(), scheduler(), SHAPE, [1], unconditional={"condition": torch.zeros(1, 3)})
    refused("2 prompts for 1 seeds", sample, toy(), scheduler(), SHAPE, [1], prompts=["a", "b"])
