"""Rotary position embedding in Triton, with the norm of heads before it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    heads,
    positions,
    cos_sin,
    weight,
    eps,
    token_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    NORM: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = heads + token * token_stride + head * HEAD_DIM
    dims = tl.arange(0, PADDED_HALF)
    turns = dims < HALF
    first = tl.load(base + dims, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + dims, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        rest_dims = 2 * HALF + tl.arange(0, PADDED_REST)
        stays = rest_dims < HEAD_DIM
        rest = tl.load(base + rest_dims, mask=stays, other=0.0).to(tl.float32)
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(rest * rest, 0)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)
        # Rounded between the norm and the rotation, as two separate operations would.
        kind = heads.dtype.element_ty
        first = (first * factor * tl.load(weight + dims, mask=turns, other=0.0)).to(kind).to(tl.float32)
        second = (
            (second * factor * tl.load(weight + HALF + dims, mask=turns, other=0.0)).to(kind).to(tl.float32)
        )
        rest = rest * factor * tl.load(weight + rest_dims, mask=stays, other=0.0)
        tl.store(base + rest_dims, rest, mask=stays)
    row = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * HALF
    cos = tl.load(row + dims, mask=turns, other=0.0)
    sin = tl.load(row + HALF + dims, mask=turns, other=0.0)
    tl.store(base + dims, first * cos - second * sin, mask=turns)
    tl.store(base + HALF + dims, second * cos + first * sin, mask=turns)


def rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor | None, eps: float) -> None:
    """See `Operations.rotate`. The heads of a token must lie together."""
    tokens, count, head_dim = heads.shape
    half = cos_sin.shape[1] // 2
    if tokens:
        _rotate[(tokens, count)](
            heads,
            positions,
            cos_sin,
            cos_sin if weight is None else weight,
            eps,
            heads.stride(0),
            HEAD_DIM=head_dim,
            HALF=half,
            PADDED_HALF=triton.next_power_of_2(half),
            PADDED_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
            NORM=weight is not None,
            num_warps=1,
        )
