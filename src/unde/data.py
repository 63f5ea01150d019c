"""Rows: one view of training data and queries, whatever their type.

Accepted: a list (or any sequence or map-style data set) of examples; columns, that is a tuple or dict of
tensors or arrays of equal length; a DataLoader, whose data set and collate function are used, in order.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    default_collate,
)

from unde.errors import UndeError

Collate = Callable[[list[Any]], Any]


class Rows:
    """`len`, `rows[i]` and batches of a data set, whatever its shape.

    >>> rows = Rows((torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])))
    >>> len(rows), rows[1]
    (3, (tensor([2., 3.]), tensor(1)))
    >>> rows.batch([0, 2])[1]
    tensor([0, 0])
    """

    def __init__(self, data: Any, collate: Collate | None = None) -> None:
        if isinstance(data, Rows):
            data, collate = data.data, collate or data.collate
        if isinstance(data, DataLoader):
            _refuse_shuffled(data)
            if data.batch_sampler is not None:  # else its collate function is one for single examples
                collate = collate or data.collate_fn
            data = data.dataset
        self.data = data
        self.collate: Collate = collate or default_collate
        self.columns = isinstance(data, (tuple, Mapping)) and not hasattr(data, "_fields")
        if (
            isinstance(data, IterableDataset)
            or not hasattr(data, "__len__")
            or not hasattr(data, "__getitem__")
        ):
            raise UndeError(
                f"data of type {type(data).__name__} cannot be read by position: expected a sequence, a map-style "
                "data set, a tuple or dict of tensors, or a DataLoader over one of these"
            )
        self._length = _length_of_columns(data) if self.columns else len(data)
        if self._length == 0:
            raise UndeError("the data set is empty: expected at least one example")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Any:
        try:
            if not self.columns:
                return self.data[i]
            if isinstance(self.data, Mapping):
                return {k: v[i] for k, v in self.data.items()}
            return tuple(v[i] for v in self.data)
        except (UndeError, IndexError):  # the latter may be the end
            raise
        except Exception as e:
            raise UndeError(f"example {i} cannot be read from the data ({_first_line(e)})") from e

    def batch(self, indices: Iterable[int]) -> Any:
        where = list(indices)
        return self._collate(where, [self[i] for i in where])

    def _read_with_digests(self, where: list[int]) -> tuple[Any, list[str]]:
        examples = [self[i] for i in where]
        return self._collate(where, examples), [digest(e) for e in examples]

    def _collate(self, where: list[int], examples: list[Any]) -> Any:
        try:
            return self.collate(examples)
        except UndeError:
            raise
        except Exception as e:
            which = f"examples {where[0]} to {where[-1]}" if len(where) > 1 else f"example {where[0]}"
            raise UndeError(
                f"{which} cannot be put into a batch ({_first_line(e)}): expected tensors, arrays or numbers of equal "
                "shapes. For others pass collate=, a function that makes a batch of a list of examples"
            ) from e

    def batches(
        self, ranges: Sequence[Sequence[int]], workers: int = 0
    ) -> Generator[tuple[Sequence[int], Any, list[str]]]:
        """(indices, collated batch, content digest of each example) for each range, read ahead by `workers`."""
        positions: Any = range(len(self))
        loader = DataLoader(
            positions,
            batch_sampler=map(list, ranges),  # lazy: all of them may be a million numbers
            collate_fn=self._read_with_digests,
            num_workers=workers,
        )
        reading = iter(loader)
        try:
            for r, (batch, digests) in zip(ranges, reading):
                yield r, batch, digests
        except UndeError as e:
            raise UndeError(_without_traceback(str(e))) from e
        finally:  # at once: workers that outlive the loop find their pipes broken
            getattr(reading, "_shutdown_workers", lambda: None)()

    def subset(self, indices: Sequence[int]) -> Rows:
        """
        >>> list(Rows(["a", "b", "c"]).subset([2, 0]))
        ['c', 'a']
        """
        rows: Any = self
        return Rows(Subset(rows, indices), self.collate)

    def concat(self, other: Rows) -> Rows:
        """
        >>> list(Rows(["a", "b"]).concat(Rows(["c"])))
        ['a', 'b', 'c']
        """
        rows: Any = (self, other)
        return Rows(ConcatDataset(rows), self.collate)

    def digests(self, indices: Iterable[int] | None = None) -> list[str]:
        return [digest(self[i]) for i in (range(len(self)) if indices is None else indices)]


def _length_of_columns(data: Any) -> int:
    columns = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    expected = (
        "a tuple or dict holds whole columns, one row for each example; pass a list for single examples"
    )
    for name, column in columns.items():
        if not hasattr(column, "__len__") or (isinstance(column, (Tensor, np.ndarray)) and column.ndim == 0):
            raise UndeError(f"column {name!r} is a single {type(column).__name__}: {expected}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UndeError(f"columns of different lengths {lengths}: {expected}")
    return next(iter(lengths.values()), 0)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _without_traceback(message: str) -> str:
    """The message of an error in a worker of a DataLoader; torch puts the whole traceback into it."""
    caught, mark = message.startswith("Caught "), f"{UndeError.__module__}.{UndeError.__qualname__}: "
    return message.rpartition(mark)[2].strip() if caught and mark in message else message


def _refuse_shuffled(loader: DataLoader) -> None:
    if isinstance(loader.dataset, IterableDataset):
        return  # refused for what it is
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", loader.batch_sampler)):
        if sampler is not None and not isinstance(sampler, SequentialSampler):
            raise UndeError(
                f"the DataLoader reads its data in another order ({type(sampler).__name__}): row n of an index must "
                "be example n of the data set. Pass shuffle=False, or the data set itself"
            )


def choose_collate(collate: Collate | None, data: Any) -> Collate | None:
    """`collate`, or None for data that come with a collate function, as a DataLoader or Rows may."""
    has_collate = isinstance(data, (DataLoader, Rows)) and Rows(data).collate is not default_collate
    return None if has_collate else collate


def plain_text(example: Any) -> str | None:
    """The text that an example holds in its field "text" or "sentence"; None without one.

    >>> plain_text({"text": "to be", "label": 1}), plain_text(("to be", 1))
    ('to be', None)
    """
    if not isinstance(example, Mapping):
        return None
    return next((t for key in ("text", "sentence") if isinstance(t := example.get(key), str)), None)


def plain_texts(rows: Rows, text: Callable[[Any], str | None] = plain_text) -> list[str] | None:
    """Texts of all examples; None if the first has none. A later one without a text has the empty text.

    >>> plain_texts(Rows([{"text": "to be"}, {"text": "or not"}])), plain_texts(Rows([1, 2]))
    (['to be', 'or not'], None)
    """
    if text(rows[0]) is None:
        return None
    return [text(rows[i]) or "" for i in range(len(rows))]


def parse_bytes(memory: int | str, what: str = "memory") -> int:
    """A number of bytes; `what` it is a budget of is said in errors.

    >>> parse_bytes("2GB"), parse_bytes("512 MiB"), parse_bytes(1000)
    (2000000000, 536870912, 1000)
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", memory)
        if match is None:
            raise UndeError(f"cannot read {what} {memory!r}: expected something like '2GB' or '512MiB'")
        base = 1024 if match[3] else 1000
        memory = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if memory < 1:
        raise UndeError(f"{what} {memory}: expected a number of bytes, or something like '2GB'")
    return memory


def evenly(n: int, count: int) -> list[int]:
    """Up to `count` evenly spaced positions of n, the first and the last among them.

    >>> evenly(10, 4), evenly(3, 256), evenly(10, 1)
    ([0, 3, 6, 9], [0, 1, 2], [0])
    """
    count = min(n, count)
    return sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)})


def to_numpy(value: Any) -> np.ndarray:
    """An array of anything array-like: tensors on any device and of any precision, Pillow images, lists."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
    return np.asarray(value)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`. Copies to the host block: the host would read them too early."""
    return map_tensors(batch, lambda x: x.to(device, non_blocking=device.type != "cpu"))


def map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """The batch with `change` applied to every tensor in it, in a fixed order.

    >>> map_tensors({"x": [torch.ones(2), "text"]}, torch.neg)
    {'x': [tensor([-1., -1.]), 'text']}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return type(batch)({k: map_tensors(v, change) for k, v in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(v, change) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(v, change) for v in batch)
    return batch


def tensors(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in the order of `map_tensors`.

    >>> tensors({"x": [torch.ones(2), "text"], "y": torch.zeros(1)})
    [tensor([1., 1.]), tensor([0.])]
    """
    out: list[Tensor] = []
    map_tensors(batch, lambda x: out.append(x) or x)
    return out


def parts(value: Tensor) -> list[Tensor]:
    """The tensors inside a quantised tensor (numbers and scales); a plain tensor itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in parts(getattr(value, name))]


def digest(example: Any) -> str:
    """A short content digest of one example, equal for equal content on every machine.

    >>> digest((torch.ones(2), 3)) == digest((torch.ones(2), 3)) != digest((torch.ones(2), 4))
    True
    """
    h = hashlib.blake2b(digest_size=8)
    feed(h.update, example)
    return h.hexdigest()


def feed(update: Callable[[Any], None], value: Any) -> None:
    """Hash a value with its types and lengths, so that different examples never give the same bytes."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        return feed(update, parts(value))
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype.is_floating_point and value.dtype.itemsize < 4 and value.dtype != torch.float16:
            update(str(value.dtype).encode())  # bfloat16 and smaller: NumPy has no such type
            value = value.view({1: torch.uint8, 2: torch.int16}[value.dtype.itemsize])
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            feed(update, [f"object{value.shape}", *np.asarray(value).flat])
            return
        update(f"a{value.dtype.str}{value.shape}".encode())
        plain = isinstance(value, np.ndarray) and value.flags.c_contiguous and value.dtype.kind in "biufc"
        update(memoryview(value).cast("B") if plain and value.size else value.tobytes())  # without a copy
    elif isinstance(value, Mapping):
        update(f"{{{len(value)}".encode())
        for key in sorted(value, key=str):
            feed(update, key)
            feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        update(f"[{len(value)}".encode())
        for v in value:
            feed(update, v)
    elif isinstance(value, (str, bytes)):
        kind, content = (
            ("s", value.encode(errors="surrogatepass")) if isinstance(value, str) else ("b", value)
        )
        update(f"{kind}{len(content)}:".encode() + content)
    elif isinstance(value, (bool, int)) or value is None:
        update(f"i{value};".encode())
    elif isinstance(value, float):
        update(b"f" + struct.pack("<d", value))
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # Pillow images
        update(f"p{getattr(value, 'mode', '')}{value.size}".encode() + value.tobytes())
    else:
        raise UndeError(
            f"cannot tell whether two examples of type {type(value).__name__} are equal: expected tensors, arrays, "
            "numbers, strings, or lists, tuples and dicts of these. Convert it in the data set"
        )
