"""Whole models with a task and data: the list that every test of gradients runs over.

`make` gives a model whose every parameter and running statistic is away from its initial value, so that
no gradient is right by being zero and no norm is the identity.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import models
from unde.data import Rows
from unde.tasks import CausalLM, Classification, Task


class Waves(Task):
    """A loss in which every output entry counts, each differently."""

    def loss(self, model, batch):
        out = model(batch[0]).flatten(1)
        return (out.sin() * torch.arange(1, out.shape[1] + 1, dtype=out.dtype).cos()).sum(1)


@dataclass(frozen=True)
class Case:
    """`ways` maps a regular expression to the ways (one, or several with "|") that the parameters
    it matches may be covered; all others are hooked."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    task: Callable[[], Task] = Classification
    ways: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def expected(self, parameter: str) -> list[str]:
        found = [way for pattern, way in self.ways.items() if re.search(pattern, parameter)]
        return found[0].split("|") if found else ["hook"]

    def make(self, dtype: torch.dtype = torch.float64, examples: int = 7) -> tuple[nn.Module, Task, Rows]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model = randomized(self.model()).to(dtype)
            task, data = self.task(), cast(self.data(examples), dtype)
        return model.eval(), task, Rows(data, task.collate)


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
        for m in model.modules():
            if isinstance(getattr(m, "running_mean", None), torch.Tensor):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2.0)
    return model


def cast(data: Any, dtype: torch.dtype) -> Any:
    """The data with its floating point tensors in `dtype`."""
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, Mapping):
        return {k: cast(v, dtype) for k, v in data.items()}
    return type(data)(cast(v, dtype) for v in data)


def vectors(n: int) -> Any:
    return torch.randn(n, 7), torch.randint(3, (n,))


def images(size: int) -> Callable[[int], Any]:
    return lambda n: {"pixel_values": torch.randn(n, 2, size, size), "labels": torch.randint(3, (n,))}


def tokens(n: int) -> Any:
    return torch.randint(19, (n, 5)), torch.randint(4, (n,))


def sequences(width: int) -> Callable[[int], Any]:
    return lambda n: (torch.randn(n, 5, width), torch.randint(3, (n,)))


def narrow(n: int) -> Any:
    return torch.randn(n, 6), torch.randint(3, (n,))


def ragged(n: int) -> Any:
    """Texts of 3 to 12 tokens, the longest not first."""
    return [{"input_ids": torch.randint(23, (3 + 5 * i % 10,))} for i in range(n)]


def attention(batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: models.TokenClassifier(models.Attention(batch_first=batch_first))


def recurrent(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: models.TokenClassifier(models.Recurrent(kind))


PACKED = {  # MultiheadAttention reads its parts as bare tensors
    r"in_proj_weight|out_proj": "vmap",
    r"in_proj_bias": "expanded|vmap",
}
RECURRENT = {r"cell\.": "expanded|vmap|loop"}  # which depends on the kernels that torch picks

CASES = [
    Case("mlp", models.mlp, vectors),
    Case("resnet-batchnorm", models.resnet, images(16)),
    Case("resnet-groupnorm", lambda: models.resnet("group"), images(16)),
    Case("vit", models.vit, images(8), ways={r"cls_token|position_embeddings": "expanded"}),
    Case("gpt2", models.gpt2, ragged, CausalLM),
    Case("llama", models.llama, ragged, CausalLM),
    Case("nanogpt", models.NanoGPT, ragged, CausalLM),
    Case("attention-batch-first", attention(True), tokens, ways=PACKED),
    Case("attention-time-first", attention(False), tokens, ways=PACKED),
    Case("encoder", models.Encoder, sequences(6), ways=PACKED),
    Case("lstm", recurrent(nn.LSTM), tokens, ways=RECURRENT),
    Case("gru", recurrent(nn.GRU), tokens, ways=RECURRENT),
    Case("shared", models.SharedBlocks, narrow),
    Case(
        "raw-parameters",
        models.RawParameters,
        sequences(6),
        ways={r"^(token|positions|offsets|layer_scale|temperature|mixing)$": "expanded"},
    ),
]
BY_NAME = {case.name: case for case in CASES}
