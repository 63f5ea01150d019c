"""The diffusion task against loops over examples and timesteps, written out with diffusers' own schedulers."""

import pytest
import torch
from denoisers import ddpm, gradient, images, index_of, toy
from torch import nn

from refusals import refused
from toy import stored
from unde import UndeError
from unde.data import Rows, digest
from unde.methods import DAS, DTRAK, TracIn
from unde.tasks import Diffusion

STEPS = [0, 25, 50, 75]


def by_hand(model, task, image, name, **given):
    """One image, one timestep at a time, noise added and velocities taken by the scheduler."""
    values = []
    for t in STEPS:
        when = torch.tensor([t])
        noise = task.noise(digest(image), [t], image.shape)
        noisy = task.scheduler.add_noise(image[None], noise, when)
        out = model(noisy, when, **given)
        target, predicted = noise, out
        if task.prediction == "v_prediction":
            target = task.scheduler.get_velocity(image[None], noise, when)
            a = task.scheduler.alphas_cumprod[t]
            predicted = a.sqrt() * out + (1 - a).sqrt() * noisy
        measures = {
            "loss": ((out - target) ** 2).mean(),
            "residual": ((predicted - noise) ** 2).mean(),
            "square": (predicted**2).mean(),
            "mean": predicted.mean(),
        }
        values.append(measures[name])
    return torch.stack(values).mean()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", ["loss", "square", "mean", "residual"])
@pytest.mark.parametrize("rows", [1, 6, 64])
def test_measures_are_means_over_timesteps(prediction, name, rows):
    model, x = toy(), images(3)
    task = Diffusion(ddpm(prediction_type=prediction), timesteps=4, rows=rows)
    assert task.timesteps == STEPS
    want = torch.stack([by_hand(model, task, image, name) for image in x])
    torch.testing.assert_close(task.measure(model, x, name=name), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "prediction"), [(2, "epsilon"), (64, "v_prediction")])
@pytest.mark.parametrize(("method", "name"), [(TracIn, "loss"), (DTRAK, "square"), (DAS, "mean")])
def test_features_are_gradients_of_the_mean(tmp_path, method, name, rows, prediction):
    model, x = toy(), images(7)
    task = Diffusion(ddpm(prediction_type=prediction), timesteps=4, rows=rows)
    index = index_of(model, task, x, tmp_path / "i", method=method(projection="none"), batch_size=3)
    for row, image in zip(stored(index).block(0, 0), x, strict=True):
        expected = gradient(model, by_hand(model, task, image, name))
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)
    if method is DAS:
        residual = torch.stack([by_hand(model, task, image, "residual") for image in x]).detach()
        torch.testing.assert_close(stored(index).values("beside")[:, 0], residual, rtol=1e-5, atol=1e-6)


def test_noise_belongs_to_the_image_and_the_timestep():
    task, x = Diffusion(ddpm(), timesteps=4), images(3)
    model = toy()
    alone = torch.cat([task.measure(model, x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(task.measure(model, x.flip(0)).flip(0), alone)
    drawn = task.noise(digest(x[0]), [0, 25], (2, 4, 4))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[1], task.noise(digest(x[0]), [25], (2, 4, 4))[0])
    assert not torch.equal(drawn[0], task.noise(digest(x[1]), [0], (2, 4, 4))[0])
    assert not torch.equal(drawn[0], Diffusion(ddpm(), 4, seed=1).noise(digest(x[0]), [0], (2, 4, 4))[0])
    many = torch.stack([task.noise(f"{i}", [0], (2, 4, 4)) for i in range(300)])
    assert abs(float(many.mean())) < 0.05
    assert float(many.std()) == pytest.approx(1, abs=0.03)


def test_conditions_and_prompts(tmp_path):
    model, x = toy(condition=3), images(5)
    vectors = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    task = Diffusion(ddpm(), timesteps=4, rows=8)
    want = torch.stack([by_hand(model, task, x[i], "loss", condition=vectors[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(
        task.measure(model, {"images": x, "condition": vectors}), want, rtol=1e-5, atol=1e-6
    )
    data = {"images": x, "condition": vectors}
    index = index_of(model, task, data, tmp_path / "i", method=DTRAK())
    assert index.score({k: v[:2] for k, v in data.items()}).total().isfinite().all()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def forward(self, ids):
        return (self.table(ids),)


def unet(**options):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=4, in_channels=2, out_channels=2, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=6, attention_head_dim=4, **options,
    ).eval()  # fmt: skip


def against_autograd(model, task, data, tmp_path):
    index = index_of(model, task, data, tmp_path / "i", method=TracIn(projection="none"), batch_size=4)
    rows = Rows(data)
    for i in range(len(rows)):
        g = gradient(model, task.loss(model, rows.batch([i])).sum())
        found = stored(index).block(0, 0)[i]
        torch.testing.assert_close(found, g, rtol=1e-3, atol=1e-5 * float(g.abs().max()))


def test_text_conditional_unet_with_prompts(tmp_path):
    encoder = Encoder()
    prompts = torch.randint(9, (4, 5), generator=torch.Generator().manual_seed(0))
    data = {"latents": images(4), "prompts": prompts}
    task = Diffusion(ddpm(prediction_type="v_prediction"), timesteps=3, text_encoder=encoder)
    against_autograd(unet(), task, data, tmp_path)
    given = {"latents": data["latents"], "encoder_hidden_states": encoder(data["prompts"])[0].detach()}
    torch.testing.assert_close(task.loss(unet(), data), task.loss(unet(), given))


def test_unconditional_unet(tmp_path):
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=4, in_channels=2, out_channels=2, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).eval()  # fmt: skip
    against_autograd(model, Diffusion(ddpm(), timesteps=3), images(4), tmp_path)


def test_lora_adapters_of_a_unet(tmp_path):
    from peft import LoraConfig

    model = unet()
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    )
    data = {"latents": images(4), "encoder_hidden_states": torch.randn(4, 5, 6)}
    assert all("lora" in n for n, p in model.named_parameters() if p.requires_grad)
    against_autograd(model, Diffusion(ddpm(), timesteps=3), data, tmp_path)


def test_dit(tmp_path):
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=4, num_layers=1, sample_size=4,
        patch_size=2, norm_num_groups=2, num_embeds_ada_norm=100,
    ).eval()  # fmt: skip
    data = {"latents": images(4), "class_labels": torch.tensor([0, 3, 5, 1])}
    task = Diffusion(ddpm(), timesteps=3)
    index = index_of(model, task, data, tmp_path / "i", method=DTRAK(), batch_size=2)
    assert stored(index).block(0, 0).abs().sum(1).min() > 0


def test_a_vae_in_front(tmp_path):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=2, block_out_channels=(4, 4), norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=8,
    ).eval()  # fmt: skip
    pixels = torch.rand(4, 3, 8, 8) * 2 - 1
    task = Diffusion(ddpm(), timesteps=3, vae=vae)
    latents = vae.encode(pixels).latent_dist.mean.detach() * vae.config.scaling_factor
    got = task.loss(toy(), {"images": pixels})
    torch.testing.assert_close(got, Diffusion(ddpm(), timesteps=3).loss(toy(), {"latents": latents}))


def test_bad_input():
    from diffusers import FlowMatchEulerDiscreteScheduler

    x = images(2)
    refused(r"FlowMatch.* has no training timesteps", Diffusion, FlowMatchEulerDiscreteScheduler())
    refused(r"timesteps=101: expected 1 to 100", Diffusion, ddpm(), timesteps=101)
    refused(r"timesteps \[100\]", Diffusion, ddpm(), timesteps=[100])
    refused(r"prediction_type of the scheduler 'sample'", Diffusion, ddpm(prediction_type="sample"))
    task = Diffusion(ddpm(), timesteps=2)
    with pytest.raises(UndeError, match=r"Toy does not take condition.*unconditional model has no prompts"):
        task.loss(toy(), {"images": x, "condition": torch.zeros(2, 3)})
    with pytest.raises(UndeError, match=r"has 'prompts'.*no text_encoder"):
        task.loss(toy(), {"images": x, "prompts": torch.zeros(2, 3, dtype=torch.long)})
    with pytest.raises(UndeError, match=r"shape \(3, 4, 4\) for a model of 2 channels"):
        task.loss(unet(), {"latents": torch.zeros(2, 3, 4, 4), "encoder_hidden_states": torch.zeros(2, 5, 6)})
    refused(r"'images' or 'latents': this one has \['labels'\]", task.loss, toy(), {"labels": torch.zeros(2)})
    refused(r"images are torch.uint8", task.loss, toy(), torch.zeros(2, 2, 4, 4, dtype=torch.uint8))
    refused(r"measure of Diffusion 'cube'", task.measure, toy(), x, name="cube")
