"""RMSNorm in Triton, alone and together with the addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(out, x, residual, weight, eps, width, ADD: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    exists = columns < width
    values = tl.load(x + row * width + columns, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        # Rounded before it is normed: the residual stream has the dtype of the activations.
        pointer = residual + row * width + columns
        before = tl.load(pointer, mask=exists, other=0.0)
        summed = (before.to(tl.float32) + values).to(before.dtype)
        tl.store(pointer, summed, mask=exists)
        values = summed.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    scaled = values * factor * tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, scaled, mask=exists)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The norm of x[T, width] by weight[width]; with a residual, residual += x first and the norm of that."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    if rows:
        _rms_norm[(rows,)](
            out,
            x,
            x if residual is None else residual,
            weight,
            eps,
            width,
            ADD=residual is not None,
            PADDED=padded,
            num_warps=min(max(padded // 512, 1), 16),
        )
    return out
