"""Convolutions: a linear layer on patches, so projecting the patches is a convolution with few channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.gradients.layers.base import CHUNK, FeatureSink, Rule, fold, register
from unde.projection import Projection

_WIDE = 64  # channels from which on a projection is faster with channels last, though it copies its input
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Rule):
    """Stride, padding of every mode, dilation and groups, in one, two or three dimensions."""

    def __init__(self, module: Any, projections: Mapping[str, Projection]) -> None:
        super().__init__(module, projections)
        self.dims = len(module.kernel_size)
        self.groups = module.groups

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        """The input, which autograd keeps anyway for the convolution: no extra memory."""
        return x if "weight" in self.projections else None

    def inputs(self, p: Projection, x: Tensor) -> Tensor:
        """(X, C, ...) → (X, groups, r, P), or all patches if columns are not projected by themselves."""
        if p.tap_matrix is not None:
            if self.groups > 1:
                return p.cols(self.patches(x).mT).mT
            turn = p.tap_matrix.view(*p.tap_matrix.shape, *[1] * self.dims)
            return self.patches(_CONV[self.dims](x.to(turn.dtype), turn))
        if p.col_matrix is None or not p.factored:
            return self.patches(x)  # (X, groups, in, P)
        m = self.module
        kernel = p.col_matrix.view(-1, *m.weight.shape[1:])  # (r, in/groups, k...)
        padding = m.padding
        if m.padding_mode != "zeros":
            x, padding = self.padded(x), 0
        if self.groups > 1:
            kernel = kernel.repeat(self.groups, *[1] * (self.dims + 1))
        elif self.dims == 2 and len(kernel) >= _WIDE and kernel.device.type == "cpu":
            kernel = kernel.contiguous(memory_format=torch.channels_last)
        a = _CONV[self.dims](x.to(kernel.dtype), kernel, None, m.stride, padding, m.dilation, self.groups)
        return a.flatten(2).unflatten(1, (self.groups, -1))  # (X, groups, r, P)

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        g = g.flatten(2)  # (X, out, P)
        p = self.projections.get("weight")
        if p is not None:
            saved = self.inputs(p, saved)
            if self.groups == 1 and p.factored:
                out.outer("weight", self._projected(p, g), saved[:, 0].mT)
            else:
                out.add("weight", self._grouped(p, saved, g, batch))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(fold(g.sum(2), batch)))

    def _projected(self, p: Projection, g: Tensor) -> Tensor:
        """(X, out, P) → (X, P, r): one product where channels lie last, else a convolution of one pixel."""
        if g.stride(1) == 1:
            return p.rows(g.mT)
        if p.row_matrix is None:
            return g.mT
        return F.conv1d(g.to(p.row_matrix.dtype), p.row_matrix.unsqueeze(2)).mT

    def _grouped(self, p: Projection, saved: Tensor, g: Tensor, batch: int) -> Tensor:
        """Gradients group by group with columns projected or not, then projected rows or whole."""
        g = g.unflatten(1, (self.groups, -1))  # (X, groups, out/groups, P)
        dtype = torch.promote_types(g.dtype, saved.dtype)
        per_example = g.shape[0] // batch
        step = per_example * max(1, CHUNK // (per_example * p.R * saved.shape[2] * g.element_size()))
        parts = []
        for i in range(0, g.shape[0], step):
            rows = torch.matmul(g[i : i + step].to(dtype), saved[i : i + step].to(dtype).mT)
            rows = fold(rows, rows.shape[0] // per_example).flatten(1, 2)  # (b, out, c)
            if not p.factored:
                parts.append(p.flat(rows.flatten(1)))
            else:
                parts.append((rows if p.row_matrix is None else p.row_matrix.to(dtype) @ rows).flatten(1))
        return torch.cat(parts)

    def padded(self, x: Tensor) -> Tensor:
        m = self.module
        sides: list[int] = []
        for d in reversed(range(self.dims)):
            if m.padding == "same":
                total = m.dilation[d] * (m.kernel_size[d] - 1)
                sides += [total // 2, total - total // 2]
            else:
                width = 0 if m.padding == "valid" else m.padding[d]
                sides += [width, width]
        if not any(sides):
            return x
        mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
        return F.pad(x, sides, mode=mode)

    def patches(self, x: Tensor) -> Tensor:
        """(X, C, ...) → (X, groups, C/groups · kernel, positions)."""
        m, x = self.module, self.padded(x)
        for d in range(self.dims):
            span = m.dilation[d] * (m.kernel_size[d] - 1) + 1
            x = x.unfold(2 + d, span, m.stride[d])[..., :: m.dilation[d]]
        # now (X, C, out sizes..., kernel sizes...)
        x = x.unflatten(1, (self.groups, -1))
        n = self.dims
        order = [0, 1, 2, *range(3 + n, 3 + 2 * n), *range(3, 3 + n)]
        x = x.permute(order)  # (X, groups, C/groups, kernel..., out...)
        return x.flatten(2, 2 + n).flatten(3)
