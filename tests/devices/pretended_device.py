"""A pretended accelerator: a PrivateUse1 backend in plain Python, stricter than real ones.

A tensor on it is a wrapper around a CPU tensor that nothing else reaches. It refuses mixtures of devices, float64
(unless allowed), sparse tensors and `.numpy()`. It counts operations, copies and waits, keeps bytes below a limit, and
shows garbage in non-blocking copies to the host until it is synchronised. Registration lasts for the whole process.
Torch ends the process where Python raises in a backward pass: its guard of such devices calls Python while it unwinds.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

NAME, ORDINALS = "pretended", 2
TOTAL = 2**34  # bytes of memory of each ordinal
aten = torch.ops.aten
_COPIES = (aten.copy_, aten._to_copy, aten._copy_from, aten._copy_from_and_resize)
# The host waits for these, since it needs a number or a size.
_WAITS = (
    aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.bincount, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.is_nonzero,
)  # fmt: skip
_FREE = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.detach)


def _lstm_cell(x, h, c, *biases):
    gates = sum((b for b in biases if b is not None), x + h)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(grad_h, grad_c, c, after, gates, has_bias):
    i, f, g, o = gates.chunk(4, 1)
    t = after.tanh()
    grad_h = torch.zeros_like(c) if grad_h is None else grad_h
    grad_c = grad_h * o * (1 - t * t) + (0 if grad_c is None else grad_c)
    parts = [
        grad_c * g * i * (1 - i),
        grad_c * c * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * t * o * (1 - o),
    ]
    grads = torch.cat(parts, 1)
    return grads, grad_c * f, grads.sum(0) if has_bias else torch.empty(0)


def _histc(x, *args, **kwargs):
    return torch.histc(x.float(), *args, **kwargs).to(x.dtype)


# What accelerators have and the CPU has not: fused kernels, and types of numbers.
_FUSED = {
    aten._efficientzerotensor: torch.zeros,  # tangents that are zero; on the CPU they have no memory
    aten.histc: _histc,
    aten._thnn_fused_lstm_cell: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl: _lstm_cell_backward,
}


@dataclass
class Counts:
    """What one ordinal did."""

    operations: int = 0
    up: int = 0
    up_bytes: int = 0
    down: int = 0
    down_bytes: int = 0
    waits: int = 0
    live: int = 0
    peak: int = 0
    limit: int = TOTAL
    names: dict[str, int] = field(default_factory=dict)  # operations by name
    waited: dict[str, int] = field(default_factory=dict)  # waits by name

    def restart(self) -> None:
        """Reset all but live bytes and the limit."""
        self.__init__(live=self.live, peak=self.live, limit=self.limit)

    def wait(self, name: str) -> None:
        self.waits += 1
        self.waited[name] = self.waited.get(name, 0) + 1


counts = [Counts() for _ in range(ORDINALS)]
_float64 = False
_current = 0
_pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # host tensors and what they will hold
_seen: dict[int, weakref.ref] = {}


class PretendedTensor(torch.Tensor):
    """A tensor on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> PretendedTensor:
        if inner.layout != torch.strided:
            raise NotImplementedError(f"no {inner.layout} tensors on {NAME}")
        if inner.dtype in (torch.float64, torch.complex128) and not _float64:
            raise TypeError(f"{NAME} has no {inner.dtype}")
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=torch.device(NAME, index),
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor, index: int) -> None:
        self._inner = inner

    def __repr__(self, *_rest: object) -> str:
        return f"PretendedTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def tolist(self) -> object:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: int) -> object:
        raise RuntimeError("a tensor on a device was pickled")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, dict(kwargs or {}))


def _dispatch(func, args, kwargs):
    packet, leaves = func._overloadpacket, tree_leaves((args, kwargs))
    held = [t for t in leaves if isinstance(t, PretendedTensor)]
    if packet in _COPIES and (done := _copy(func, packet, args, kwargs)) is not None:
        return done
    index = _index(kwargs.get("device"), held)
    here = counts[index]
    if any(t.device.index != index for t in held):
        raise RuntimeError(f"{func}: tensors on several devices of type {NAME}")
    for t in leaves:
        if isinstance(t, torch.Tensor) and not isinstance(t, PretendedTensor) and t.dim():
            raise RuntimeError(
                f"{func}: expected all tensors on one device, found {NAME}:{index} and {t.device}"
            )
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type == NAME:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    name = str(packet).removeprefix("aten.")
    views = func._schema.returns and any(
        r.alias_info and not r.alias_info.is_write for r in func._schema.returns
    )
    if packet in _WAITS:
        here.wait(name)
    if not views and packet not in _FREE:
        here.operations += 1
        here.names[name] = here.names.get(name, 0) + 1
    run = _FUSED.get(packet, func)
    out = run(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if wanted is not None and torch.device(wanted).type != NAME:
        return out
    out = tree_map(lambda t: PretendedTensor(t, index) if isinstance(t, torch.Tensor) else t, out)
    if held:
        out = return_and_correct_aliasing(func, args, kwargs, out)
    for t in tree_leaves(out):
        if isinstance(t, PretendedTensor):
            _count(t, here)
    return out


def _dispatch_named(func, *args, **kwargs):
    return _dispatch(func, args, kwargs)


def _lower_precision(func, *args, **kwargs):
    dtype = torch.get_autocast_dtype(NAME)

    def cast(t):
        return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return func(*tree_map(cast, args), **tree_map(cast, kwargs))


def _copy(func, packet, args, kwargs):
    """Copies between devices; None for those on one."""
    if packet is aten._to_copy:
        source = args[0]
        place = torch.device(kwargs.get("device") or source.device)
        if place == source.device or (place.type == NAME and place.index is None):
            return None
        dtype, memory_format = kwargs.get("dtype") or source.dtype, kwargs.get("memory_format")
        target = torch.empty_like(
            source._inner, dtype=dtype, memory_format=memory_format or torch.preserve_format
        )
        target = target.to(place)
        return _move(target, source, kwargs.get("non_blocking", False))
    target, source = args[:2] if packet is aten.copy_ else args[1::-1]
    if target.device == source.device:
        return None
    return _move(target, source, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _move(target, source, non_blocking):
    size = source.numel() * source.element_size()
    if isinstance(target, PretendedTensor):
        here = counts[target.device.index]
        here.up, here.up_bytes = here.up + 1, here.up_bytes + size
        if not non_blocking and not isinstance(source, PretendedTensor):
            here.wait("copy up")
        target._inner.copy_(_unwrap(source))
        return target
    here = counts[source.device.index]
    here.down, here.down_bytes = here.down + 1, here.down_bytes + size
    if not non_blocking:
        here.wait("copy down")
        return target.copy_(source._inner)
    _pending.append((target, source._inner.clone()))
    return target.fill_(torch.nan if target.is_floating_point() else 1)


def _unwrap(t):
    return t._inner if isinstance(t, PretendedTensor) else t


def _index(device, held) -> int:
    if device is not None and torch.device(device).type == NAME:
        index = torch.device(device).index
        index = _current if index is None else index
        if not 0 <= index < ORDINALS:
            raise RuntimeError(f"{NAME}:{index}: invalid device ordinal")
        return index
    return held[0].device.index if held else _current


def _count(t: PretendedTensor, here: Counts) -> None:
    storage = t.untyped_storage()
    key, size = storage._cdata, t._inner.untyped_storage().nbytes()
    if key in _seen or not size:
        return
    if here.live + size > here.limit:
        raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes")
    _seen[key] = weakref.ref(storage, partial(_drop, key, size, here))
    here.live += size
    here.peak = max(here.peak, here.live)


def _drop(key: int, size: int, here: Counts, _storage: object) -> None:
    del _seen[key]
    here.live -= size


class _Module:
    """torch.pretended"""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return ORDINALS

    @staticmethod
    def current_device() -> int:
        return _current

    @staticmethod
    def set_device(device) -> None:
        global _current
        _current = device if isinstance(device, int) else torch.device(device).index or 0

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Its random numbers are those of the CPU, which torch.manual_seed has set."""

    @staticmethod
    def get_rng_state(device="pretended"):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, device="pretended") -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def mem_get_info(device=None) -> tuple[int, int]:
        here = counts[_current if device is None else torch.device(device).index or 0]
        return here.limit - here.live, here.limit

    @staticmethod
    def current_stream(device=None):
        return counts[_current if device is None else torch.device(device).index or 0]

    @classmethod
    def synchronize(cls, device=None) -> None:
        cls.current_stream(device).wait("synchronize")
        _finish(len(_pending))

    class Event:
        """Waits for the copies that were begun before it was recorded."""

        def record(self, stream) -> None:
            self.stream, self.last = stream, _pending[-1] if _pending else None

        def synchronize(self) -> None:
            self.stream.wait("event")
            _finish(next((i + 1 for i, copy in enumerate(_pending) if copy is self.last), 0))


def _finish(count: int) -> None:
    for target, value in _pending[:count]:
        target.copy_(value)
    del _pending[:count]


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


def register() -> None:
    """Make the device known to torch, once in a process."""
    if hasattr(torch, NAME):
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), None, _Guard())
    torch.autograd.set_multithreading_enabled(False)  # an engine that runs already has no thread for it
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # tied weights of a model that is moved stay tied
    library = torch.library.Library("_", "IMPL", "PrivateUse1")
    library.fallback(lambda op, *args, **kwargs: _dispatch(op, args, kwargs))
    exact = torch.library.Library("aten", "IMPL")  # a fallback does not get tensors that torch.tensor made
    exact.impl("_copy_from", partial(_dispatch_named, aten._copy_from.default), "PrivateUse1")
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    for name in (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "conv2d",
        "scaled_dot_product_attention",
    ):
        exact.impl(name, partial(_lower_precision, getattr(aten, name)), "AutocastPrivateUse1")
    _libraries.extend([library, exact, autocast])


_libraries: list[torch.library.Library] = []


@contextmanager
def limited(limit: int, index: int = 0):
    """Let an ordinal have `limit` more bytes than it holds now."""
    here = counts[index]
    here.limit = here.live + limit
    here.restart()
    try:
        yield here
    finally:
        here.limit = TOTAL


@contextmanager
def with_float64():
    """Allow float64, as CUDA does."""
    global _float64
    _float64 = True
    try:
        yield
    finally:
        _float64 = False
