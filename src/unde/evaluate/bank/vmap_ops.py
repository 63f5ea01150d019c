"""Functions of torch written out in single steps, which other ways of training have a use for."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`; a token that may attend to none gets zeros, as there."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    products = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).tril()
        products = products.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        products = products.masked_fill(~attn_mask, -math.inf) if masked else products + attn_mask
    if attn_mask is None:
        shares = products.softmax(-1)
    else:  # a softmax of no number at all has no gradient either
        alone = (products == -math.inf).all(-1, keepdim=True)
        shares = products.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
    return (F.dropout(shares, dropout_p) if dropout_p else shares) @ value


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`F.group_norm`."""
    parts = input.reshape(input.shape[0], num_groups, -1)
    centred = parts - parts.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = (centred * spread).reshape(input.shape)
    by_channel = (-1, *[1] * (input.ndim - 2))
    if weight is not None:
        out = out * weight.view(by_channel)
    return out if bias is None else out + bias.view(by_channel)
