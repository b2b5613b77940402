"""Operations of a decoder layer as Triton kernels: norms, rotation, gating, cache writes, float8 rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from neso.engine.runners.torch.attention import Attention
from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.linears import ExpertMatrices, QuantizedExperts
from neso.engine.runners.torch.operations import ACTIVATIONS, loop_over_experts
from neso.engine.runners.torch.triton_adapters import adapt
from neso.engine.runners.torch.triton_attention import paged_attention
from neso.engine.runners.torch.triton_experts import assign_tiles, multiply_tiles, weighted_sum
from neso.engine.runners.torch.triton_quantized import multiply_experts
from neso.engine.runners.torch.weights import Experts
from neso.engine.specs.decoder_spec import Activation


@triton.jit
def _store(target, source, slots, source_stride, width, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    slot = tl.load(slots + token).to(tl.int64)
    values = tl.load(source + token * source_stride + columns, mask=columns < width)
    tl.store(target + slot * width + columns, values, mask=columns < width)


def store(keys: Tensor, values: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """See `Operations.store`. The heads of a token must be contiguous."""
    for source, target in ((keys, cache.keys), (values, cache.values)):
        tokens, heads, dim = source.shape
        if tokens:
            width = heads * dim
            _store[(tokens,)](
                target,
                source,
                slots,
                source.stride(0),
                width,
                PADDED=triton.next_power_of_2(width),
                num_warps=2,
            )


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
    """Round x[rows, width] to codes e4m3[rows, width] and scales float32[rows, 1].

    The maximum of a row becomes 448.
    """
    x = x.contiguous()
    rows, width = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        padded = triton.next_power_of_2(width)
        _round_rows[(rows,)](codes, scales, x, width, PADDED=padded, num_warps=min(max(padded // 512, 1), 16))
    return codes, scales


_BLOCK = 1024


@triton.jit
def _gated(out, gate_up, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask=exists, other=0.0)
    up = tl.load(gate_up + (token * 2 + 1) * width + columns, mask=exists, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # 0.5 * (1 + tanh(y)) is sigmoid(2 y).
        wide = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        wide = wide * tl.sigmoid(wide)
    # Rounded between the activation and the product, like two separate operations.
    tl.store(out + token * width + columns, wide.to(gate.dtype) * up, mask=exists)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `Operations.gated`."""
    if activation not in ("silu", "gelu_tanh"):
        gate, other = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * other
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    if tokens:
        grid = (tokens, triton.cdiv(width, _BLOCK))
        _gated[grid](out, gate_up, width, GELU=activation == "gelu_tanh", BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _rms_norm(out, x, residual, weight, eps, width, ADD: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    exists = columns < width
    values = tl.load(x + row * width + columns, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        # Rounded before the norm, because the residual stream has the dtype of the activations.
        pointer = residual + row * width + columns
        before = tl.load(pointer, mask=exists, other=0.0)
        summed = (before.to(tl.float32) + values).to(before.dtype)
        tl.store(pointer, summed, mask=exists)
        values = summed.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    scaled = values * factor * tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, scaled, mask=exists)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x[T, width] with weight[width]; with a residual, add x to it and return its norm."""
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
        # Rounded between the norm and the rotation, like two separate operations.
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
    """See `Operations.rotate`. The heads of a token must be contiguous."""
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


class TritonOperations:
    """See `Operations`. Steps can be captured in CUDA graphs, because nothing synchronizes with the host, except a loop
    over experts that are not stacked.

    - attention: may be that of a library, which cannot be captured
    - multiplies_float8: the GPU multiplies e4m3, so the inputs of experts in float8 are rounded too
    """

    def __init__(self, attention: Attention = paged_attention, multiplies_float8: bool = False) -> None:
        self.attention, self.multiplies_float8 = attention, multiplies_float8

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, residual, weight, eps)

    rotate = staticmethod(rotate)
    store = staticmethod(store)
    gated = staticmethod(gated)
    adapt = staticmethod(adapt)

    def experts(
        self, x: Tensor, experts: Experts, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        if not len(x):
            return x.new_empty(x.shape, dtype=torch.float32)
        gate_up, down = experts.gate_up, experts.down
        if isinstance(gate_up, Sequence) or isinstance(down, Sequence):
            return loop_over_experts(self, x, experts, chosen, weights, activation)
        tiles, num_slots = assign_tiles(chosen, experts.count), chosen.numel()

        def multiply(rows: Tensor, matrices: ExpertMatrices | QuantizedExperts) -> Tensor:
            out = rows.new_empty(num_slots, matrices.outputs)
            if isinstance(matrices, QuantizedExperts):
                rounded = self.multiplies_float8 and matrices.weights.format == "e4m3"
                multiply_experts(rows, matrices.weights, tiles, out, rounded)
            elif matrices.scales is not None and self.multiplies_float8:
                multiply_tiles(*round_rows(rows), matrices, tiles, out)
            else:
                multiply_tiles(rows, None, matrices, tiles, out)
            return out

        inner = gated(multiply(x, gate_up), activation)
        return weighted_sum(multiply(inner, down), weights)
