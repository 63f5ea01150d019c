"""Perturbed copies: what changes, by how much, and what must stay as it is."""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import binom

import models
from refusals import refused
from unde import Index, UndeError
from unde.methods import JourneyTRAK
from unde.tasks import CausalLM, Classification, Diffusion, Task
from unde.tasks.perturb import Augment, InputNoise, Perturbation
from unde.tasks.replace import Replace, special_tokens


def random(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_more_noise_is_the_same_noise_taken_further():
    """With the same random numbers the differences to the original are proportional to the strength."""
    x = normal(3, 5, 7).double()  # doubles, so that the differences are exact to 15 digits
    weak, strong = (InputNoise()((x, 1), s, random(4))[0] - x for s in (0.25, 1.0))
    torch.testing.assert_close(4 * weak, strong, rtol=1e-12, atol=1e-12)
    expected = torch.from_numpy(random(4).standard_normal((3, 5, 7), dtype=np.float32)).double()
    torch.testing.assert_close(strong, expected * x.std(correction=0), rtol=1e-12, atol=1e-12)
    other = InputNoise()((x, 1), 1.0, random(5))[0] - x
    assert abs(np.corrcoef(other.flatten(), strong.flatten())[0, 1]) < 0.4


def test_noise_has_the_size_of_the_input():
    """Scaling an input scales its noise; where it lies does not matter; equal entries get noise all the same."""
    x = normal(40, 50).double()
    noise = InputNoise()(x, 0.3, random()) - x
    torch.testing.assert_close(
        InputNoise()(1e3 * x, 0.3, random()) - 1e3 * x, 1e3 * noise, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(InputNoise()(x + 7, 0.3, random()) - (x + 7), noise, rtol=1e-9, atol=1e-9)
    assert float(noise.std()) == pytest.approx(0.3 * float(x.std()), rel=0.05)
    flat = torch.full((4, 6), -2.0)
    assert float((InputNoise()(flat, 0.5, random()) - flat).std()) == pytest.approx(1.0, rel=0.4)
    assert torch.equal(InputNoise()(torch.zeros(5), 1.0, random()), torch.zeros(5))  # of no size at all
    assert InputNoise()(torch.tensor([3.0]), 0.5, random()).item() != 3.0  # a single number
    assert InputNoise()(torch.tensor(3.0), 0.5, random()).shape == ()


@pytest.mark.parametrize("target", ["labels", "label", "targets", "target", "y"])
def test_targets_of_a_dict_are_untouched(target):
    example = {"pixel_values": normal(2, 4), "scale": normal(3), "mask": torch.ones(4, dtype=torch.bool)}
    example |= {"words": "as they are", target: normal(3, seed=1)}
    made = InputNoise()(example, 0.5, random())
    assert list(made) == list(example)
    assert made[target] is example[target] and made["mask"] is example["mask"]
    assert made["words"] == "as they are"
    changed = [k for k in ("pixel_values", "scale") if not torch.equal(made[k], example[k])]
    assert changed == ["pixel_values", "scale"]


def test_targets_of_a_tuple_are_untouched():
    x, y = normal(4), normal(2)  # a regression: the target is a float
    made = InputNoise()((x, y, "name"), 0.5, random())
    assert type(made) is tuple and made[1] is y and made[2] == "name" and not torch.equal(made[0], x)
    listed = InputNoise()([{"a": x, "labels": y}, y], 0.5, random())
    assert type(listed) is list and listed[0]["labels"] is y and listed[1] is y
    assert not torch.equal(listed[0]["a"], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_types_and_shapes_stay(dtype):
    kind = InputNoise()
    x = normal(3, 4, 5).to(dtype)
    original = x.clone()
    made = kind((x, 3), 0.4, random())
    assert made[0].dtype == dtype and made[0].shape == x.shape and made[1] == 3
    assert torch.equal(x, original)  # not changed in place
    if dtype != torch.bfloat16:
        array = kind({"x": x.numpy()}, 0.4, random())["x"]
        assert isinstance(array, np.ndarray) and array.dtype == x.numpy().dtype
        assert np.array_equal(array, made[0].numpy())
    nested = OrderedDict(x=x, inner={"y": x, "z": x})
    made = kind(nested, 0.4, random())
    assert type(made) is OrderedDict and type(made["inner"]) is dict
    assert made["inner"]["y"] is x  # a target, also inside
    assert not torch.equal(made["inner"]["z"], x)


@pytest.mark.parametrize(
    "example", [(torch.arange(4), 1), {"ids": torch.arange(4), "y": torch.ones(2)}, "text", (), 3]
)
def test_inputs_without_floats_are_refused(example):
    with pytest.raises(UndeError, match=r"no floating inputs\. Pass perturb=.* or perturb='weights'"):
        InputNoise()(example, 0.5, random())


def text(seed=0, length=40, low=10, high=60):
    return random(seed).integers(low, high, length)


def test_replaced_positions_are_nested():
    """What a weak copy replaces a strong one replaces too, by the same tokens."""
    replace = Replace(np.arange(1000, 2000))
    for seed in range(10):
        ids, before = text(seed), None
        for strength in (0.05, 0.1, 0.3, 0.8, 1.0):
            made = replace({"input_ids": ids}, strength, random(seed))["input_ids"]
            changed = made != ids
            if before is not None:
                assert (changed | ~(before != ids)).all()
                assert (made[before != ids] == before[before != ids]).all()
            before = made
        assert (before != ids).all()  # at strength 1 all of them
        assert (before >= 1000).all()


def test_the_share_of_replaced_tokens_is_the_strength():
    replace, n = Replace(np.array([7])), 20_000
    for strength in (0.05, 0.5):
        made = replace({"input_ids": np.zeros(n, np.int64)}, strength, random(1))["input_ids"]
        low, high = binom.interval(0.999, n, strength)
        assert low <= (made == 7).sum() <= high


def test_replacements_come_from_the_corpus_as_often_as_they_occur():
    """The pool is what may be replaced: no special, padded or masked token of any example."""
    examples = [
        {"input_ids": [1, 5, 5, 5, 6, 2], "attention_mask": [1, 1, 1, 1, 1, 0]},
        {"input_ids": [1, 5, 8, 9, 0, 0], "attention_mask": [1, 1, 1, 1, 0, 0]},
        {"input_ids": [4, 4, 7], "labels": [-100, -100, 7], "attention_mask": [1, 1, 1]},
    ]
    replace = Replace.of(examples, special={1, 2})
    assert sorted(replace.pool.tolist()) == [5, 5, 5, 5, 6, 7, 8, 9]
    many = replace({"input_ids": np.full(8000, 3)}, 1.0, random())["input_ids"]
    assert set(many.tolist()) == {5, 6, 7, 8, 9}
    low, high = binom.interval(0.999, 8000, 0.5)
    assert low <= (many == 5).sum() <= high
    refused("all are special, padded or masked", Replace.of, [{"input_ids": [1, 2]}], special={1, 2})
    refused("no token of the training data can be replaced", Replace.of, [])


def test_special_tokens_padding_and_prompts_stay_and_labels_follow():
    ids = [1, 20, 21, 22, 23, 24, 2, 0, 0]
    mask = [1, 1, 1, 1, 1, 1, 1, 0, 0]
    labels = [-100, -100, 21, 22, 23, 24, 2, -100, -100]  # 20 belongs to a prompt
    example = {"input_ids": ids, "attention_mask": mask, "labels": labels, "source": "a book"}
    made = Replace(np.array([99]), frozenset({1, 2}))(example, 1.0, random())
    assert made["input_ids"] == [1, 20, 99, 99, 99, 99, 2, 0, 0]
    assert made["labels"] == [-100, -100, 99, 99, 99, 99, 2, -100, -100]
    assert made["attention_mask"] is mask and made["source"] == "a book"
    assert example["input_ids"] == ids and labels[2] == 21  # the original is as it was


def test_a_label_of_the_whole_text_stays():
    example = {"input_ids": text(), "labels": 12}
    made = Replace(np.array([99]))(example, 1.0, random())
    assert made["labels"] == 12 and (made["input_ids"] == 99).all()
    one = {"input_ids": [12], "labels": [12]}  # a text of one token has a label for it
    assert Replace(np.array([99]))(one, 1.0, random())["labels"] == [99]


@pytest.mark.parametrize(
    "cast",
    [
        np.ndarray.tolist,
        lambda x: x.astype(np.int32),
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x).int(),
    ],
    ids=["list", "int32 array", "tensor", "int32 tensor"],
)
def test_token_types_stay(cast):
    example = {
        "input_ids": cast(text()),
        "labels": cast(text()),
        "attention_mask": cast(np.ones(40, np.int64)),
    }
    made = Replace(np.array([99]))(example, 0.5, random())
    for key in example:
        assert type(made[key]) is type(example[key])
        assert getattr(made[key], "dtype", None) == getattr(example[key], "dtype", None)
        assert len(made[key]) == 40
    assert [int(t) for t in made["labels"]] == [int(t) for t in made["input_ids"]]
    assert type(made["input_ids"][0]) is type(example["input_ids"][0])


def test_special_tokens_of_a_config():
    config = SimpleNamespace(bos_token_id=0, eos_token_id=[1, 2], pad_token_id=None, mask_token_id=4)
    assert special_tokens(SimpleNamespace(config=config)) == {0, 1, 2, 4}
    assert special_tokens(torch.nn.Linear(1, 1)) == frozenset()
    assert special_tokens(models.gpt2()) == {0}


def test_what_tasks_know():
    images = [(normal(4), 1)]
    texts = [{"input_ids": [0, 5, 6]}]
    assert [k.name for k in Classification().perturbations(models.mlp(), images)] == ["noise"]
    (replace,) = Classification().perturbations(models.gpt2(), texts)
    assert isinstance(replace, Replace) and replace.special == {0} and replace.pool.tolist() == [5, 6]
    (replace,) = CausalLM().perturbations(models.gpt2(), texts)
    assert isinstance(replace, Replace) and replace.special == {0} and replace.pool.tolist() == [5, 6]
    assert isinstance(Task().perturbations(models.mlp(), images)[0], InputNoise)
    for kind in (InputNoise(), replace, Augment()):
        assert isinstance(kind, Perturbation) and 0 < kind.least < kind.most
    assert not isinstance(lambda example, strength, random: example, Perturbation)


@pytest.mark.parametrize("channels", [1, 3, 12])
@pytest.mark.parametrize("strength", [0.05, 0.5, 1.0])
def test_augmented_images(channels, strength):
    image = normal(channels, 16, 12).clamp(-1, 1)
    made = Augment()(image, strength, random(2))
    assert made.shape == image.shape and made.dtype == image.dtype
    assert made.abs().max() <= 1.0 + 1e-6
    assert strength < 0.5 or not torch.equal(made, image)  # a weak one may keep all of a small image
    assert torch.equal(made, Augment()(image, strength, random(2)))
    for form in ((image,), [image], {"images": image, "class_labels": 3}):
        again = Augment()(form, strength, random(2))
        assert type(again) is type(form)
        got = again["images"] if isinstance(again, dict) else again[0]
        assert torch.equal(got, made)
    assert again["class_labels"] == 3
    half = Augment()(image.half(), strength, random(2))
    assert half.dtype == torch.float16


def test_only_images_of_three_channels_are_recoloured():
    """A flat image stays what it is under flips and crops, so that only its colours tell."""
    flat = torch.full((3, 8, 8), 0.3)
    flat[1] = -0.4
    coloured = Augment()(flat, 1.0, random(1))
    assert (coloured - flat).abs().max() > 0.02
    torch.testing.assert_close(coloured, coloured[:, :1, :1].expand(3, 8, 8))
    for channels in (1, 12):
        other = torch.linspace(-1, 1, channels).view(-1, 1, 1).expand(channels, 8, 8)
        torch.testing.assert_close(Augment()(other, 1.0, random(1)), other)


def test_draws_are_the_same_at_every_strength():
    """More strength: a smaller part about the same place, more of the same colours, mirrored from one strength on."""
    rows = torch.linspace(-1, 1, 64).view(1, 1, 64)
    ramp = torch.cat(
        [rows.expand(1, 64, 64), rows.transpose(1, 2).expand(1, 64, 64)]
    )  # where a pixel came from
    for seed in range(30):
        before = None
        for strength in (0.1, 0.4, 0.7, 1.0):
            made = Augment()(ramp, strength, random(seed))
            mirrored = bool(made[0, 0, 0] > made[0, 0, -1])
            assert mirrored == (random(seed).random(9)[0] < strength / 2)
            spans = torch.stack([made.flatten(1).amin(1), made.flatten(1).amax(1)])  # (2 ends, 2 axes)
            area = float((spans[1] - spans[0]).prod()) / 4
            assert area >= 1 - 0.75 * strength - 0.12  # resampling takes half a pixel from each end
            if before is not None:
                assert area <= before[0] + 0.05
            before = (area, mirrored)
    assert {bool(random(s).random(9)[0] < 0.5) for s in range(30)} == {True, False}
    grey = torch.zeros(3, 4, 4)  # brightness 0.5, which a factor of the strength changes alone
    for seed in range(5):
        weak, strong = (Augment()(grey, s, random(seed))[0, 0, 0] for s in (0.25, 1.0))
        torch.testing.assert_close(4 * weak, strong, rtol=1e-4, atol=1e-6)


class FakeVAE(torch.nn.Module):
    """Images of twice the size: every latent pixel becomes four, and a mean brings them back."""

    def __init__(self):
        super().__init__()
        self.home = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.config = SimpleNamespace(scaling_factor=0.5)
        self.calls = []

    def decode(self, latents):
        self.calls.append(("decode", tuple(latents.shape)))
        return SimpleNamespace(sample=latents.repeat_interleave(2, -1).repeat_interleave(2, -2) / 4)

    def encode(self, images):
        self.calls.append(("encode", tuple(images.shape)))
        mean = 4 * torch.nn.functional.avg_pool2d(images, 2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean))


def test_latents_are_augmented_as_images_by_the_vae():
    vae = FakeVAE()
    augment, noise = Diffusion(ddpm(), timesteps=2, vae=vae).perturbations(torch.nn.Identity(), [])
    assert isinstance(noise, InputNoise)
    given = normal(7, 5)
    example = {"latents": normal(3, 8, 8).clamp(-1, 1), "encoder_hidden_states": given, "prompt": "a hat"}
    made = augment(example, 0.6, random(3))
    assert vae.calls == [("decode", (1, 3, 8, 8)), ("encode", (1, 3, 16, 16))]
    assert made["encoder_hidden_states"] is given and made["prompt"] == "a hat"
    assert made["latents"].dtype == torch.float32 and made["latents"].shape == (3, 8, 8)
    by_hand = Augment()(vae.decode(example["latents"][None] / 0.5).sample[0], 0.6, random(3))
    expected = 0.5 * vae.encode(by_hand[None]).latent_dist.mean[0]
    torch.testing.assert_close(made["latents"], expected)
    images = augment({"images": example["latents"]}, 0.6, random(3))  # nothing to decode
    assert len(vae.calls) == 4
    torch.testing.assert_close(images["images"], Augment()(example["latents"], 0.6, random(3)))


@pytest.mark.parametrize("channels", [3, 4])
def test_latents_without_a_vae_are_cropped_and_mirrored_as_they_are(channels):
    """Three channels of latents are no colours, and need not lie within ± 1."""
    flat = torch.tensor([2.5, -1.5, 0.5, 3.0])[:channels].view(-1, 1, 1).expand(channels, 8, 8)
    made = Augment()({"latents": flat}, 1.0, random(1))["latents"]
    torch.testing.assert_close(made, flat)
    varied = normal(channels, 8, 8)
    assert not torch.equal(Augment()({"latents": varied}, 1.0, random(2))["latents"], varied)


def test_arrays_of_images_stay_arrays():
    image = normal(3, 8, 8).clamp(-1, 1)
    expected = Augment()(image, 0.7, random())
    made = Augment()({"images": image.numpy(), "class_labels": 1}, 0.7, random())["images"]
    assert isinstance(made, np.ndarray) and np.array_equal(made, expected.numpy())
    made = Augment()(image.numpy(), 0.7, random())
    assert isinstance(made, np.ndarray) and np.array_equal(made, expected.numpy())


def test_other_examples_are_refused():
    with pytest.raises(UndeError, match=r"has 'images' or 'latents': this one has \['pixels'\]"):
        Augment()({"pixels": normal(3, 4, 4)}, 0.5, random())
    refused("has 'images' or 'latents': this one has tuple", Augment(), (normal(3, 4, 4), 1), 0.5, random())


def ddpm():
    from diffusers import DDPMScheduler

    return DDPMScheduler(num_train_timesteps=100, clip_sample=False)


class Denoiser(torch.nn.Module):
    def __init__(self, condition=False):
        super().__init__()
        self.body = torch.nn.Conv2d(2, 2, 3, padding=1)
        self.given = torch.nn.Linear(3, 2) if condition else None

    def forward(self, sample, timestep, **given):
        made = self.body(sample) * (1 + timestep.view(-1, 1, 1, 1) / 100)
        return made if self.given is None else made + self.given(given["condition"])[:, :, None, None]


def test_a_journey_is_one_noise_at_the_timesteps_of_the_sampler():
    from diffusers import DDIMScheduler

    task, image, given = Diffusion(ddpm(), timesteps=4), normal(2, 4, 4).clamp(-1, 1), normal(3, seed=1)
    journey = task.journey({"images": image, "condition": given}, 5, random(6))
    sampler = DDIMScheduler.from_config(ddpm().config)
    sampler.set_timesteps(5)
    assert journey["timesteps"].tolist() == sampler.timesteps.tolist()
    assert journey["trajectory"].shape == (5, 2, 4, 4)
    assert torch.equal(journey["latents"], image) and torch.equal(journey["condition"], given)
    noise = torch.from_numpy(random(6).standard_normal((1, 2, 4, 4), dtype=np.float32))[0]
    for x, t in zip(journey["trajectory"], sampler.timesteps):
        a = ddpm().alphas_cumprod[t]
        torch.testing.assert_close(x, a.sqrt() * image + (1 - a).sqrt() * noise, rtol=1e-5, atol=1e-6)
    bare = task.journey(image, 5, random(6))
    assert torch.equal(bare["trajectory"], journey["trajectory"]) and "condition" not in bare


@pytest.mark.parametrize("training", ["averaged", "per-step"])
def test_journeys_are_queries_of_journey_trak(tmp_path, training):
    torch.manual_seed(0)
    model, task = Denoiser(condition=True).eval(), Diffusion(ddpm(), timesteps=4)
    x, given = normal(9, 2, 4, 4), normal(9, 3, seed=1)
    method = JourneyTRAK(training=training, inference_steps=3, projection="none")
    data = {"images": x, "condition": given}
    index = Index.build(model, task, data, tmp_path / "i", method=method, progress=False)
    queries = [method.query(task, {"images": x[i], "condition": given[i]}, random(i)) for i in range(4)]
    scores = index.score(queries).total()
    assert scores.shape == (4, 9) and scores.isfinite().all()
    assert (scores.argmax(1) == torch.arange(4)).sum() >= 2  # images find themselves
    other = [task.journey({"images": x[i], "condition": given[i]}, 4, random(i)) for i in range(4)]
    if training == "per-step":
        refused("4 steps for an index of 3", index.score, other)
