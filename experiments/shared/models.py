"""Attributed models as files: what a bank and the queries of a study belong to, in half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.shared.paths import MODELS


def save_half(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({name: v.half().contiguous() for name, v in tensors.items()}, path)


def load_half(path: Path) -> dict[str, Tensor]:
    return {name: v.float() for name, v in load_file(path).items()}


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The state of the parameters that are trained: all, or those of an adapter."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def load_into(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Puts saved parameters in; what is not among them stays as it is."""
    missing = set(trainable(model)) - set(tensors)
    assert not missing, f"the file lacks {sorted(missing)[:3]}"
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def attributed(name: str, make: Callable[[], nn.Module], train: Callable[[], nn.Module]) -> nn.Module:
    """The model of that name with the parameters in experiments/models, trained once: all, or those of an adapter."""
    path = MODELS / f"{name}.safetensors"
    if not path.exists():
        save_half(path, trainable(train()))
    return load_into(make(), load_half(path))


def kept(name: str, make: Callable[[], nn.Module], train: Callable[[], nn.Module]) -> nn.Module:
    """The model of that name as it is in experiments/models, trained once; buffers (of BatchNorm) included.

    What is returned is always what the file holds, in half precision, also right after training.
    """
    path = MODELS / f"{name}.safetensors"
    if not path.exists():
        trained = train()
        state = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}  # tied tensors once
        save_half(path, {k: v.detach() for k, v in state.items() if v.is_floating_point()})
    model = make()
    model.load_state_dict(load_half(path), strict=False)
    return model.eval()
