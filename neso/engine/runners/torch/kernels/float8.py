"""Rounding of activations to float8 in Triton, with a scale for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _round_rows(codes, scales, x, width, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    exists = columns < width
    values = tl.load(x + row * width + columns, mask=exists, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / 448.0, 1e-12)
    tl.store(scales + row, scale)
    tl.store(codes + row * width + columns, (values / scale).to(codes.dtype.element_ty), mask=exists)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes e4m3[rows, width] and scales float32[rows, 1] of x[rows, width]: the largest of a row becomes 448."""
    x = x.contiguous()
    rows, width = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        padded = triton.next_power_of_2(width)
        _round_rows[(rows,)](codes, scales, x, width, PADDED=padded, num_warps=min(max(padded // 512, 1), 16))
    return codes, scales
