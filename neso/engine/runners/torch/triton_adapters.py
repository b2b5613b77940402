"""LoRA adapters in Triton: products with A and B of many adapters in one launch each (arXiv 2310.18547, 2311.03285).

A program computes a tile of rows that have the same adapter. The number of programs depends only on the number of
tiles; those of empty tiles and of targets that are not adapted end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from neso.engine.runners.torch.adapters import EXPAND_COLUMNS, AdapterStack
from neso.engine.runners.torch.step_inputs import AdapterRows

_TILE_INPUTS = 128
_FEW_ROWS_SPLITS = 8
"""Programs that share the inputs of a tile in a step of few rows, which has too few tiles to fill the GPU."""


# Not specialized, because the number of rows changes with every step.
@triton.jit(do_not_specialize=["rows"])
def _shrink(
    inner,  # float32[SPLITS, rows, TARGETS, RANK]: scale * x A^T; written up to the rank, rounded up to a block
    x,
    a,
    ranks,
    scales,
    slots,
    tiles,
    x_stride,
    inputs,
    rows,
    TARGETS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(2)
    target = tl.program_id(1) // (RANK // TILE_RANKS)
    first_rank = tl.program_id(1) % (RANK // TILE_RANKS) * TILE_RANKS
    first_row = tl.load(tiles + tile * TILE_ROWS)
    if first_row >= 0:
        place = tl.load(slots + first_row) * TARGETS + target
        rank = tl.load(ranks + place)
        if first_rank < rank:
            row = tl.load(tiles + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
            row_exists = (row >= 0)[:, None]
            row = row.to(tl.int64)[:, None]
            of_rank = first_rank + tl.arange(0, TILE_RANKS)
            a_rows = a + (place.to(tl.int64) * RANK + of_rank)[None, :] * inputs
            part = tl.cdiv(inputs, SPLITS * TILE_INPUTS) * TILE_INPUTS
            total = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
            for start in range(split * part, tl.minimum((split + 1) * part, inputs), TILE_INPUTS):
                column = start + tl.arange(0, TILE_INPUTS)
                exists = column < inputs
                values = tl.load(
                    x + row * x_stride + column[None, :], mask=row_exists & exists[None, :], other=0.0
                )
                weights = tl.load(
                    a_rows + column[:, None], mask=exists[:, None] & (of_rank < rank)[None, :], other=0.0
                )
                total = tl.dot(values, weights, total, input_precision="ieee")
            at = ((split * rows + row) * TARGETS + target) * RANK + of_rank[None, :]
            tl.store(inner + at, total * tl.load(scales + place), mask=row_exists)


@triton.jit(do_not_specialize=["rows"])
def _expand(
    y,
    inner,
    b,
    ranks,
    slots,
    tiles,
    blocks,
    y_stride,
    outputs,
    rows,
    TARGETS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + tile * TILE_ROWS)
    if first_row >= 0:
        slot, target = tl.load(slots + first_row), tl.load(blocks + block * 3)
        rank = tl.load(ranks + slot * TARGETS + target)
        if rank > 0:
            column = tl.load(blocks + block * 3 + 1) + tl.arange(0, COLUMNS)
            exists = column < tl.load(blocks + block * 3 + 2)
            row = tl.load(tiles + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
            row_exists = (row >= 0)[:, None]
            row = row.to(tl.int64)[:, None]
            b_rows = b + (slot.to(tl.int64) * outputs + column)[None, :] * RANK
            total = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
            for start in range(0, rank, TILE_RANKS):
                of_rank = start + tl.arange(0, TILE_RANKS)
                at = (row * TARGETS + target) * RANK + of_rank[None, :]
                values = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
                for split in range(SPLITS):
                    part = inner + split * rows.to(tl.int64) * TARGETS * RANK
                    values += tl.load(part + at, mask=row_exists, other=0.0)
                weights = tl.load(
                    b_rows + of_rank[:, None], mask=exists[None, :] & (of_rank < rank)[:, None], other=0.0
                )
                total = tl.dot(values.to(weights.dtype), weights, total, input_precision="ieee")
            target_y = y + row * y_stride + column[None, :]
            mask = row_exists & exists[None, :]
            tl.store(target_y, tl.load(target_y, mask=mask, other=0.0).to(tl.float32) + total, mask=mask)


def adapt(x: Tensor, y: Tensor, stack: AdapterStack, rows: AdapterRows) -> None:
    """See `Operations.adapt`. The values of a row must be contiguous."""
    tiles, tile_rows = rows.tiles.shape
    if not tiles:
        return
    count, inputs = x.shape
    _, targets, rank, _ = stack.a.shape
    splits = 1 if tile_rows > AdapterRows.FEW else _FEW_ROWS_SPLITS
    tile_ranks = min(rank, 64)
    inner = x.new_empty(splits, count, targets, rank, dtype=stack.scales.dtype)
    _shrink[(tiles, targets * (rank // tile_ranks), splits)](
        inner,
        x,
        stack.a,
        stack.ranks,
        stack.scales,
        rows.slots,
        rows.tiles,
        x.stride(0),
        inputs,
        count,
        TARGETS=targets,
        RANK=rank,
        TILE_ROWS=tile_rows,
        TILE_RANKS=tile_ranks,
        TILE_INPUTS=_TILE_INPUTS,
        SPLITS=splits,
        num_warps=4,
        num_stages=2,
    )
    _expand[(tiles, len(stack.blocks))](
        y,
        inner,
        stack.b,
        stack.ranks,
        rows.slots,
        rows.tiles,
        stack.blocks,
        y.stride(0),
        y.shape[1],
        count,
        TARGETS=targets,
        RANK=rank,
        TILE_ROWS=tile_rows,
        TILE_RANKS=tile_ranks,
        COLUMNS=EXPAND_COLUMNS,
        SPLITS=splits,
        num_warps=8 if tile_rows > AdapterRows.FEW else 4,
        num_stages=2,
    )
