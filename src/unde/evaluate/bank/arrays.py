"""Named arrays in one .npz file; reading does not trust its content."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping

import numpy as np
import torch

from unde.store.files import check_plain, write_bytes
from unde.store.remote import StorePath
from unde.store.shards import checksum

_CHECKSUM = "checksum"
_MAX_BYTES = 2**24  # of all arrays in memory, for any file
_MAX_RATIO = 20  # of bytes in memory to bytes of a larger file: measurements hardly compress


def write_arrays(path: StorePath, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays and their checksum, not compressed."""
    buffer = io.BytesIO()
    np.savez(buffer, **{**arrays, _CHECKSUM: np.array(_checksum(arrays))})  # ty: ignore[invalid-argument-type]
    write_bytes(path, buffer.getvalue())


def read_arrays(path: StorePath) -> dict[str, np.ndarray]:
    """Read the arrays of a file; raise ValueError if it is damaged, OSError if it cannot be read."""
    check_plain(path, follow=True)
    content = path.read_bytes()
    try:
        return _unpack(content)
    except Exception as e:  # damaged bytes make zipfile and numpy raise a dozen kinds of errors
        raise ValueError(str(e)) from e


def match_checksum(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether arrays match the checksum that `write_arrays` wrote."""
    signed = {name: array for name, array in arrays.items() if name != _CHECKSUM}
    return _CHECKSUM in arrays and str(arrays[_CHECKSUM]) == _checksum(signed)


def _unpack(content: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        entries = file.infolist()
        size = sum(entry.file_size for entry in entries)
        if size > max(_MAX_BYTES, _MAX_RATIO * len(content)):
            raise ValueError(f"its {len(content):,} bytes would take {size:,} in memory")
        return {
            entry.filename.removesuffix(".npy"): _parse_array(_read_entry(file, entry)) for entry in entries
        }


def _read_entry(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Read no more bytes than the entry declares; `ZipFile.read` would unpack all of them first."""
    with file.open(entry) as unpacked:
        return unpacked.read(entry.file_size)


def _parse_array(content: bytes) -> np.ndarray:
    """Parse a .npy file after checking that it is as long as its header says."""
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
