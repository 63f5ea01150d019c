"""Channels-last convolutions: on CPUs the frozen pass of a ResNet-18 takes a quarter less time this way.

Not where groups are normalised: torch's channels-last GroupNorm takes several times as long, more than is gained.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def channels_last(model: nn.Module) -> Generator[None]:
    """Inside: 2-d convolutions of a CPU model run channels-last. After: every weight is the tensor it was.

    Inputs are converted in front of each convolution; all but the first come in the right order already.
    """
    slower = any(isinstance(m, nn.GroupNorm) for m in model.modules())
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and _cpu_float(m.weight) and not slower]
    weights = list({id(m.weight): m.weight for m in convs}.values())
    own = [w.data for w in weights]
    with ExitStack() as stack:
        for m in convs:
            stack.callback(m.register_forward_pre_hook(_convert).remove)
        try:
            for w in weights:
                w.data = w.data.contiguous(memory_format=torch.channels_last)
            yield
        finally:
            for w, data in zip(weights, own):
                w.data = data


def _cpu_float(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _convert(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if args and isinstance(args[0], Tensor) and args[0].dim() == 4:
        return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
    return None
