"""Devices of any kind that torch knows: what is free there, what they lack, and how to wait for them.

Everything that differs between CUDA, ROCm, XPU, MPS and backends of others is here; no other module asks for one kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unde.data import map_tensors
from unde.errors import UndeError

CPU = torch.device("cpu")
SHARE = 0.8  # of the free memory of a device is the default budget
T = TypeVar("T")


@dataclass(frozen=True)
class Compute:
    """Where to compute, and how many bytes that may take there besides what is there already."""

    device: torch.device
    memory: int


def budget(
    device: torch.device, memory: int, device_memory: int | None = None, sharing: int = 1, coming: int = 0
) -> Compute:
    """The device with a budget: on the CPU `memory`, elsewhere `device_memory`, by default 80 % of what is free now.

    `sharing` workers use the device at once; `coming` bytes of what is free will be taken by their models.
    """
    if device.type == "cpu":
        return Compute(device, memory)
    if device_memory is None:
        free = free_memory(device)
        free = None if free is None else free - coming
        if free is not None and free <= 0:
            raise no_memory(device)
        device_memory = memory if free is None else int(SHARE * free)
    return Compute(device, max(1, device_memory // sharing))


def find_device(name: str | torch.device) -> torch.device:
    """The device of this name, tried out.

    Raises:
        UndeError: There is no such device here, or no memory is left on it.

    >>> find_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        raise no_memory(torch.device(name)) from None
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        here = ", ".join(["cpu", *(f"{kind}:{i}" for kind in kinds() for i in range(count(kind)))])
        raise UndeError(
            f"cannot use the device {str(name)!r} ({_first_line(e)}). Devices here: {here}"
        ) from None
    if device.type == "meta":
        raise UndeError(
            "cannot use the device 'meta': it holds no numbers. Name one that computes, such as 'cpu'"
        )
    return device


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter, where features are gathered.

    Raises:
        UndeError: A parameter is not in memory.
    """
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if p.is_meta:
            raise UndeError(
                f"parameter {name!r} is not in memory but on the meta device, offloaded or never filled: load the "
                "weights, with a device_map that keeps them on devices"
            )
    return next((p.device for p in parameters.values()), CPU)


def move(model: nn.Module, name: str | torch.device | None) -> None:
    """Move the model to a device, where it stays; None: nowhere.

    Raises:
        UndeError: There is no such device, the model does not fit on it, or a parameter is not in memory.
    """
    home = device_of(model)
    if name is None:
        return
    device = find_device(name)
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        model.to(home)
        raise UndeError(
            f"the model does not fit into the memory of {device}: end what else runs there, or name another device"
        ) from None


@contextmanager
def name_memory(device: torch.device) -> Generator[None]:
    """Inside, a device that runs out of memory raises an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        release_cache(device)
        raise UndeError(
            f"{device} ran out of memory ({_first_line(e)}): give fewer bytes with device_memory= (--device-memory), "
            "so that fewer examples go through the model at once, or fewer workers for each device"
        ) from e


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers.

    >>> model_bytes(nn.Linear(2, 3))
    36
    """
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def no_memory(device: torch.device) -> UndeError:
    return UndeError(
        f"no memory is left on {device}: end what else runs there, or name another device with device="
    )


def kinds() -> list[str]:
    """The kinds of accelerators that this torch can use here."""
    found = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda: None)()
    candidates = ["cuda", "xpu", "mps"] if found is None else [found.type]
    return [kind for kind in candidates if count(kind)]


def count(kind: str) -> int:
    """How many devices of a kind there are."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = _module(kind)
    return module.device_count() if module is not None and module.is_available() else 0


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None on the CPU, and where the backend does not tell."""
    module = None if device.type == "cpu" else _module(device.type)
    if module is None:
        return None
    if device.type == "mps":
        return module.recommended_max_memory() - module.current_allocated_memory()
    if not hasattr(module, "mem_get_info"):
        return None
    cached = 0  # what torch holds, and gives out again
    if hasattr(module, "memory_reserved"):
        cached = module.memory_reserved(device) - module.memory_allocated(device)
    return module.mem_get_info(device)[0] + cached


def release_cache(device: torch.device) -> None:
    """Give back the memory that torch holds but does not use."""
    module = None if device.type == "cpu" else _module(device.type)
    getattr(module, "empty_cache", lambda: None)()


def supports_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: MPS and some of XPU do not."""
    if device.type == "cpu":
        return True
    if device.type == "xpu":
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
    try:
        torch.empty(1, device=device, dtype=torch.float64)
    except (RuntimeError, TypeError):
        return False
    return True


def double_device(device: torch.device) -> torch.device:
    """Where float64 is computed: there if it can be, else on the CPU."""
    return device if supports_float64(device) else CPU


def put(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device, in `dtype`; float64 where that is computed.

    >>> put(torch.ones(2), CPU, torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    dtype = dtype or x.dtype
    place = double_device(device) if dtype == torch.float64 else device
    return x.to(place, dtype, non_blocking=place.type != "cpu")


def upload(batches: Iterable[T], device: torch.device) -> Iterator[T]:
    """Batches of tensors on a device: the next goes up while the last is used. On the CPU they are what they were.

    At most three are there at once. Where the host's memory can be pinned, a stream of its own copies from there.
    """
    if device.type == "cpu":
        yield from batches
        return
    streams = getattr(_module(device.type), "Stream", None)
    side = None if streams is None or device.type == "mps" else streams(device)
    last: T | None = None
    done: Any = None
    for batch in batches:
        copied, event = _copy_up(batch, device, side)
        if last is not None:
            yield _received(last, device, done)
        last, done = copied, event
        del copied
    if last is not None:
        yield _received(last, device, done)


def _copy_up(batch: Any, device: torch.device, side: Any) -> tuple[Any, Any]:
    """The batch on the device, and the event that says so; None if the stream that computes copies it too."""
    if side is None:
        return map_tensors(batch, lambda x: x.to(device, non_blocking=True)), None
    with _module(device.type).stream(side):
        # The allocator of pinned memory keeps what is copied from until it was.
        copied = map_tensors(batch, lambda x: x.pin_memory().to(device, non_blocking=True))
        return copied, side.record_event()


def _received(batch: T, device: torch.device, event: Any) -> T:
    """The batch, once it was copied for the stream that computes."""
    if event is not None:
        here = _module(device.type).current_stream(device)
        here.wait_event(event)
        map_tensors(batch, lambda x: x.record_stream(here))
    return batch


def download(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, which waits once for all that are copied."""
    down = {name: x.to(CPU, non_blocking=True) for name, x in tensors.items()}
    for device in {x.device for x in tensors.values()}:
        synchronize(device)
    return down


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was asked to up to now, and not what comes later."""
    module = None if device.type == "cpu" else _module(device.type)
    if module is None:
        return lambda: None
    if not hasattr(module, "Event"):
        return lambda: synchronize(device)
    event = module.Event()
    event.record() if device.type == "mps" else event.record(module.current_stream(device))
    return event.synchronize


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed, and copied, all that it was asked to."""
    module = None if device.type == "cpu" else _module(device.type)
    if module is not None:
        module.synchronize() if device.type == "mps" else module.synchronize(device)


def random_states() -> list[tuple[str, int, torch.Tensor]]:
    """The states of the random number generators of all accelerators in use."""
    found = list[tuple[str, int, torch.Tensor]]()
    for kind in kinds():
        module = _module(kind)
        if kind == "mps":
            found.append((kind, 0, module.get_rng_state()))
        elif getattr(module, "is_initialized", lambda: True)():
            found += [(kind, i, module.get_rng_state(i)) for i in range(count(kind))]
    return found


def set_random_states(states: list[tuple[str, int, torch.Tensor]]) -> None:
    for kind, i, state in states:
        module = _module(kind)
        module.set_rng_state(state) if kind == "mps" else module.set_rng_state(state, i)


@contextmanager
def without_cudnn() -> Generator[None]:
    """Inside, layers do not come from cuDNN, whose recurrent ones refuse backward in eval mode."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.enabled = cudnn.enabled, False
    try:
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def exact_float32() -> Generator[None]:
    """Inside, float32 is not rounded to TF32, and layers do not come from cuDNN."""
    matmul: Any = torch.backends.cuda.matmul
    name, exact = ("allow_tf32", False)
    try:
        before = matmul.allow_tf32
    except RuntimeError:  # the program uses the names of torch 2.9
        name, exact = ("fp32_precision", "ieee")
        before = matmul.fp32_precision
    try:
        setattr(matmul, name, exact)
        with without_cudnn():
            yield
    finally:
        setattr(matmul, name, before)


# --- devices of worker processes ------------------------------------------------------------------------------

_number = 0  # of this process among the workers of its machine
_visible: list[str] = []  # the GPUs of the machine, in a worker that sees one of them
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The names of the GPUs that this process may use, if there are several."""
    gpus = torch.cuda.device_count()
    seen = os.environ.get(_VISIBLE, "")
    return (seen.split(",") if seen else [str(i) for i in range(gpus)]) if gpus > 1 else []


def become_worker(number: int, gpus: list[str]) -> None:
    """In a process that computes for another: of several devices use the one of this number, unless one is named."""
    global _number, _visible
    _number, _visible = number, gpus
    if gpus:  # torch looks for GPUs when the first is used
        os.environ[_VISIBLE] = gpus[number % len(gpus)]


def local(name: str) -> str:
    """The device of this process for the one that another process names: its own, if only the kind is named.

    >>> local("cpu")
    'cpu'
    """
    kind, _, index = name.partition(":")
    if kind == "cuda" and _visible:
        if index and int(index) < len(_visible) and not torch.cuda.is_initialized():
            os.environ[_VISIBLE] = _visible[int(index)]
        return kind
    if kind in ("cpu", "meta", "mps") or index or count(kind) < 2:
        return name
    _module(kind).set_device(_number % count(kind))
    return f"{kind}:{_number % count(kind)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _module(kind: str) -> Any:
    return getattr(torch, kind, None)
