"""Every layer type and option: hooked (not handed to the general ways), and equal to explicit gradients.

Each layer is tried behind another one, and first in a model, where its input needs no gradient.
"""

from functools import partial

import pytest
import torch
from torch import nn

from cases import Waves, randomized
from oracles import TOLERANCE, check
from unde.data import Rows
from unde.gradients.layers import conv

# Of arguments, a function that makes the layer.
conv1d, conv2d, conv3d = (partial(partial, layer) for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def from_transformers(module, name, *args, **options):
    return lambda: getattr(pytest.importorskip(f"transformers.{module}"), name)(*args, **options)


hugging_face_conv1d = from_transformers("pytorch_utils", "Conv1D", 7, 5)
llama_rms_norm = from_transformers("models.llama.modeling_llama", "LlamaRMSNorm", 9, eps=1e-3)
t5_layer_norm = from_transformers("models.t5.modeling_t5", "T5LayerNorm", 9, eps=1e-3)


class CountsFromOne(nn.Module):
    """An RMS norm of nobody's family: its weight is what is added to one, and a gate comes with its input."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(9))

    def forward(self, x):
        h = x * x.sigmoid()
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * (1 + self.scale) + self.shift


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward((ids + 1) % self.num_embeddings)


LAYERS = {
    "linear-2d": (lambda: nn.Linear(7, 8), (7,)),
    "linear-2d-no-bias": (lambda: nn.Linear(7, 8, bias=False), (7,)),
    "linear-3d": (lambda: nn.Linear(7, 8), (4, 7)),
    "linear-4d": (lambda: nn.Linear(7, 8), (2, 3, 7)),
    "linear-4d-no-bias": (lambda: nn.Linear(7, 8, bias=False), (2, 3, 7)),
    "linear-tall": (lambda: nn.Linear(3, 12), (4, 3)),
    "linear-wide": (lambda: nn.Linear(12, 3), (4, 12)),
    "linear-one-output": (lambda: nn.Linear(9, 1), (9,)),
    "hugging-face-conv1d": (hugging_face_conv1d, (4, 5)),
    "hugging-face-conv1d-2d": (hugging_face_conv1d, (5,)),
    "conv1d": (conv1d(3, 7, 3), (3, 9)),
    "conv1d-no-bias": (conv1d(3, 7, 3, bias=False), (3, 9)),
    "conv1d-stride-dilation": (conv1d(3, 7, 3, stride=2, dilation=2, padding=3), (3, 10)),
    "conv1d-same-even": (conv1d(3, 7, 4, padding="same"), (3, 9)),
    "conv1d-circular-same-even": (conv1d(3, 7, 4, padding="same", padding_mode="circular"), (3, 9)),
    "conv1d-depthwise": (conv1d(8, 8, 3, groups=8), (8, 9)),
    "conv2d": (conv2d(3, 7, 3), (3, 6, 5)),
    "conv2d-1x1-tall": (conv2d(3, 12, 1), (3, 4, 3)),
    "conv2d-pad": (conv2d(3, 7, 3, padding=1), (3, 6, 5)),
    "conv2d-pad-uneven": (conv2d(3, 7, (3, 2), padding=(2, 0), stride=(1, 2)), (3, 6, 5)),
    "conv2d-valid": (conv2d(3, 7, 3, padding="valid"), (3, 6, 5)),
    "conv2d-same": (conv2d(3, 7, (2, 3), padding="same"), (3, 6, 5)),
    "conv2d-same-dilation": (conv2d(3, 7, 2, padding="same", dilation=(3, 2)), (3, 6, 5)),
    # a stride that leaves rows of the input over
    "conv2d-stride": (conv2d(3, 7, 3, stride=2, padding=1), (3, 6, 6)),
    "conv2d-patches": (conv2d(3, 7, 2, stride=2), (3, 6, 4)),
    "conv2d-dilation": (conv2d(3, 7, 2, dilation=2), (3, 6, 5)),
    "conv2d-reflect": (conv2d(3, 7, 3, padding=(2, 1), padding_mode="reflect"), (3, 6, 5)),
    "conv2d-circular": (conv2d(3, 7, 3, padding=(2, 1), padding_mode="circular"), (3, 6, 5)),
    "conv2d-replicate": (conv2d(3, 7, 3, padding=(2, 1), padding_mode="replicate"), (3, 6, 5)),
    "conv2d-reflect-same": (conv2d(3, 7, (2, 3), padding="same", padding_mode="reflect"), (3, 6, 5)),
    "conv2d-reflect-valid": (conv2d(3, 7, 3, padding="valid", padding_mode="reflect"), (3, 6, 5)),
    "conv2d-groups": (conv2d(6, 8, 3, groups=2, padding=1, stride=2), (6, 6, 5)),
    "conv2d-groups-no-bias": (conv2d(6, 9, 2, groups=3, bias=False), (6, 4, 4)),
    "conv2d-groups-1x1": (conv2d(6, 12, 1, groups=3), (6, 4, 4)),
    "conv2d-depthwise": (conv2d(8, 8, 3, groups=8, padding=1), (8, 5, 4)),
    "conv2d-depthwise-two-each": (conv2d(4, 8, 3, groups=4, padding=1, stride=2), (4, 5, 4)),
    "conv2d-depthwise-circular": (conv2d(8, 8, 3, groups=8, padding=1, padding_mode="circular"), (8, 5, 4)),
    "conv3d": (conv3d(2, 7, 2), (2, 4, 3, 3)),
    "conv3d-all": (
        conv3d(4, 6, (3, 2, 1), groups=2, padding=(1, 1, 0), stride=(2, 1, 1), dilation=(1, 2, 1)),
        (4, 4, 4, 3),
    ),
    "conv3d-replicate": (conv3d(2, 7, 3, padding=1, padding_mode="replicate"), (2, 3, 3, 2)),
    "layer-norm": (lambda: nn.LayerNorm(9), (4, 9)),
    "layer-norm-2d": (lambda: nn.LayerNorm(9), (9,)),
    "layer-norm-several-axes": (lambda: nn.LayerNorm((3, 5)), (4, 3, 5)),
    "layer-norm-all-axes": (lambda: nn.LayerNorm((3, 5)), (3, 5)),
    "layer-norm-no-bias": (lambda: nn.LayerNorm(9, eps=0.1, bias=False), (4, 9)),
    "rms-norm": (lambda: nn.RMSNorm(9), (4, 9)),
    "rms-norm-eps": (lambda: nn.RMSNorm(9, eps=0.1), (4, 9)),
    "rms-norm-several-axes": (lambda: nn.RMSNorm((3, 5)), (2, 3, 5)),
    "rms-norm-llama": (llama_rms_norm, (4, 9)),
    "layer-norm-t5": (t5_layer_norm, (4, 9)),
    "norm-of-nobody": (CountsFromOne, (4, 9)),
    "norm-of-nobody-square": (CountsFromOne, (9, 9)),
    "group-norm": (lambda: nn.GroupNorm(3, 9, eps=0.1), (9, 4, 3)),
    "group-norm-no-space": (lambda: nn.GroupNorm(2, 8), (8,)),
    "group-norm-instance": (lambda: nn.GroupNorm(8, 8), (8, 5)),
    "batch-norm-1d": (lambda: nn.BatchNorm1d(9), (9,)),
    "batch-norm-1d-length": (lambda: nn.BatchNorm1d(9, eps=0.1), (9, 4)),
    "batch-norm-2d": (lambda: nn.BatchNorm2d(9), (9, 3, 4)),
    "batch-norm-3d": (lambda: nn.BatchNorm3d(9, momentum=None), (9, 2, 3, 2)),
}
PROJECTIONS = ["none", "kron(2)", "kron(6)", "sjlt(6)", "dense(6, normal)"]


def build(layer, shape, behind, dtype, examples=5):
    torch.manual_seed(0)
    before = [nn.Linear(shape[-1], shape[-1], bias=False)] if behind else []
    model = randomized(nn.Sequential(*before, layer())).to(dtype).eval()
    return model, Waves(), Rows((torch.randn(examples, *shape, dtype=dtype),))


def check_hooked(model, task, rows, projection, tolerance):
    found, _ = check(model, task, rows, projection, tolerance, len(rows))
    assert set(found.values()) == {"hook"}


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, projection):
    for behind in (True, False) if projection in ("none", "kron(2)") else (True,):
        check_hooked(*build(*LAYERS[name], behind, torch.float64), projection, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("conv2d")])
def test_wide_projections_with_channels_last(name, dtype, monkeypatch):
    monkeypatch.setattr(conv, "_WIDE", 1)
    tolerance = 1e-10 if dtype == torch.float64 else TOLERANCE[dtype]
    check_hooked(*build(*LAYERS[name], True, dtype), "kron(2)", tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_in_single_precision(name):
    check_hooked(*build(*LAYERS[name], True, torch.float32), "none", TOLERANCE[torch.float32])


EMBEDDINGS = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "padding-from-the-end": {"padding_idx": -1},
    "sparse": {"sparse": True},
}


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("shape", [(), (6,), (2, 4)], ids=str)
def test_embedding(shape, name, projection):
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Embedding(8, 9, **EMBEDDINGS[name]))).double()
    ids = torch.randint(8, (5, *shape))
    ids[3:] = torch.tensor([2, 7]).view(2, *[1] * len(shape))  # two examples of nothing but padding
    check_hooked(model, Waves(), Rows((ids,)), projection, 1e-10)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_an_embedding_that_does_more(projection):
    torch.manual_seed(0)
    model = randomized(nn.Sequential(Doubled(8, 9))).double()
    check_hooked(model, Waves(), Rows((torch.randint(8, (5, 6)),)), projection, 1e-10)
