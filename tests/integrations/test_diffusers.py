"""Stable Diffusion pipelines against diffusers' own, on ones so small that a test can afford them."""

import numpy as np
import pytest
import sd_toy
import torch
from sd_toy import PROMPTS, SIDE, TOKENS, WIDTH, ddim, pixels, trained, unet

import toy
from refusals import refused
from unde import Index, UndeError
from unde.data import Rows, digest
from unde.integrations.diffusers import (
    Repeated,
    add_lora,
    diffusion_setup,
    encode_images,
    encode_prompts,
    query_columns,
    sample_pipeline,
    training_scheduler,
)

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def pipeline(saved):
    return sd_toy.load(saved)


@pytest.mark.parametrize("scheduler", ["ddim", "pndm", "unsaid", "v"])
def test_samples_are_those_of_the_pipeline(pipeline, scheduler):
    """The same initial latents, 5 steps of DDIM, guidance of 7.5, with LoRA in place."""
    from diffusers import DDIMScheduler, PNDMScheduler

    trained(pipeline)
    config = ddim().config
    if scheduler == "pndm":  # what Stable Diffusion 1 comes with
        pipeline.scheduler = PNDMScheduler.from_config({**config, "skip_prk_steps": True})
    if scheduler == "unsaid":  # a config that does not mention clipping
        pipeline.scheduler = PNDMScheduler(beta_schedule="scaled_linear", steps_offset=1)
    if scheduler == "v":
        pipeline.scheduler = ddim(prediction_type="v_prediction", timestep_spacing="trailing")
    ours = sample_pipeline(pipeline, PROMPTS, [3, 1, 4, 5], steps=5, batch_size=3, progress=False)
    assert ours.prompts == PROMPTS and ours.seeds == [3, 1, 4, 5]
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, clip_sample=False)
    path = []
    theirs = pipeline(
        PROMPTS,
        num_inference_steps=5,
        guidance_scale=7.5,
        latents=ours.trajectory[:, 0].clone(),
        output_type="latent",
        callback_on_step_end=lambda _p, _i, t, had: path.append((int(t), had["latents"])) or had,
    ).images
    scale = float(theirs.abs().max())
    assert scale > 1.5  # or clipping would not show
    torch.testing.assert_close(ours.latents, theirs, rtol=1e-4, atol=1e-5 * scale)
    assert ours.timesteps[0].tolist() == [t for t, _ in path]
    torch.testing.assert_close(ours.trajectory[:, 3], path[2][1], rtol=1e-4, atol=1e-5 * scale)
    images = pipeline.vae.decode(theirs / pipeline.vae.config.scaling_factor).sample
    torch.testing.assert_close(
        ours.images(pipeline.vae), (images / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-5
    )


def test_without_guidance_and_of_another_size(pipeline):
    ours = sample_pipeline(pipeline, "a fish", [1, 2], steps=3, guidance=1, size=16, progress=False)
    assert ours.latents.shape == (2, 4, 8, 8)
    theirs = pipeline(
        ["a fish"] * 2, num_inference_steps=3, guidance_scale=1, latents=ours.trajectory[:, 0].clone(),
        height=16, width=16, output_type="latent",
    ).images  # fmt: skip
    torch.testing.assert_close(ours.latents, theirs, rtol=1e-4, atol=1e-5)


def test_encodings(pipeline):
    long = "a very long prompt about a red cat"
    ids = pipeline.tokenizer(
        [*PROMPTS, long], padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        want = pipeline.text_encoder(ids)[0]
        pipeline.text_encoder.train()
        got = encode_prompts(pipeline, [*PROMPTS, long], batch_size=2)
    assert pipeline.text_encoder.training  # as it was
    torch.testing.assert_close(got, want)
    x = pixels(5).float() / 127.5 - 1
    want = pipeline.vae.encode(x).latent_dist.mean * pipeline.vae.config.scaling_factor
    torch.testing.assert_close(encode_images(pipeline, x, batch_size=2), want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(encode_images(pipeline, pixels(5)), want, rtol=1e-4, atol=1e-6)
    from PIL import Image

    pictures = [Image.fromarray(np.asarray(p.permute(1, 2, 0))) for p in pixels(5)]
    torch.testing.assert_close(encode_images(pipeline, pictures), want, rtol=1e-4, atol=1e-6)


def test_encoders_in_half_precision(pipeline):
    """The UNet stays in float32, and so does what is handed to it."""
    samples = sample_pipeline(pipeline, PROMPTS[:2], [1, 2], steps=2, progress=False)
    want = encode_images(pipeline, pixels()), encode_prompts(pipeline, PROMPTS), samples.images(pipeline.vae)
    pipeline.vae.to(torch.bfloat16)
    pipeline.text_encoder.to(torch.bfloat16)
    got = encode_images(pipeline, pixels()), encode_prompts(pipeline, PROMPTS), samples.images(pipeline.vae)
    for a, b in zip(got, want):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0.05 * float(b.abs().max()))
    setup = diffusion_setup(pipeline, pixels(), PROMPTS, timesteps=2, eval_queries=samples)
    shown = setup.show(Rows(setup.eval_queries)[0])["image"]
    torch.testing.assert_close(shown, got[2][0], rtol=0, atol=0.02)


def test_features_are_gradients_of_lora(pipeline, tmp_path):
    from unde.methods import DTRAK

    setup = diffusion_setup(trained(pipeline), pixels(), PROMPTS, timesteps=[1, 501], rows=3)
    index = Index.build(
        setup.model, setup.task, setup.train_data, tmp_path / "i", method=DTRAK(projection="none"), batch_size=2,
        groups="tensor", progress=False,
    )  # fmt: skip
    parameters = [p for p in pipeline.unet.parameters() if p.requires_grad]
    assert len(index.groups) == len(parameters)
    assert all("lora_" in name for name in index.groups.names)
    given, latents = encode_prompts(pipeline, PROMPTS), encode_images(pipeline, pixels())
    alphas = ddim().alphas_cumprod
    for i in range(4):
        value = torch.zeros(())
        for t in (1, 501):
            noise = setup.task.noise(digest(latents[i]), [t], latents[i].shape)
            noisy = alphas[t].sqrt() * latents[i] + (1 - alphas[t]).sqrt() * noise
            value = value + pipeline.unet(noisy, t, given[i : i + 1]).sample.square().mean() / 2
        want = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])
        torch.testing.assert_close(
            toy.stored(index).block(0, 0)[i], want, rtol=1e-3, atol=1e-5 * float(want.abs().max())
        )


def test_a_setup_with_queries_and_what_a_page_shows(pipeline, tmp_path):
    trained(pipeline)
    learn, evaluate = (
        sample_pipeline(pipeline, "a dog", seeds, steps=2, progress=False) for seeds in ([0, 1], [2])
    )
    names = ["a.png", "b.png", "c.png", "d.png"]
    setup = diffusion_setup(
        pipeline, pixels(), PROMPTS, timesteps=2, ids=names, learn_queries=learn, eval_queries=evaluate
    )
    assert setup.ids == names
    assert torch.equal(setup.eval_queries["latents"], evaluate.latents)
    assert setup.eval_queries["text"] == ["a dog"]
    assert set(query_columns(evaluate, journey=True)) >= {"trajectory", "timesteps"}
    shown = setup.show(Rows(setup.eval_queries)[0])
    assert shown["prompt"] == "a dog"
    torch.testing.assert_close(shown["image"], evaluate.images(pipeline.vae)[0])
    assert setup.show(Rows(setup.train_data)[3])["prompt"] == "a fish"
    with pytest.raises(UndeError, match=r"seeds \[2\] serve another role"):
        diffusion_setup(pipeline, pixels(), PROMPTS, learn_queries=evaluate, eval_queries=evaluate)


def test_a_pipeline_without_prompts(tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=SIDE, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    pipeline = DDPMPipeline(model, DDPMScheduler())
    setup = diffusion_setup(pipeline, pixels(), timesteps=2)
    assert torch.equal(setup.train_data["latents"], pixels() / 127.5 - 1)
    assert training_scheduler(pipeline).config.clip_sample  # images stay in their range
    made = sample_pipeline(pipeline, None, [1, 2], steps=2, progress=False)
    assert float(made.latents.abs().max()) <= 1
    index = Index.build(setup.model, setup.task, setup.train_data, tmp_path / "i", progress=False)
    assert index.score(made.queries()).total().isfinite().all()
    with pytest.raises(UndeError, match="prompts for DDPMPipeline, which has no text encoder"):
        diffusion_setup(pipeline, pixels(), PROMPTS)
    refused("prompts for DDPMPipeline", sample_pipeline, pipeline, "a cat", [1])


def test_lora_starts_as_the_model_itself(pipeline):
    x, given = torch.randn(1, 4, 4, 4), torch.randn(1, TOKENS, WIDTH)
    state = torch.get_rng_state()
    with torch.no_grad():
        before = pipeline.unet(x, 5, given).sample
        found = add_lora(pipeline.unet, 3, seed=1)
        torch.testing.assert_close(pipeline.unet(x, 5, given).sample, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert {3} == {min(p.shape) for p in found}
    assert {id(p) for p in found} == {id(p) for n, p in pipeline.unet.named_parameters() if "lora_" in n}
    again = add_lora(unet(), 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    assert not torch.equal(add_lora(unet(), 3, seed=2)[0], found[0])
    refused("has LoRA layers already", add_lora, pipeline.unet, 3)
    refused("rank is 0: expected at least 1", add_lora, unet(), 0)


def test_nothing_to_attribute_with(pipeline):
    pipeline.unet.requires_grad_(False)
    with pytest.raises(UndeError, match=r"no trainable parameter.*put LoRA on it with add_lora"):
        diffusion_setup(pipeline, pixels(), PROMPTS)
    trained(pipeline).unet.requires_grad_(False)
    refused("its LoRA is frozen", diffusion_setup, pipeline, pixels(), PROMPTS)


def test_bad_prompts(pipeline):
    refused("4 prompts for 3 images", diffusion_setup, pipeline, pixels(3), PROMPTS)
    refused("one prompt for 4 images: expected a list", diffusion_setup, pipeline, pixels(), "a cat")
    refused("reads prompts: pass one for each image", diffusion_setup, pipeline, pixels())
    refused("4 prompts for 2 seeds", sample_pipeline, pipeline, PROMPTS, [1, 2])
    refused("pass one for each seed", sample_pipeline, pipeline, None, [1, 2])
    refused("a prompt is int: expected strings", encode_prompts, pipeline, ["a", 3])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (pixels().float(), r"images 0 to 3 reach from \d+ to \d+: expected \[−1, 1\]"),
        (pixels() / 255, r"this looks like \[0, 1\], expected \[−1, 1\] \(2 \* images − 1\)"),
        (torch.full((4, 3, 8, 8), torch.nan), "reach from nan to nan"),
        (pixels()[:, :1], r"torch.uint8 and shape \(N, 1, 8, 8\): expected .* \(N, 3, H, W\)"),
        (pixels()[..., 1:], r"shape \(N, 3, 8, 7\): expected .*, sides multiples of 2"),
        (pixels().permute(0, 2, 3, 1), r"shape \(N, 8, 8, 3\): expected"),
        (pixels().long(), r"torch.int64 and shape"),
        ([*pixels(3), pixels(1)[0, :, :4]], r"image 3 is \(3, 4, 8\), those before it \(3, 8, 8\)"),
        (["a.png"] * 4, "an image is str: expected"),
        ([], "there are no images"),
    ],
)
def test_bad_images(pipeline, images, message):
    refused(message, encode_images, pipeline, images)


def test_pipelines_that_are_not_covered(pipeline):
    from diffusers import FlowMatchEulerDiscreteScheduler

    refused("expected a multiple of 2", sample_pipeline, pipeline, "a", [1], size=7)
    pipeline.unet.half()
    refused(r"the UNet is in torch.float16.*torch_dtype=torch.float32", sample_pipeline, pipeline, "a", [1])
    pipeline.unet.float()
    pipeline.unet.register_to_config(addition_embed_type="text_time")
    refused("as Stable Diffusion XL", sample_pipeline, pipeline, "a", [1])
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    refused(r"flow matching .* is not covered", training_scheduler, pipeline)
    pipeline.unet = None
    refused("has no UNet", sample_pipeline, pipeline, "a", [1])


def test_repeated_rows_are_held_once():
    column = Repeated(torch.eye(2), torch.tensor([1, 0, 1]))
    assert column[:].tolist() == [[0, 1], [1, 0], [0, 1]] and len(column) == 3
