"""Paged attention in Triton: tiles of queries of a sequence attend to the blocks of its KV cache.

A tile is a few new tokens of one sequence; all query heads that share a key-value head are rows of one product. A
decode is a tile of one token; its context is split among programs, because there are too few tiles to fill the GPU, and
a second kernel merges the parts (FlashDecoding). The softmax is online (FlashAttention, arXiv 2205.14135), in powers of
two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.step_inputs import StepInputs

_TILE_KEYS = 64
_MAX_SPLITS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


# Not specialized, because the width of the block tables changes with every step.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_tile(
    out,  # [T, heads, value_dim]; or, SPLIT, float32[D, heads, splits, value_dim]
    log_sums,  # SPLIT: float32[D, heads, splits]
    queries,
    keys,
    values,
    block_tables,
    query_start,
    num_computed,
    tiles,  # int32[N, 2] of (sequence, first new token); decodes: int32[N] of sequences
    tree_masks,  # int64[T], tree_depths int32[T]: see `DraftTreePlan`; read where TREE
    tree_depths,
    scale,
    softcap,
    query_stride,
    block_stride_k,
    block_stride_v,
    table_stride,
    heads,
    kv_heads,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    if DECODE:
        sequence = tl.load(tiles + tile)
        first = 0
    else:
        sequence = tl.load(tiles + 2 * tile)
        first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    computed = tl.load(num_computed + sequence)

    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_exists = (row < QUERIES * GROUP) & (token < count)
    position = computed + token
    key_dims, value_dims = tl.arange(0, PADDED_KEY_DIM), tl.arange(0, PADDED_VALUE_DIM)
    query = tl.load(
        queries
        + (begin + token).to(tl.int64)[:, None] * query_stride
        + head[:, None] * KEY_DIM
        + key_dims[None],
        mask=row_exists[:, None] & (key_dims < KEY_DIM)[None],
        other=0.0,
    )

    # Keys visible to any query of the tile, and this program's part of them.
    newest = computed + tl.minimum(first + QUERIES, count)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(computed + first - WINDOW + 1, 0)
    query_pos = position
    if TREE:
        tree_mask = tl.load(tree_masks + begin + token, mask=row_exists, other=0)
        query_pos = computed + tl.load(tree_depths + begin + token, mask=row_exists, other=0)
        if WINDOW > 0:
            # The position of a tree token is at most that of its slot, and at least that of the first token.
            oldest = tl.maximum(computed - WINDOW + 1, 0)
    # Keys are the sinks followed by the window; the gap between them is skipped.
    skipped = 0
    sinks = 0
    if SINKS > 0:
        sinks = tl.minimum(SINKS, oldest)
        skipped = oldest - sinks
    part_size = tl.cdiv(newest - oldest + sinks, splits * TILE_KEYS) * TILE_KEYS
    low = oldest - sinks + split * part_size
    high = tl.minimum(low + part_size, newest)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    for start in range(low, high, TILE_KEYS):
        slot = start + tl.arange(0, TILE_KEYS)
        exists = slot < high
        if SINKS > 0:
            slot = tl.where(slot < oldest, slot - skipped, slot)
        block = tl.load(block_tables + sequence * table_stride + slot // BLOCK_SIZE, mask=exists, other=0)
        block = block.to(tl.int64)
        in_block = (slot % BLOCK_SIZE) * kv_heads + kv_head
        key = tl.load(
            keys + (block * block_stride_k + in_block * KEY_DIM)[None, :] + key_dims[:, None],
            mask=exists[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh computed with exponentials of a negative number, which cannot overflow.
            bounded = tl.abs(scores / softcap)
            decay = tl.exp2(bounded * (-2.0 * _LOG2_E))
            scores = tl.where(scores < 0, -softcap, softcap) * (1 - decay) / (1 + decay)
        scores = scores * _LOG2_E
        seen = exists[None, :] & (slot[None, :] <= position[:, None])
        key_pos = slot
        if TREE:
            is_node = (slot >= computed) & (slot < computed + count)
            node = tl.where(is_node, slot - computed, 0)
            is_ancestor = (tree_mask[:, None] >> node.to(tl.int64)[None, :]) & 1
            seen = seen & ((tree_mask[:, None] == 0) | (slot < computed)[None, :] | (is_ancestor != 0))
            depth = tl.load(tree_depths + begin + node, mask=is_node, other=0)
            key_pos = tl.where(is_node, computed + depth, slot)
        if WINDOW > 0:
            in_window = key_pos[None, :] > query_pos[:, None] - WINDOW
            if SINKS > 0:
                in_window = in_window | (slot[None, :] < SINKS)
            seen = seen & in_window
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row without visible keys so far has no finite score to subtract.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weights, axis=1)
        value = tl.load(
            values + (block * block_stride_v + in_block * VALUE_DIM)[:, None] + value_dims[None, :],
            mask=exists[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        attended = attended * decay[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
        best = new_best

    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        part = (tile * heads + head) * splits + split
        log_sum = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(log_sums + part, log_sum, mask=row_exists)
        target = out + part[:, None] * VALUE_DIM + value_dims[None]
    else:
        target = out + ((begin + token).to(tl.int64) * heads + head)[:, None] * VALUE_DIM + value_dims[None]
    tl.store(target, attended, mask=row_exists[:, None] & (value_dims < VALUE_DIM)[None])


@triton.jit
def _join_splits(
    out,  # [T, heads, value_dim]
    parts,  # float32[D, heads, SPLITS, value_dim]
    log_sums,  # float32[D, heads, SPLITS]
    decodes,  # int32[D]
    query_start,
    heads,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    decode, head = tl.program_id(0), tl.program_id(1)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED_VALUE_DIM)
    first = (decode * heads + head) * SPLITS
    log_sum = tl.load(log_sums + first + split)
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    part = tl.load(
        parts + (first + split)[:, None] * VALUE_DIM + dims[None], mask=(dims < VALUE_DIM)[None], other=0.0
    )
    joined = tl.sum(part * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    token = tl.load(query_start + tl.load(decodes + decode)).to(tl.int64)
    tl.store(out + (token * heads + head) * VALUE_DIM + dims, joined, mask=dims < VALUE_DIM)


def paged_attention(
    queries: Tensor, cache: LayerCache, inputs: StepInputs, window: int | None, scale: float, softcap: float
) -> Tensor:
    """See `Operations.attention`."""
    out = queries.new_empty(*queries.shape[:2], cache.values.shape[-1])
    launch = partial(_launch, queries, cache, inputs, window, scale, softcap)
    if len(inputs.prefills):
        launch(inputs.prefills, 1, out, out)
    if len(inputs.decodes):
        splits = _splits(len(inputs.decodes) * cache.keys.shape[2], queries.device)
        if splits == 1:
            launch(inputs.decodes, splits, out, out)
        else:
            _attend_in_splits(launch, inputs, splits, out)
    return out


def _attend_in_splits(launch: Callable[..., None], inputs: StepInputs, splits: int, out: Tensor) -> None:
    decodes, (_, heads, value_dim) = inputs.decodes, out.shape
    parts = out.new_empty(len(decodes), heads, splits, value_dim, dtype=torch.float32)
    log_sums = out.new_empty(len(decodes), heads, splits, dtype=torch.float32)
    launch(decodes, splits, parts, log_sums)
    _join_splits[(len(decodes), heads)](
        out,
        parts,
        log_sums,
        decodes,
        inputs.query_start,
        heads,
        SPLITS=splits,
        VALUE_DIM=value_dim,
        PADDED_VALUE_DIM=triton.next_power_of_2(value_dim),
    )


def _launch(
    queries: Tensor,
    cache: LayerCache,
    inputs: StepInputs,
    window: int | None,
    scale: float,
    softcap: float,
    tiles: Tensor,
    splits: int,
    out: Tensor,
    log_sums: Tensor,
) -> None:
    _, heads, key_dim = queries.shape
    _, block_size, kv_heads, value_dim = cache.values.shape
    group, decode = heads // kv_heads, tiles.ndim == 1
    per_tile = 1 if decode else inputs.tile_queries
    _attend_tile[(len(tiles), kv_heads, splits)](
        out,
        log_sums,
        queries,
        cache.keys,
        cache.values,
        inputs.block_tables,
        inputs.query_start,
        inputs.num_computed,
        tiles,
        tiles if inputs.tree_masks is None else inputs.tree_masks,
        tiles if inputs.tree_depths is None else inputs.tree_depths,
        scale,
        softcap,
        queries.stride(0),
        cache.keys.stride(0),
        cache.values.stride(0),
        inputs.block_tables.stride(0),
        heads,
        kv_heads,
        WINDOW=window or 0,
        SINKS=inputs.sinks if window else 0,
        SOFTCAP=softcap > 0,
        TREE=inputs.tree_masks is not None,
        DECODE=decode,
        SPLIT=splits > 1,
        GROUP=group,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PADDED_KEY_DIM=max(16, triton.next_power_of_2(key_dim)),
        PADDED_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
        QUERIES=per_tile,
        ROWS=max(16, triton.next_power_of_2(per_tile * group)),
        TILE_KEYS=_TILE_KEYS,
        num_warps=4,
        num_stages=2,
    )


def _splits(programs: int, device: torch.device) -> int:
    """Return the number of splits: a power of two, for about two programs per multiprocessor."""
    if device.type != "cuda":
        return 4
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs
    return max(1, min(_MAX_SPLITS, triton.next_power_of_2(wanted + 1) // 2))
