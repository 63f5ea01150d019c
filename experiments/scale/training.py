"""One plain training loop for all settings. It can be killed at any step and goes on from its last checkpoint.

The order of the data and all that is drawn in a step follow from (seed, epoch) and (seed, step), so that a training
that was interrupted takes the same steps as one that was not.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.scale.settings import Recipe
from experiments.shared.paths import unfinished
from unde import console

EVERY = 600  # seconds between checkpoints
Loss = Callable[[nn.Module, Tensor, torch.Generator], Tensor]
State = dict[str, Any]


def steps_of(count: int, recipe: Recipe) -> int:
    return recipe.epochs * -(-count // recipe.batch_size)


def optimizer_of(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer as training makes it; a tail-patch step makes it again."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
    return torch.optim.AdamW(parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay)


def rate(step: int, total: int, recipe: Recipe) -> float:
    warm = round(recipe.warm_up * total)
    if step < warm:
        return recipe.lr * (step + 1) / warm
    share = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))
    return recipe.lr * (recipe.final + (1 - recipe.final) * share)


def fit(
    model: nn.Module,
    loss: Loss,
    count: int,
    recipe: Recipe,
    *,
    seed: int = 0,
    rows: int = 64,
    checkpoint: Path | None = None,
    title: str = "training",
    every: float = EVERY,
) -> State:
    """Trains what is trainable on `count` examples, and returns the state of the optimizer.

    `loss(model, positions, generator)` gives (n,) losses of some examples; `rows` of them run at a time, and their
    gradients add up to those of the batch. With `checkpoint` the state is kept there every few minutes.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_of(list(trained.values()), recipe)
    total, done = steps_of(count, recipe), 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        console.note(f"{title}: going on after step {done:,} of {total:,}")
    in_an_epoch = -(-count // recipe.batch_size)
    model.train()
    last = time.monotonic()
    with console.progress(title, total, estimate="steps") as advance:
        advance(done)
        for step in range(done, total):
            epoch, place = divmod(step, in_an_epoch)
            if step == done or place == 0:
                order = torch.randperm(count, generator=_generator(seed, "epoch", epoch))
            batch = order[place * recipe.batch_size : (place + 1) * recipe.batch_size]
            draws = _generator(seed, "step", step)
            optimizer.zero_grad(set_to_none=True)
            for part in batch.split(rows):
                (loss(model, part, draws).sum() / len(batch)).backward()
            if recipe.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(list(trained.values()), recipe.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate(step, total, recipe)
            optimizer.step()
            advance(1)
            if checkpoint is not None and time.monotonic() - last > every and step + 1 < total:
                with unfinished(checkpoint) as path:
                    torch.save({**state_of(model, optimizer), "step": step + 1}, path)
                last = time.monotonic()
    model.eval()
    return optimizer.state_dict()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What is trained, buffers such as running means, and the optimizer."""
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    names |= {name for name, _ in model.named_buffers()}
    kept = {name: v for name, v in model.state_dict().items() if name in names}
    return {"model": kept, "optimizer": optimizer.state_dict()}


def _generator(seed: int, what: str, number: int) -> torch.Generator:
    key = hashlib.blake2b(f"{seed} {what} {number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
