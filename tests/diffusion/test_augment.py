"""Each operation against Pillow or colorsys; what is drawn against (seed, key)."""

import colorsys

import numpy as np
import pytest
import torch
from experiments.shared import augment as augmenting
from PIL import Image, ImageEnhance

from unde import learn_weights
from unde.scoring.arrays import ArrayScores
from unde.tasks import perturb as module

rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, size=(21, 17, 3), dtype=np.uint8)
PIXELS[:, :, 2] //= 3  # yellowish, so that its mean is not its grey
PIXELS[0] = 77  # a row of grey
X = torch.from_numpy(PIXELS).permute(2, 0, 1) / 255
IMAGES = torch.tensor(rng.uniform(-1, 1, size=(6, 3, 12, 10)), dtype=torch.float32)


def levels(x):
    """(H, W, 3) on the scale of a byte."""
    return 255 * x.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.5])
@pytest.mark.parametrize(
    ("operation", "twin", "rounding"),
    [
        (module.brightness, ImageEnhance.Brightness, 1),
        (module.saturation, ImageEnhance.Color, 1.5),  # Pillow rounds the grey to a byte, and then the result
        (module.contrast, ImageEnhance.Contrast, 1.5),
    ],
)
def test_light_and_colour_are_those_of_pillow(operation, twin, rounding, factor):
    expected = np.asarray(twin(Image.fromarray(PIXELS)).enhance(factor), dtype=np.float64)
    np.testing.assert_allclose(levels(operation(X, factor)), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("box", [(0, 0, 21, 17), (3, 5, 9, 7), (20, 16, 1, 1), (0, 2, 21, 4)])
def test_crops_are_resized_as_by_pillow(box):
    top, left, height, width = box
    planes = [Image.fromarray(plane.numpy()) for plane in X]  # of floats, which are not rounded
    assert planes[0].mode == "F"
    cut = [p.crop((left, top, left + width, top + height)) for p in planes]
    expected = np.stack([np.asarray(p.resize((17, 21), Image.Resampling.BILINEAR)) for p in cut])
    np.testing.assert_allclose(module.resized_crop(X, *box), expected, atol=1e-6)


@pytest.mark.parametrize("turn", [0.0, 0.04, -0.05, 0.31, 0.5, -0.5])
def test_hues_are_those_of_colorsys(turn):
    np.testing.assert_allclose(
        module.turn_hue(X, turn).permute(1, 2, 0), turned(PIXELS / 255, turn), atol=1e-5
    )


def turned(pixels, turn):
    """(H, W, 3), one pixel at a time."""

    def one(pixel):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)

    return np.array([[one(pixel) for pixel in row] for row in pixels])


@pytest.mark.parametrize("key", range(8))
def test_all_of_it_step_by_step_in_pillow(key):
    u = np.random.Generator(np.random.Philox(np.random.SeedSequence(2, spawn_key=(key,)))).random(9)
    top, left, height, width = module.crop_box(21, 17, 0.3, u[1:5])
    image = Image.fromarray(PIXELS)
    if u[0] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = image.crop((left, top, left + width, top + height)).resize((17, 21), Image.Resampling.BILINEAR)
    for enhance, draw in zip((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), u[5:8]):
        image = enhance(image).enhance(0.6 + 0.8 * draw)
    expected = 255 * turned(np.asarray(image) / 255, 0.1 * (2 * u[8] - 1))
    found = augmenting.augment(2 * X[None] - 1, [key], seed=2, crop=0.3, jitter=0.4, hue=0.1)[0] / 2 + 0.5
    off_by = np.abs(levels(found) - expected)  # Pillow rounds to bytes five times, and stretches that
    assert np.quantile(off_by, 0.99) < 4 and off_by.max() < 20


def off(**options):
    return {"flip": False, "crop": 1.0, "jitter": 0.0, "hue": 0.0} | options


def test_nothing_changes_when_all_is_off():
    torch.testing.assert_close(
        augmenting.augment(IMAGES, **off()), IMAGES, rtol=0, atol=5e-6
    )  # rounding, there and back


def test_half_of_the_images_are_mirrored():
    many = IMAGES[:1].expand(400, -1, -1, -1)
    found = augmenting.augment(many, **off(flip=True))
    mirrored = (found - IMAGES[0].flip(2)).abs().amax((1, 2, 3)) < 1e-5
    same = (found - IMAGES[0]).abs().amax((1, 2, 3)) < 1e-5
    assert (mirrored ^ same).all()
    assert abs(int(mirrored.sum()) - 200) < 5 * 10  # ± √(400 / 4)


def test_crops_fit_and_keep_their_share_of_the_area():
    height, width, least = 300, 500, 0.4
    boxes = np.array(
        [module.crop_box(height, width, least, augmenting.uniform(1, key)[1:5]) for key in range(2000)]
    )
    top, left, tall, wide = boxes.T
    assert (
        top.min() == 0 and (top + tall).max() == height and left.min() == 0 and (left + wide).max() == width
    )
    area, shape = tall * wide / (height * width), (wide / width) / (tall / height)
    assert area.min() > least - 0.01 and area.max() <= 1
    assert abs(area.mean() - (1 + least) / 2) < 5 * (1 - least) / np.sqrt(12 * 2000) + 0.005  # evenly spread
    assert shape.min() > 3 / 4 - 0.01 and shape.max() < 4 / 3 + 0.01
    assert abs(np.log(shape).mean()) < 0.02  # as often wide as tall
    assert abs((top / (height - tall).clip(1)).mean() - 0.5) < 0.03
    assert abs((left / (width - wide).clip(1)).mean() - 0.5) < 0.03


@pytest.mark.parametrize("option", ["jitter", "hue"])
def test_strengths_are_bounds(option):
    """Grey or single-coloured images, from which the factor can be read off."""
    grey = torch.full((3000, 3, 2, 2), -0.5)
    if option == "jitter":  # a flat grey keeps its contrast and saturation: 0.25 · factor remains
        factor = (augmenting.augment(grey, **off(jitter=0.3))[:, 0, 0, 0] / 2 + 0.5) / 0.25 - 1
        bound = 0.3
    else:
        red = grey.clone()
        red[:, 0], red[:, 1:] = 1.0, -1.0
        found = augmenting.augment(red, **off(hue=0.1))[:, :, 0, 0].double() / 2 + 0.5
        factor = torch.tensor([(colorsys.rgb_to_hsv(*rgb)[0] + 0.5) % 1 - 0.5 for rgb in found.tolist()])
        bound = 0.1
    assert factor.abs().max() <= bound + 1e-5
    assert factor.min() < -0.97 * bound and factor.max() > 0.97 * bound
    assert abs(factor.mean()) < 5 * bound / np.sqrt(3 * 3000)


def test_each_factor_is_drawn_for_itself():
    u = np.stack([augmenting.uniform(0, key) for key in range(4000)])
    assert np.abs(np.corrcoef(u.T) - np.eye(module.DRAWS)).max() < 5 / np.sqrt(4000)
    assert u.min() >= 0 and u.max() < 1


def test_an_image_does_not_depend_on_its_batch():
    keys = [40, 3, 7, 3, 0, 12]
    together = augmenting.augment(IMAGES, keys, seed=5)
    for i, key in enumerate(keys):
        assert torch.equal(
            together[i : i + 1], augmenting.augment(IMAGES[i : i + 1], torch.tensor([key]), seed=5)
        )
    assert torch.equal(augmenting.augment(IMAGES), augmenting.augment(IMAGES, range(6)))
    same = augmenting.augment(IMAGES[:1].expand(3, -1, -1, -1), [8, 9, 8])
    assert torch.equal(same[0], same[2]) and not torch.equal(same[0], same[1])
    assert not torch.equal(augmenting.augment(IMAGES), augmenting.augment(IMAGES, seed=1))


def test_it_is_in_range_of_the_same_type_and_leaves_the_world_alone():
    before, state = IMAGES.clone(), torch.get_rng_state()
    found = augmenting.augment(IMAGES.bfloat16(), jitter=1.0, hue=0.5)
    assert found.dtype == torch.bfloat16 and found.shape == IMAGES.shape
    assert found.min() >= -1 and found.max() <= 1
    assert torch.equal(IMAGES, before) and torch.equal(torch.get_rng_state(), state)


def test_the_numbers_are_those_of_numpy():
    stream = np.random.Philox(np.random.SeedSequence(3, spawn_key=(11,)))
    np.testing.assert_array_equal(augmenting.uniform(3, 11), np.random.Generator(stream).random(module.DRAWS))


def test_supervised_weights_from_changed_images():
    """Of two groups, one knows an image by its coarse shape and one is noise: the first must get the weight."""
    g = torch.Generator().manual_seed(0)
    coarse = torch.nn.functional.interpolate(
        torch.rand(40, 3, 2, 2, generator=g), size=(16, 16), mode="nearest"
    )
    images, positives = 2 * coarse - 1, torch.arange(0, 40, 2)
    queries = augmenting.augment(images[positives], positives)
    known = torch.einsum("qd,nd->qn", queries.flatten(1), images.flatten(1)) / 100
    noise = torch.randn(known.shape, generator=g)
    scores = ArrayScores(torch.stack([known, noise], 2), ["known", "noise"])
    w = learn_weights(scores, objective="supervised", positives=positives, weight_decay=0.0)
    assert w.values[0] > 1.5
