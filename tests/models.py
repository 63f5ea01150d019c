"""Small models of the kinds that people train, for the list in `cases.py`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class TokenClassifier(nn.Module):
    """Token embedding, a body on (B, T, d), and a linear head on what the body returns."""

    def __init__(self, body, vocabulary=19, width=12, out=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = body
        self.head = nn.Linear(width, out)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


class Attention(nn.Module):
    """A pre-norm block around nn.MultiheadAttention, averaged over positions."""

    def __init__(self, width=12, batch_first=True):
        super().__init__()
        self.batch_first = batch_first
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 3, batch_first=batch_first)
        self.feed = nn.Linear(width, width)

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.feed(x).relu()
        return x.mean(1 if self.batch_first else 0)


class Encoder(nn.Module):
    """torch's own encoder layers, which in evaluation skip their parts for one fused kernel if they may."""

    def __init__(self, width=6, out=3):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 10, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, out)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, width=12):
        super().__init__()
        self.cell = kind(width, width, batch_first=True, bidirectional=False)

    def forward(self, x):
        return self.cell(x)[0][:, -1]


class SharedBlocks(nn.Module):
    """One linear layer used three times, at two places of the module tree, and one norm used twice."""

    def __init__(self, width=6, out=3):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.block = nn.Sequential(self.mix, nn.Tanh())
        self.head = nn.Linear(width, out)

    def forward(self, x):
        h = self.norm(self.mix(x)).tanh()
        h = self.norm(x + self.block(h))
        return self.head(self.mix(h))


class CausalBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Positions are looked up once, with a 1-d arange, for the whole batch; the head is the embedding."""

    def __init__(self, vocabulary=23, context=16, width=12, heads=3, depth=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, attention_mask=None):
        # Right padding and causal attention: the mask is not needed.
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RawParameters(nn.Module):
    """Parameters that belong to no layer: tokens, positions with and without a batch axis, scales."""

    def __init__(self, tokens=5, width=6, out=3):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens + 1, width))
        self.offsets = nn.Parameter(torch.zeros(tokens + 1, width))
        self.layer_scale = nn.Parameter(torch.ones(width))
        self.temperature = nn.Parameter(torch.ones(()))
        self.mixing = nn.Parameter(torch.eye(width))  # a matrix that multiplies from the right
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, out)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x + self.offsets
        x = x + self.layer_scale * self.inner(x).tanh()
        x = x + x.tanh() @ self.mixing
        return self.head(x[:, 0] + x.mean(1)) * self.temperature


class Tokens(nn.Module):
    """An output for each token, from its embedding alone."""

    def __init__(self, vocabulary=7, width=4, out=7):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, out)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embedding(input_ids))


class Denoiser(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.time = nn.Conv2d(2, width, 3, padding=1), nn.Linear(1, width)
        self.last = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, sample, timestep):
        time = self.time(timestep.to(sample.dtype)[:, None] / 100)
        return self.last(torch.tanh(self.first(sample) + time[:, :, None, None]))


def mlp():
    return nn.Sequential(
        nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9, bias=False), nn.GELU(), nn.Linear(9, 3)
    )


def resnet(norm="batch"):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "num_channels": 2,
        "embedding_size": 6,
        "hidden_sizes": [6, 8],
        "depths": [1, 2],
        "num_labels": 3,
    }
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(layer_type="basic", **sizes))
    if norm == "group":
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(2, child.num_features))
    return model


def vit():
    transformers = pytest.importorskip("transformers")
    images = {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}
    layers = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**images, **layers))


def gpt2(attention="sdpa"):
    transformers = pytest.importorskip("transformers")
    tokens = {"vocab_size": 23, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**tokens, **sizes, attn_implementation=attention)
    )


def llama(attention="sdpa"):
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 23, "max_position_embeddings": 16, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**layers, **tokens, attn_implementation=attention)
    )
