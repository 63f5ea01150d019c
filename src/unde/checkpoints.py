"""Checkpoints: the weights, one set or several, under which features are computed."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unde import console
from unde.errors import UndeError
from unde.fingerprints import model_fingerprint
from unde.store.files import check_plain

Checkpoint = Mapping[str, Tensor] | str | os.PathLike[str]


def fingerprints(model: nn.Module, checkpoints: Sequence[Checkpoint] | None) -> list[str]:
    """One for each checkpoint, or for the model as it is; read one at a time."""
    if checkpoints is None:
        return [model_fingerprint(model)]
    if not checkpoints:
        raise UndeError(
            "checkpoints=[] names no checkpoint: expected at least one, or None for the model as is"
        )
    prints = [model_fingerprint(read_checkpoint(c)) for c in checkpoints]
    if twins := [(prints.index(f), c) for c, f in enumerate(prints) if prints.index(f) < c]:
        console.note(
            f"checkpoints {twins[0][0]} and {twins[0][1]} hold the same weights. A state_dict() follows the "
            "model as it trains: copy.deepcopy it when you take it"
        )
    return prints


@contextmanager
def load_checkpoint(
    model: nn.Module, checkpoints: Sequence[Checkpoint] | None, c: int = 0
) -> Generator[None]:
    """Load checkpoint c, if there are any, for the time of the block; then restore the weights of the model."""
    if checkpoints is None:
        yield
        return
    before = {k: v.detach().clone() for k, v in model.state_dict().items()}
    try:
        _load(model, read_checkpoint(checkpoints[c]))
        yield
    finally:
        model.load_state_dict(before)


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    live = model.state_dict()
    memory = {live[k].data_ptr() for k in state if k in live}
    # Files leave out tied tensors, which share memory with one that is in the file.
    missing = {k for k, v in live.items() if k not in state and not (v.numel() and v.data_ptr() in memory)}
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as e:
        raise UndeError(f"a checkpoint does not fit the model: {e}") from None
    wrong = [f"leaves out {sorted(missing)[:3]}"] * bool(missing)
    wrong += [f"has unknown {result.unexpected_keys[:3]}"] * bool(result.unexpected_keys)
    if wrong:
        raise UndeError(f"a checkpoint does not fit the model: it {' and '.join(wrong)}")


def read_checkpoint(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    if isinstance(checkpoint, Mapping):
        return checkpoint
    path = Path(checkpoint).expanduser()
    if path.suffix != ".safetensors":
        raise UndeError(
            f"checkpoint {path}: expected a .safetensors file or a state dict (pickles are never loaded)"
        )
    if not path.exists():
        raise UndeError(f"checkpoint {path} does not exist")
    try:
        check_plain(path, follow=True)
        return load_file(path)
    except SafetensorError as e:
        raise UndeError(f"checkpoint {path} is damaged ({e})") from None
    except OSError as e:
        raise UndeError(f"cannot read the checkpoint {path} ({e.strerror or e})") from None


def resolve_checkpoint_weights(given: Sequence[float] | None, count: int, terms: int = 1) -> list[float]:
    """η_c, by default equal shares; of each checkpoint for each of its `terms`."""
    if given is None:
        return [1.0 / (count * terms)] * (count * terms)
    if terms > 1:
        given = [x for x in given for _ in range(terms)] if len(given) == count else given
        count *= terms
    if len(given) != count:
        raise UndeError(f"{len(given)} checkpoint_weights for {count} checkpoints: expected one for each")
    weights = [float(x) for x in given]
    if not all(0 <= x < float("inf") for x in weights) or not any(weights):
        raise UndeError(f"checkpoint_weights {weights}: expected numbers ≥ 0, not all zero")
    return weights
