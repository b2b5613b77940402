"""Matrix products with group-quantized weights in Triton: the codes are converted to numbers inside the product.

Codes are stored in chunks of inputs: a tile of a chunk is contiguous, and its inputs share one scale per output. A
program multiplies a tile of rows by the codes of a chunk, and scales the product of the chunk, which is cheaper than to
scale each weight. With few rows there are few tiles, so the chunks are split among programs, and a second kernel sums
the parts.

Experts are stored as one matrix with the outputs of all of them. A tile of rows of one expert is multiplied with its
part; see `triton_experts`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from neso.engine.runners.torch.grouped_weights import GroupedWeights
from neso.engine.runners.torch.triton_experts import TILE_SLOTS, Tiles, decode_e4m3

MAX_PRODUCT_ROWS = 256
"""With more rows it is faster to dequantize the matrix once for a dense product."""

_MAX_SPLITS = 8


# Not specialized, because the number of rows changes with every step.
@triton.jit(do_not_specialize=["rows", "chunks", "chunks_per_group", "chunks_per_split"])
def _multiply(
    out,  # [rows, outputs]; or parts to be summed, float32[splits, rows, outputs]; or of slots, [slots, outputs]
    x,  # [rows, inputs]
    x_scales,  # ROUNDED: float32[chunks, rows]
    codes,
    scales,
    offsets,
    bias,
    slots,  # of experts; see `Tiles`
    tile_experts,
    num_tiles,
    factor,
    rows,
    inputs,
    outputs,
    stride,  # outputs of all matrices that are stored together
    chunks,
    chunks_per_group,
    chunks_per_split,
    SLOTS_PER_ROW: tl.constexpr,  # 0: no experts
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(2)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if SLOTS_PER_ROW:
        if tile >= tl.load(num_tiles):
            return
        out_row = tl.load(slots + tile * ROWS + tl.arange(0, ROWS))
        row = out_row // SLOTS_PER_ROW
        stored = tl.load(tile_experts + tile).to(tl.int64) * outputs + output
    else:
        out_row = tile * ROWS + tl.arange(0, ROWS)
        row, stored = out_row, output
    row_exists, output_exists = row < rows, output < outputs
    x_row = x + row.to(tl.int64)[:, None] * inputs
    BYTES: tl.constexpr = CHUNK // 2 if FORMAT == "int4" else CHUNK
    at = tl.arange(0, BYTES)
    kind = x.dtype.element_ty
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for chunk in range(split * chunks_per_split, tl.minimum((split + 1) * chunks_per_split, chunks)):
        wide_chunk = tl.cast(chunk, tl.int64)
        place = wide_chunk * stride * BYTES
        # [BYTES, OUTPUTS]
        packed = tl.load(
            codes + place + stored[None, :] * BYTES + at[:, None], mask=output_exists[None, :], other=0
        )
        column = chunk * CHUNK + at
        low = tl.load(
            x_row + column[None, :], mask=row_exists[:, None] & (column < inputs)[None, :], other=0.0
        )
        if FORMAT == "int4":
            column += BYTES
            high = tl.load(
                x_row + column[None, :], mask=row_exists[:, None] & (column < inputs)[None, :], other=0.0
            )
            signed = packed.to(tl.int8, bitcast=True)
            product = tl.dot(low, ((signed << 4) >> 4).to(kind), input_precision="ieee")
            product = tl.dot(high, (signed >> 4).to(kind), product, input_precision="ieee")
        elif FORMAT == "int8":
            product = tl.dot(low, packed.to(tl.int8, bitcast=True).to(kind), input_precision="ieee")
        elif ROUNDED:
            product = tl.dot(low, packed.to(kind, bitcast=True))
        else:
            product = tl.dot(low, decode_e4m3(packed, kind), input_precision="ieee")
        group = wide_chunk // chunks_per_group * stride
        scale = tl.load(scales + group + stored, mask=output_exists, other=0.0).to(tl.float32)
        if ROUNDED:
            x_scale = tl.load(x_scales + wide_chunk * rows + row, mask=row_exists, other=0.0)
            product = product * x_scale[:, None]
        total += product * scale[None, :]
        if OFFSETS:
            offset = tl.load(offsets + group + stored, mask=output_exists, other=0.0).to(tl.float32)
            summed = tl.sum(low.to(tl.float32), axis=1)
            if FORMAT == "int4":
                summed += tl.sum(high.to(tl.float32), axis=1)
            total += summed[:, None] * offset[None, :]
    total = total * factor
    if BIAS:
        total += tl.load(bias + output, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    target = out + (split.to(tl.int64) * rows + out_row)[:, None] * outputs + output[None, :]
    tl.store(target, total, mask=row_exists[:, None] & output_exists[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _sum_splits(out, parts, bias, rows, outputs, splits, BIAS: tl.constexpr, OUTPUTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < outputs
    total = tl.zeros([OUTPUTS], tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * rows + row) * outputs + output, mask=exists, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, total, mask=exists)


@triton.jit(do_not_specialize=["chunks_per_group"])
def _dequantize(
    out,  # [outputs, inputs]
    codes,
    scales,
    offsets,
    factor,
    inputs,
    outputs,
    stride,
    chunks_per_group,
    FORMAT: tl.constexpr,
    OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    exists = output < outputs
    BYTES: tl.constexpr = CHUNK // 2 if FORMAT == "int4" else CHUNK
    at = tl.arange(0, BYTES)
    place = chunk.to(tl.int64) * stride * BYTES
    # [OUTPUTS, BYTES]
    packed = tl.load(codes + place + output[:, None] * BYTES + at[None, :], mask=exists[:, None], other=0)
    group = (chunk // chunks_per_group).to(tl.int64) * stride
    scale = tl.load(scales + group + output, mask=exists, other=0.0).to(tl.float32)[:, None]
    offset = tl.zeros([OUTPUTS, 1], tl.float32)
    if OFFSETS:
        offset += tl.load(offsets + group + output, mask=exists, other=0.0).to(tl.float32)[:, None]
    column = chunk * CHUNK + at
    signed = packed.to(tl.int8, bitcast=True)
    if FORMAT == "int4":
        low = ((signed << 4) >> 4).to(tl.float32)
        high = out + output[:, None] * inputs + (column + BYTES)[None, :]
        tl.store(
            high,
            factor * (scale * (signed >> 4).to(tl.float32) + offset),
            mask=exists[:, None] & (column + BYTES < inputs)[None, :],
        )
    elif FORMAT == "int8":
        low = signed.to(tl.float32)
    else:
        low = decode_e4m3(packed, tl.float32)
    tl.store(
        out + output[:, None] * inputs + column[None, :],
        factor * (scale * low + offset),
        mask=exists[:, None] & (column < inputs)[None, :],
    )


@triton.jit(do_not_specialize=["rows", "chunks"])
def _round_chunks(codes, scales, x, rows, inputs, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    exists = column < inputs
    values = tl.load(x + row * inputs + column, mask=exists, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=1) / 448.0, 1e-12)
    tl.store(scales + chunk.to(tl.int64) * rows + row, scale, mask=chunk < chunks)
    rounded = (values / scale[:, None]).to(codes.dtype.element_ty)
    tl.store(codes + row * inputs + column, rounded, mask=exists)


def round_chunks(x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Round x[rows, inputs] to codes e4m3[rows, inputs] with a scale for each row and `chunk` inputs.

    The scales are float32[chunks, rows]. The largest number of a chunk becomes 448.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    chunks = triton.cdiv(inputs, chunk)
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(chunks, rows, dtype=torch.float32)
    if rows:
        grid = (rows, triton.cdiv(chunks, 16))
        _round_chunks[grid](codes, scales, x, rows, inputs, chunks, CHUNK=chunk, CHUNKS=16, num_warps=4)
    return codes, scales


def dequantize(weights: GroupedWeights, dtype: torch.dtype) -> Tensor:
    """Return the weights [outputs, inputs]."""
    chunks, outputs, _ = weights.codes.shape
    out = weights.codes.new_empty(outputs, weights.inputs, dtype=dtype)
    _dequantize[(chunks, triton.cdiv(outputs, 64))](
        out,
        weights.codes,
        weights.scales,
        weights.scales if weights.offsets is None else weights.offsets,
        _decoded_factor(weights),
        weights.inputs,
        outputs,
        weights.scales.stride(0),
        weights.group_size // weights.chunk,
        FORMAT=weights.format,
        OFFSETS=weights.offsets is not None,
        CHUNK=weights.chunk,
        OUTPUTS=64,
        num_warps=4,
    )
    return out


class _Tile(NamedTuple):
    """Rows and outputs that a program computes, and how it is compiled."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


_FEW_ROWS = 16
_EXPERT_TILE = _Tile(TILE_SLOTS, 64, 4, 2)


def multiply(x: Tensor, weights: GroupedWeights, bias: Tensor | None, rounded: bool = False) -> Tensor:
    """Return x @ weights.T + bias, [rows, outputs] in the dtype of x[rows, inputs]; sums are in float32.

    rounded: round x to e4m3 with a scale for each row and chunk; for e4m3 weights, on GPUs that multiply e4m3.
    """
    rows, outputs, chunks = len(x), weights.outputs, len(weights.codes)
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    tile = _tile(rows, weights.chunk, rounded)
    row_tiles = triton.cdiv(rows, tile.rows)
    splits = _splits(row_tiles * triton.cdiv(outputs, tile.outputs), chunks, x.device)
    # None without chunks.
    splits = triton.cdiv(chunks, triton.cdiv(chunks, splits))
    if splits == 1:
        _launch(x, weights, out, tile, row_tiles, rounded, bias=bias)
        return out
    parts = x.new_empty(splits, rows, outputs, dtype=torch.float32)
    _launch(x, weights, parts, tile, row_tiles, rounded, splits=splits)
    _sum_splits[(rows, triton.cdiv(outputs, 512))](
        out,
        parts,
        weights.scales if bias is None else bias,
        rows,
        outputs,
        splits,
        BIAS=bias is not None,
        OUTPUTS=512,
        num_warps=4,
    )
    return out


def multiply_experts(
    x: Tensor, weights: GroupedWeights, tiles: Tiles, out: Tensor, rounded: bool = False
) -> None:
    """Write the product of the row of each slot with the matrix of its expert to out[slots, outputs].

    x[rows, inputs] has a row for each slot or for each token; the weights have the outputs of all experts. See
    `multiply` for `rounded`.
    """
    if weights.input_order is not None:
        x = x.index_select(1, weights.input_order)
    _launch(x, weights, out, _EXPERT_TILE, len(tiles.experts), rounded, experts=tiles)


def _launch(
    x: Tensor,
    weights: GroupedWeights,
    out: Tensor,
    tile: _Tile,
    row_tiles: int,
    rounded: bool,
    *,
    splits: int = 1,
    bias: Tensor | None = None,
    experts: Tiles | None = None,
) -> None:
    """Launch `_multiply` on x[rows, inputs]; out: see there."""
    x = x.contiguous()
    outputs, chunks = out.shape[-1], len(weights.codes)
    codes, x_scales = round_chunks(x, weights.chunk) if rounded else (x, weights.scales)
    unused = weights.scales
    _multiply[(row_tiles, triton.cdiv(outputs, tile.outputs), splits)](
        out,
        codes,
        x_scales,
        weights.codes,
        weights.scales,
        unused if weights.offsets is None else weights.offsets,
        unused if bias is None else bias,
        unused if experts is None else experts.slots,
        unused if experts is None else experts.experts,
        unused if experts is None else experts.count,
        weights.factor if rounded else _decoded_factor(weights),
        len(x),
        weights.inputs,
        outputs,
        weights.scales.stride(0),
        chunks,
        weights.group_size // weights.chunk,
        triton.cdiv(chunks, splits),
        SLOTS_PER_ROW=0 if experts is None else len(out) // len(x),
        FORMAT=weights.format,
        ROUNDED=rounded,
        OFFSETS=weights.offsets is not None,
        BIAS=bias is not None,
        CHUNK=weights.chunk,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _decoded_factor(weights: GroupedWeights) -> float:
    """Return the factor of codes converted inside a kernel; see `decode_e4m3`."""
    return weights.factor * 256 if weights.format == "e4m3" else weights.factor


def _tile(rows: int, chunk: int, rounded: bool) -> _Tile:
    if rows <= _FEW_ROWS:
        return _Tile(_FEW_ROWS, 64 if chunk == 128 else 128, 4, 4)
    if rounded and rows > MAX_PRODUCT_ROWS:
        return _Tile(128, 128, 8, 2)
    return _Tile(64, 64, 4, 2)


def _splits(programs: int, chunks: int, device: torch.device) -> int:
    """Return the number of splits for about four programs per multiprocessor, with four chunks or more each."""
    if device.type != "cuda":
        return 4
    wanted = 4 * torch.cuda.get_device_properties(device).multi_processor_count // programs
    return max(1, min(_MAX_SPLITS, wanted, chunks // 4))
