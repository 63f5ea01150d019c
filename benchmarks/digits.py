"""A million handwritten digits: 4,000 of MNIST, each turned and shifted in up to 294 ways, and a small network.

`prepare` writes the digits and the trained network into one file, `make` reads it: every process that is started with
`Recipe("benchmarks.digits:make", …)` has the very same model and data, and does not wait for a training.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unde import Setup
from unde.tasks import Classification

ANGLES = (0, -12, -8, -4, 4, 8)  # degrees
SHIFTS = sorted(itertools.product(range(-3, 4), repeat=2), key=lambda s: abs(s[0]) + abs(s[1]))  # pixels
QUERIES = 100
_FILE = "digits.safetensors"


class Digits(torch.utils.data.Dataset):
    """Example i is digit i mod 4,000, as it is first, then in one variation after the other."""

    def __init__(self, pixels: Tensor, labels: Tensor, examples: int) -> None:
        most = len(ANGLES) * len(SHIFTS) * len(labels)
        if not 0 < examples <= most:
            raise ValueError(f"{examples} examples: expected 1 to {most}")
        self.pixels, self.labels, self.examples = pixels, labels, examples  # (angles, n, 28, 28) uint8, (n,)

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < self.examples:
            raise IndexError(i)
        variation, digit = divmod(i, len(self.labels))
        shift, angle = divmod(variation, len(ANGLES))
        down, right = SHIFTS[shift]
        moved = torch.zeros(28, 28)
        moved[_to(down), _to(right)] = self.pixels[angle, digit, _to(-down), _to(-right)]
        return moved / 255, self.labels[digit]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def prepare(folder: Path) -> None:
    """Digits and a trained network, into a file that `make` reads; the same on every run, but for last bits."""
    from experiments.shared.digits import digits

    if (folder / _FILE).exists():
        return
    found = digits()
    x, y = found.evaluate
    write(folder, *found.train, x[:QUERIES], y[:QUERIES], _trained(*found.train))


def write(folder: Path, x: Tensor, y: Tensor, queries: Tensor, asked: Tensor, model: nn.Module) -> None:
    """What `make` reads: images (n, 1, 28, 28) in [0, 1] and labels, to train on and to ask about."""
    turned = [_turned(x, angle) for angle in ANGLES]
    tensors = {
        "pixels": torch.stack(turned).mul(255).round().to(torch.uint8).squeeze(2),
        "labels": y,
        "queries": queries.squeeze(1).clone(),
        "asked": asked.clone(),
    }
    weights = {f"model.{name}": t for name, t in model.state_dict().items()}
    save_file(tensors | weights, folder / _FILE)


def make(folder: str, examples: int) -> Setup:
    found = load_file(Path(folder) / _FILE)
    model = network()
    model.load_state_dict({k.removeprefix("model."): v for k, v in found.items() if k.startswith("model.")})
    data = Digits(found["pixels"], found["labels"], examples)
    return Setup(model.eval(), Classification(), data, eval_queries=(found["queries"], found["asked"]))


def _trained(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(8):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def _turned(x: Tensor, degrees: int) -> Tensor:
    """Images (n, 1, 28, 28), turned about their middle."""
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False).clamp(0, 1)


def _to(shift: int) -> slice:
    """Where pixels are after a shift; and with the sign turned, where they were."""
    return slice(max(0, shift), 28 + min(0, shift))
