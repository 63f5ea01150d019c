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


def attributed(name: str, make: Callable[[], nn.Module], train: Callable[[], nn.Module]) -> nn.Module:
    """The model of that name with the parameters in experiments/models, trained once: all, or those of an adapter."""
    return kept(
        name, make, train, lambda model: {n: p for n, p in model.named_parameters() if p.requires_grad}
    )


def _everything(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers (of BatchNorm), tied tensors once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def kept(
    name: str,
    make: Callable[[], nn.Module],
    train: Callable[[], nn.Module],
    state: Callable[[nn.Module], dict[str, Tensor]] = _everything,
) -> nn.Module:
    """The model of that name as it is in experiments/models, trained once.

    What is returned is always what the file holds, in half precision, also right after training.
    """
    path = MODELS / f"{name}.safetensors"
    if not path.exists():
        trained = state(train())
        save_half(path, {k: v.detach() for k, v in trained.items() if v.is_floating_point()})
    model, saved = make(), load_half(path)
    missing = {n for n, p in model.named_parameters() if p.requires_grad} - set(saved)
    assert not missing, f"{path} lacks {sorted(missing)[:3]}"
    model.load_state_dict(saved, strict=False)
    return model.eval()
