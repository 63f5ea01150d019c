"""Restore a model, and the random number generators, exactly."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import devices


@contextmanager
def frozen_eval(model: nn.Module) -> Generator[None]:
    """Inside: eval mode, nothing compiled, and no parameter requires grad.

    Afterwards restores train/eval mode of every module, requires_grad and .grad of every parameter, every buffer (the
    tensor itself and its content), and the Python, NumPy and torch generators, those of devices too.
    """
    modules = list(model.modules())  # walking many small modules takes most of the time
    modes = [(m, m.training) for m in modules]
    tensors = _unique(p for m in modules for p in m._parameters.values())
    parameters = [(p, p.requires_grad, p.grad) for p in tensors]
    registered = [(m, dict(m._buffers)) for m in modules if m._buffers]
    tensors = _unique(b for m in modules for b in m._buffers.values())
    buffers = [(b, b.detach().clone(), b._version) for b in tensors]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    others = devices.random_states()
    ends: list[Any] = []
    fastpath = torch.backends.mha.get_fastpath_enabled()
    eager = getattr(torch.compiler, "set_stance", None)  # hooks need uncompiled modules
    compiles = "torch._dynamo" in sys.modules  # importing it takes a second
    stance = nullcontext() if eager is None or not compiles else eager("force_eager")
    stance.__enter__()
    recurrent = any(isinstance(m, nn.RNNBase) for m in modules)
    native = (
        devices.without_cudnn() if recurrent else nullcontext()
    )  # whose layers refuse backward in eval mode
    native.__enter__()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it skips the modules whose hooks we need
        if any(training for _, training in modes):
            model.eval()
        for p, _, _ in parameters:
            p.requires_grad_(False)
        # A hook may start a graph, as gradient checkpointing does.
        ends.extend(m.register_forward_hook(_end_of_graph) for m in modules if m._forward_hooks)
        yield
    finally:
        native.__exit__(None, None, None)
        stance.__exit__(None, None, None)
        for handle in ends:
            handle.remove()
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for m, training in modes:
            if m.training != training:
                m.training = training
        for p, requires_grad, grad in parameters:
            p.requires_grad_(requires_grad)
            p.grad = grad
        for m, tensors in registered:  # a forward pass may have replaced them
            m._buffers.clear()
            m._buffers.update(tensors)
        with torch.no_grad():
            # Written only if changed: a graph of the caller may hold it. `.data` changes bypass the version.
            same = [(b, content) for b, content, version in buffers if b._version == version]
            changed = [(b, content) for b, content, version in buffers if b._version != version]
            for b, content in changed + _differing(same):
                b.copy_(content)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        devices.set_random_states(others)


@contextmanager
def restore_attributes(model: nn.Module) -> Generator[None]:
    """Restore the attributes and children of every module, such as an attention kind that short texts choose."""
    before = [(m, dict(vars(m)), dict(m._modules)) for m in model.modules()]
    try:
        yield
    finally:
        for m, attributes, children in before:
            vars(m).clear()
            vars(m).update(attributes)
            m._modules.clear()
            m._modules.update(children)


def _differing(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Those that are not equal; a device is asked once."""
    places = dict.fromkeys(b.device for b, _ in pairs)
    out: list[tuple[Tensor, Tensor]] = []
    for place in places:
        here = [pair for pair in pairs if pair[0].device == place]
        differ = torch.stack([(b != content).any() for b, content in here]).tolist()
        out += [pair for pair, d in zip(here, differ) if d]
    return out


def _unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Each tensor once: modules may share them."""
    return list({id(t): t for t in tensors if t is not None}.values())


def _end_of_graph(_module: nn.Module, _args: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) and output.requires_grad and output.is_leaf else None
