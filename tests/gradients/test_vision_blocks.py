"""Modules as torchvision and timm write them, by hand: a fast way for each, and features equal to gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import randomized
from oracles import check, slow_gradients
from unde.data import Rows
from unde.tasks import Classification


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of an image."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LayerScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(1e-5 * torch.ones(width))

    def forward(self, x):
        return x * self.gamma


class LayerScale2d(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.gamma.view(1, -1, 1, 1)


class GlobalResponseNorm(nn.Module):
    """Of ConvNeXt V2, on channels last."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        size = x.norm(p=2, dim=(1, 2), keepdim=True)
        return x + torch.addcmul(self.bias, self.weight, x * size / (size.mean(-1, keepdim=True) + 1e-6))


class DropPath(nn.Module):
    """Stochastic depth: random in training, nothing in evaluation."""

    def forward(self, x):
        if not self.training:
            return x
        return x * x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.5)


class SqueezeExcite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, 3, 1), nn.Conv2d(3, width, 1)

    def forward(self, x):
        return x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's norm with an activation behind it: a forward of its own."""

    def forward(self, x):
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return F.silu(x, inplace=True)


class GroupNormAct(nn.GroupNorm):
    def forward(self, x):
        return F.relu(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class ConvNet(nn.Module):
    """Conv-BN-act, a depthwise block with squeeze and excitation, a ConvNeXt block."""

    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.act, self.group = BatchNormAct2d(width), GroupNormAct(2, width)
        self.excite, self.drop = SqueezeExcite(width), DropPath()
        self.norm, self.scale2d = LayerNorm2d(width), LayerScale2d(width)
        self.up, self.respond, self.down = nn.Linear(width, 8), GlobalResponseNorm(8), nn.Linear(8, width)
        self.scale = LayerScale(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.drop(self.scale2d(self.excite(self.group(self.act(self.depthwise(x))))))
        h = self.norm(x).permute(0, 2, 3, 1)
        h = self.scale(self.down(self.respond(self.up(h).relu())))
        return self.head((x + self.drop(h.permute(0, 3, 1, 2))).mean((2, 3)))


class WindowAttention(nn.Module):
    """Swin's: windows are folded into the batch, and a table gives a bias for each pair of positions in a window."""

    def __init__(self, width=6, heads=2, window=2, added_axis=True):
        super().__init__()
        self.heads, self.window, self.added_axis = heads, window, added_axis
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        place = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        apart = (place[:, :, None] - place[:, None] + window - 1).permute(1, 2, 0)
        self.register_buffer("relative_position_index", apart[..., 0] * (2 * window - 1) + apart[..., 1])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, h, w, c = x.shape
        s = self.window
        x = x.view(b, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, s * s, c)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias = bias.view(s * s, s * s, -1).permute(2, 0, 1).contiguous()
        scores = scores + (bias.unsqueeze(0) if self.added_axis else bias)
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x.view(b, h // s, w // s, s, s, c).transpose(2, 3).reshape(b, h, w, c)


class Swin(nn.Module):
    def __init__(self, added_axis=True):
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 2, 2)
        self.norm, self.attention = nn.LayerNorm(6), WindowAttention(added_axis=added_axis)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        return self.head((x + self.attention(self.norm(x))).mean((1, 2)))


class VisionTransformer(nn.Module):
    """Class token, register tokens and position embeddings as bare parameters, layer scale behind the attention."""

    def __init__(self, width=6):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.reg_token = nn.Parameter(torch.zeros(1, 2, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, width))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.RMSNorm(3), nn.RMSNorm(3)
        self.scale, self.head = LayerScale(width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT + self.pos_embed
        x = torch.cat([t.expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token)] + [x], 1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = (
            F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2)
        )
        return self.head((x + self.scale(attended))[:, 0])


MODELS = {
    "convnet": (ConvNet, {}),
    "swin": (Swin, {"relative_position_bias_table": "deferred"}),
    "swin-broadcast": (lambda: Swin(False), {"relative_position_bias_table": "deferred"}),
    "vit": (VisionTransformer, {"cls_token": "expanded", "reg_token": "expanded", "pos_embed": "expanded"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_gradients_of_single_examples(name):
    build, others = MODELS[name]
    torch.manual_seed(0)
    model, rows = (
        randomized(build()).double(),
        Rows((torch.randn(7, 3, 8, 8).double(), torch.randint(3, (7,)))),
    )
    truth = slow_gradients(model.eval(), Classification(), rows)
    # as after training: features are taken in evaluation all the same
    found, _ = check(model.train(), Classification(), rows, truth=truth)
    for parameter, way in found.items():
        assert way == others.get(parameter.rpartition(".")[2], "hook"), f"{parameter}: {way}"


class Switched(nn.Module):
    """Something that looks like a scale and is none: its parameter is squared, or only some of it is used."""

    def __init__(self, how):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x * self.weight.square() if self.how == "squared" else x * self.weight.flip(0).cumsum(0)


@pytest.mark.parametrize("how", ["squared", "summed"])
def test_lookalikes_go_another_way(how):
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Linear(5, 5), Switched(how), nn.Linear(5, 3))).double()
    rows = Rows((torch.randn(6, 5).double(), torch.randint(3, (6,))))
    found, _ = check(model, Classification(), rows, batch_size=4)
    assert found["1.weight"] != "hook"
