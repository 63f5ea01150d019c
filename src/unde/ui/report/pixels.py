"""Arrays to pictures: any image-like array becomes 8-bit pixels, a small PNG and a data URI."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import torch

from unde.data import to_numpy
from unde.errors import UndeError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPE = {1: 0, 3: 2, 4: 6}  # channels → PNG colour type: grey, RGB, RGBA


def to_pixels(image: object, max_side: int | None = None) -> np.ndarray:
    """An image as (H, W, C) uint8 pixels with C = 1, 3 or 4.

    Shapes (H, W), (H, W, C) and (C, H, W) are understood; where both readings fit, a tensor is read as
    (C, H, W) and everything else as (H, W, C). uint8 and other integers in 0…255 are kept. Floats in [0, 1]
    are scaled by 255; any other range (such as normalised inputs) is stretched from its own minimum to its
    own maximum. An image with a side longer than `max_side` is shrunk to it by averaging areas.

    >>> to_pixels(np.array([[0.0, 1.0]]))[..., 0]
    array([[  0, 255]], dtype=uint8)
    """
    channels_first = isinstance(image, torch.Tensor)
    array = to_numpy(image)
    if array.dtype.kind not in "buif":
        raise UndeError(f"an image must hold numbers, got an array of type {array.dtype}")
    if array.size == 0:
        raise UndeError(f"an image must have at least one pixel, got the shape {array.shape}")
    pixels = _to_uint8(_channels_last(array, channels_first))
    return pixels if max_side is None else _shrink(pixels, max_side)


def _channels_last(array: np.ndarray, channels_first: bool) -> np.ndarray:
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim == 3:
        last, first = array.shape[2] in _COLOUR_TYPE, array.shape[0] in _COLOUR_TYPE
        if first and (channels_first or not last):
            return np.moveaxis(array, 0, 2)
        if last:
            return array
    raise UndeError(
        f"cannot show an array of shape {array.shape} as an image: expected (H, W), (H, W, C) or (C, H, W) "
        "with 1, 3 or 4 channels. Pick the channels to show, or give the example as text or by id only."
    )


def _to_uint8(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind in "ui" and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8, copy=False)
    values = array.astype(np.float64)
    if not np.isfinite(values).all():
        raise UndeError("an image holds NaN or infinite pixels: only finite values can be shown")
    colour = values[..., :3]
    low, high = colour.min(), colour.max()
    if low < 0 or high > 1:
        # The alpha channel keeps its own scale: a stretch there would change what can be seen.
        colour[...] = (colour - low) / (high - low) if high > low else 0.5
    return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _shrink(pixels: np.ndarray, max_side: int) -> np.ndarray:
    longest = max(pixels.shape[:2])
    if longest <= max_side:
        return pixels
    means = pixels.astype(np.float64)
    for axis in (0, 1):
        size = pixels.shape[axis]
        edges = np.arange(max(1, round(size * max_side / longest)))
        edges = edges * size // len(edges)
        widths = np.diff(np.append(edges, size))
        means = np.add.reduceat(means, edges, axis=axis)
        means /= widths.reshape(-1, 1, 1) if axis == 0 else widths.reshape(1, -1, 1)
    return np.rint(means).astype(np.uint8)


def encode_png(pixels: np.ndarray) -> bytes:
    """(H, W, C) uint8 pixels as the bytes of a PNG file.

    >>> encode_png(np.zeros((2, 2, 1), np.uint8))[1:4]
    b'PNG'
    """
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    rows = np.ascontiguousarray(pixels).reshape(height, width * channels)
    # Differences help photographs and hurt line drawings: try both, keep the smaller.
    plain = np.insert(rows, 0, 0, axis=1)
    data = min((zlib.compress(lines.tobytes(), 9) for lines in (plain, _filtered(rows, channels))), key=len)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _filtered(rows: np.ndarray, channels: int) -> np.ndarray:
    """Each row behind its filter byte: unchanged (0), minus its left pixel (1) or minus the row above (2)."""
    left = np.zeros_like(rows)
    left[:, channels:] = rows[:, :-channels]
    above = np.zeros_like(rows)
    above[1:] = rows[:-1]
    candidates = np.stack([rows, rows - left, rows - above])  # (3, H, W·C), modulo 256 as PNG wants it
    cost = np.minimum(candidates, 0 - candidates).sum(axis=2, dtype=np.int64)  # as signed magnitudes
    best = cost.argmin(axis=0)
    chosen = candidates[best, np.arange(len(rows))]
    return np.concatenate([best[:, None].astype(np.uint8), chosen], axis=1)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_uri(pixels: np.ndarray) -> str:
    """Pixels as a PNG inside a URI, for the `src` of an image."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode("ascii")
