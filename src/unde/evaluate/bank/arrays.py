"""Arrays by name in one .npz file, which is read without trusting a word of it."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping

import numpy as np
import torch

from unde.store.files import write_bytes
from unde.store.remote import StorePath
from unde.store.safe_io import check_plain
from unde.store.shards import checksum

_CHECKSUM = "checksum"
_ROOM = 2**24  # bytes that arrays of any file may take in memory
_SQUEEZED = (
    20  # and how many times the size of a larger file: what is measured hardly gets smaller when squeezed
)


def write_arrays(path: StorePath, arrays: Mapping[str, np.ndarray]) -> None:
    """All arrays and their checksum, not squeezed: the file is as large as they are in memory."""
    buffer = io.BytesIO()
    np.savez(buffer, **{**arrays, _CHECKSUM: np.array(_checksum(arrays))})  # ty: ignore[invalid-argument-type]
    write_bytes(path, buffer.getvalue())


def read_arrays(path: StorePath) -> dict[str, np.ndarray]:
    """The arrays of a file. A ValueError says what is damaged, an OSError that the file cannot be read."""
    check_plain(path, follow=True)
    content = path.read_bytes()
    try:
        return _unpacked(content)
    except Exception as e:  # damaged bytes make zipfile and numpy raise a dozen kinds of errors
        raise ValueError(str(e)) from e


def match_checksum(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether arrays are as `write_arrays` wrote them."""
    signed = {name: array for name, array in arrays.items() if name != _CHECKSUM}
    return _CHECKSUM in arrays and str(arrays[_CHECKSUM]) == _checksum(signed)


def _unpacked(content: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        entries = file.infolist()
        size = sum(entry.file_size for entry in entries)
        if size > max(_ROOM, _SQUEEZED * len(content)):
            raise ValueError(f"its {len(content):,} bytes would take {size:,} in memory")
        return {entry.filename.removesuffix(".npy"): _array(_bounded(file, entry)) for entry in entries}


def _bounded(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """No more than the entry says that it holds: to read all would unpack whatever is there, and then cut it."""
    with file.open(entry) as unpacked:
        return unpacked.read(entry.file_size)


def _array(content: bytes) -> np.ndarray:
    """From the bytes of a .npy file, once they are known to be as many as its header says."""
    file = io.BytesIO(content)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array is of a later version of the .npy format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"an array is shorter or longer than its shape {shape} says")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    return checksum(
        {name: torch.from_numpy(_bytes(a) if a.dtype.kind == "U" else a) for name, a in arrays.items()}
    )


def _bytes(text: np.ndarray) -> np.ndarray:
    return np.frombuffer(bytearray(str(text).encode()), dtype=np.uint8)
