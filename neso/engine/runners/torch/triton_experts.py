"""Mixture of experts in Triton: the rows of all experts are multiplied in one launch (grouped GEMM).

A slot is a token and one of its experts: slot token * top_k + rank. The slots of an expert are padded to tiles of 64,
so that a tile is multiplied with one matrix. The host never reads how many rows an expert has: the grid has as many
tiles as there can be, and those without slots end at once. Tiles have the same shape for every number of tokens, so
that a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from neso.engine.runners.torch.linears import ExpertMatrices

TILE_SLOTS = 64
_COLUMNS = 128
_DEPTH_BYTES = 128
_GROUP = 8
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a step, on the device.

    - slots int32[max_tiles * 64]: the slots of each tile; the number of slots where a tile is padded
    - experts int32[max_tiles]: the expert of each tile
    - count int32[1]: number of tiles in use; the contents of the others are undefined
    """

    slots: Tensor
    experts: Tensor
    count: Tensor


# Not specialized, because the number of tokens changes with every step.
@triton.jit(do_not_specialize=["num_slots"])
def _assign_tiles(
    slots,
    tile_experts,
    num_tiles,
    chosen,
    num_slots,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes the tiles of one expert, after counting the slots of all experts."""
    expert, num_experts = tl.program_id(0), tl.num_programs(0)
    counts = tl.zeros((PADDED,), tl.int32)
    for start in range(0, num_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        choice = tl.load(chosen + slot, mask=slot < num_slots, other=PADDED - 1).to(tl.int32)
        counts += tl.histogram(choice, PADDED)
    index = tl.arange(0, PADDED)
    tiles = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    base = slots + first * TILE
    written = tl.zeros((), tl.int32)
    for start in range(0, num_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        choice = tl.load(chosen + slot, mask=slot < num_slots, other=PADDED - 1).to(tl.int32)
        is_own = (choice == expert).to(tl.int32)
        tl.store(base + written + tl.cumsum(is_own, axis=0) - 1, slot, mask=is_own > 0)
        written += tl.sum(is_own, axis=0)
    padding = written + tl.arange(0, TILE)
    tl.store(base + padding, tl.zeros((TILE,), tl.int32) + num_slots, mask=padding < own * TILE)
    for tile in range(own):
        tl.store(tile_experts + first + tile, expert)
    if expert == num_experts - 1:
        tl.store(num_tiles, first + own)


def assign_tiles(chosen: Tensor, num_experts: int) -> Tiles:
    """Sort the slots of chosen int[T, top_k] by expert, in the order of the slots, with T >= 1."""
    num_slots = chosen.numel()
    max_tiles = (num_slots + min(num_slots, num_experts) * (TILE_SLOTS - 1)) // TILE_SLOTS
    slots, experts, count = (
        torch.empty(size, dtype=torch.int32, device=chosen.device)
        for size in (max_tiles * TILE_SLOTS, max_tiles, 1)
    )
    # One more than the experts: slots after the last one are counted there.
    padded = triton.next_power_of_2(num_experts + 1)
    _assign_tiles[(num_experts,)](
        slots,
        experts,
        count,
        chosen.contiguous(),
        num_slots,
        PADDED=padded,
        TILE=TILE_SLOTS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Tiles(slots, experts, count)


@triton.jit
def decode_e4m3(bits, kind: tl.constexpr):
    """Return the e4m3 numbers with these bits, uint8, divided by 256: as float16 their exponent is 8 smaller.

    GPUs before compute capability 8.9 have no instruction for it.
    """
    wide = bits.to(tl.uint16)
    return (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True).to(kind)


@triton.jit(do_not_specialize=["num_slots"])
def _multiply_tile(
    out,  # [slots, outputs]
    x,  # [slots / PER_ROW, inputs]; ROUNDED: e4m3
    x_scales,  # ROUNDED: float32[slots / PER_ROW]
    matrices,  # [experts, outputs, inputs]; FLOAT8: bits of e4m3
    scales,  # FLOAT8 or ROUNDED: float32[experts, outputs]
    slots,
    tile_experts,
    num_tiles,
    num_slots,
    outputs,
    inputs,
    PER_ROW: tl.constexpr,
    FLOAT8: tl.constexpr,
    ROUNDED: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run at the same time share the rows of GROUP tiles, and the columns of a few matrices.
    column_tiles = tl.cdiv(outputs, COLUMNS)
    max_tiles = tl.num_programs(0) // column_tiles
    group, within = tl.program_id(0) // (GROUP * column_tiles), tl.program_id(0) % (GROUP * column_tiles)
    height = tl.minimum(max_tiles - group * GROUP, GROUP)
    tile = group * GROUP + within % height
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    slot = tl.load(slots + tile * TILE + tl.arange(0, TILE))
    slot_exists = slot < num_slots
    row = (slot // PER_ROW).to(tl.int64)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    column_exists = column < outputs
    matrix = matrices + expert * outputs * inputs
    product = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, inputs, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        depth_exists = depth < inputs
        values = tl.load(
            x + row[:, None] * inputs + depth[None],
            mask=slot_exists[:, None] & depth_exists[None],
            other=0.0,
        )
        weights = tl.load(
            matrix + column[:, None] * inputs + depth[None],
            mask=column_exists[:, None] & depth_exists[None],
            other=0.0,
        )
        if ROUNDED:
            # Tensor cores add products of float8 with few bits; sums of DEPTH products are added in float32.
            product = tl.dot(values, weights.T, product, max_num_imprecise_acc=DEPTH)
        else:
            if FLOAT8:
                weights = (decode_e4m3(weights, tl.float16) * 256.0).to(values.dtype)
            product = tl.dot(values, weights.T, product, input_precision="ieee")
    if FLOAT8 or ROUNDED:
        product *= tl.load(scales + expert * outputs + column, mask=column_exists, other=0.0)[None]
    if ROUNDED:
        product *= tl.load(x_scales + row, mask=slot_exists, other=0.0)[:, None]
    target = out + slot.to(tl.int64)[:, None] * outputs + column[None]
    tl.store(target, product.to(out.dtype.element_ty), mask=slot_exists[:, None] & column_exists[None])


def multiply_tiles(
    x: Tensor, x_scales: Tensor | None, matrices: ExpertMatrices, tiles: Tiles, out: Tensor
) -> None:
    """Write the product of the row of each slot with the matrix of its expert to out[slots, outputs].

    x[rows, inputs] has a row for each slot or for each token. With x_scales float32[rows], x and the matrices are e4m3.
    """
    num_slots, outputs = out.shape
    column_tiles = triton.cdiv(outputs, _COLUMNS)
    rounded, float8 = x_scales is not None, x_scales is None and matrices.scales is not None
    _multiply_tile[(len(tiles.experts) * column_tiles,)](
        out,
        x.contiguous(),
        x if x_scales is None else x_scales,
        matrices.values.view(torch.uint8) if float8 else matrices.values,
        x if matrices.scales is None else matrices.scales,
        tiles.slots,
        tiles.experts,
        tiles.count,
        num_slots,
        outputs,
        x.shape[1],
        PER_ROW=num_slots // len(x),
        FLOAT8=float8,
        ROUNDED=rounded,
        TILE=TILE_SLOTS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH_BYTES // x.element_size(),
        GROUP=_GROUP,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _weighted_sum(out, results, weights, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        values = tl.load(results + (token * TOP_K + rank) * width + column, mask=exists, other=0.0)
        total += values.to(tl.float32) * tl.load(weights + token * TOP_K + rank)
    tl.store(out + token * width + column, total, mask=exists)


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Sum results[T * top_k, width] of each token with weights float32[T, top_k], in order: float32[T, width]."""
    (tokens, top_k), width = weights.shape, results.shape[1]
    out = results.new_empty(tokens, width, dtype=torch.float32)
    grid = (tokens, triton.cdiv(width, _BLOCK))
    _weighted_sum[grid](out, results, weights.contiguous(), width, TOP_K=top_k, BLOCK=_BLOCK, num_warps=4)
    return out
