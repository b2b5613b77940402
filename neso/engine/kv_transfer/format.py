"""The format of an engine's KV-cache blocks, which two engines compare before a transfer."""

from __future__ import annotations

import msgspec


class KvFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Content and memory layout of the blocks.

    - model: digest of the checkpoint and of the options that change keys and values
    - layout: name of the order of values within a block
    - dtype: float32 or bfloat16
    - block_size: tokens; num_layers, num_kv_heads, head_dim: of the whole model
    - num_ranks: processes that share a block
    """

    model: str
    layout: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_ranks: int = 1
