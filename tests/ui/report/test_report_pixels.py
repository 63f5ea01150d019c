"""Pictures: what a decoder reads back is what was given."""

import base64
import io
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from refusals import refused
from unde.ui.report.pixels import data_uri, encode_png, to_pixels

Image = pytest.importorskip("PIL.Image")


def decode_png(data: bytes) -> np.ndarray:
    """As Pillow does, which refuses a chunk whose checksum is wrong."""
    with Image.open(io.BytesIO(data)) as read:
        pixels = np.asarray(read)
        assert read.format == "PNG" and read.mode in ("L", "RGB", "RGBA")
    return pixels.reshape(*pixels.shape[:2], -1)


def photograph(height: int, width: int, channels: int) -> np.ndarray:
    """Smooth with some noise, so that the encoder chooses filters."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 3, (height, width, channels))
    return ((2 * x + 3 * y)[:, :, None] + 20 * np.arange(channels) + noise).astype(np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    arrays(
        np.uint8,
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4])),
        fill=st.nothing(),
    )
)
def test_any_pixels_come_back(pixels):
    assert np.array_equal(decode_png(encode_png(pixels)), pixels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_filtered_pictures_come_back_and_are_smaller(channels):
    pixels = photograph(64, 48, channels)
    data = encode_png(pixels)
    assert np.array_equal(decode_png(data), pixels)
    unfiltered = zlib.compress(np.insert(pixels.reshape(64, -1), 0, 0, axis=1).tobytes(), 9)
    assert len(data) < 0.8 * len(unfiltered)


def test_the_row_above_is_used_where_it_says_most():
    columns = np.random.default_rng(0).integers(0, 200, 64)
    pixels = (columns + np.arange(64)[:, None]).astype(np.uint8)[:, :, None]  # each row the last one plus one
    data = encode_png(pixels)
    assert np.array_equal(decode_png(data), pixels)
    assert len(data) < 300


def test_data_uri_holds_the_png():
    pixels = photograph(5, 4, 3)
    head, _, body = data_uri(pixels).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body) == encode_png(pixels)


def test_shapes_are_understood():
    grey, colour = photograph(6, 5, 1), photograph(6, 5, 3)
    assert np.array_equal(to_pixels(grey[..., 0]), grey)
    assert np.array_equal(to_pixels(colour), colour)
    assert np.array_equal(to_pixels(np.moveaxis(colour, 2, 0)), colour)
    assert np.array_equal(to_pixels(torch.from_numpy(np.moveaxis(colour, 2, 0).copy())), colour)
    assert np.array_equal(to_pixels(torch.from_numpy(grey[..., 0])), grey)


def test_where_both_readings_fit_tensors_are_channels_first():
    cube = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    assert np.array_equal(to_pixels(cube), cube)
    assert np.array_equal(to_pixels(torch.from_numpy(cube)), np.moveaxis(cube, 0, 2))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]]), [0, 128, 255]),
        (np.array([[0.2, 0.4]]), [51, 102]),  # inside [0, 1] nothing is stretched
        (np.array([[-1.0, 0.0, 1.0]]), [0, 128, 255]),
        (np.array([[0.0, 51.0, 255.0]]), [0, 51, 255]),
        (np.array([[7.0, 7.0]]), [128, 128]),
        (np.array([[0, 16, 255]], dtype=np.int64), [0, 16, 255]),
        (np.array([[0, 65535]], dtype=np.uint16), [0, 255]),
        (np.array([[False, True]]), [0, 255]),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True), [0, 255]),
        (torch.tensor([[0.0, 1.0]], dtype=torch.float16), [0, 255]),
    ],
)
def test_ranges(values, expected):
    assert to_pixels(values)[0, :, 0].tolist() == expected


def test_a_stretch_leaves_alpha_alone():
    pixels = to_pixels(np.array([[[-1.0, 0.0, 1.0, 0.2]]]))
    assert pixels[0, 0].tolist() == [0, 128, 255, 51]


def test_the_given_array_is_not_changed():
    values = np.array([[-3.0, 5.0]])
    to_pixels(values)
    assert values.tolist() == [[-3.0, 5.0]]


def test_shrinking_averages_areas():
    pixels = np.zeros((4, 6, 1), np.uint8)
    pixels[:2, :2] = [[[0], [100]], [[100], [200]]]
    pixels[2:, 4:] = 60
    small = to_pixels(pixels, max_side=3)
    assert small[..., 0].tolist() == [[100, 0, 0], [0, 0, 60]]
    assert to_pixels(pixels, max_side=6) is pixels


@pytest.mark.parametrize(
    ("shape", "small"), [((500, 400), (192, 154)), ((1000, 2), (192, 1)), ((193, 193), (192, 192))]
)
def test_shrunk_shapes(shape, small):
    constant = np.full((*shape, 3), 77, np.uint8)
    shrunk = to_pixels(constant, max_side=192)
    assert shrunk.shape == (*small, 3)
    assert (shrunk == 77).all()


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (np.zeros((2, 3, 5)), r"\(2, 3, 5\).*expected \(H, W\)"),
        (np.zeros(4), r"\(4,\)"),
        (np.zeros((0, 3)), "at least one pixel"),
        (np.array([["a", "b"]]), "must hold numbers"),
        (np.array([[np.nan, 0.0]]), "NaN"),
    ],
)
def test_what_is_not_an_image_is_refused(image, says):
    refused(says, to_pixels, image)
