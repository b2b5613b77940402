"""Conversion of blocks between caches with different layouts, dtypes and block sizes of the same model.

A cache is seen as float[num_layers, 2 (keys, values), kv_heads, tokens, head_dim], wherever its layout keeps a value.
Tokens are copied by their position in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.kv_transfer.format import KvFormat
from neso.engine.runners.shared_cache import CacheShape, SharedCache

IndexArray = npt.NDArray[np.intp]

_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
STAGING_BYTES = 4 << 20
"""Number of bytes that are read before they are converted."""
_PANEL, _DEPTH = 16, 32  # kPanel, kDepthAlign of the native kernels


class BlockView:
    """Keys and values of single tokens in a cache, which may be mapped read-only."""

    def __init__(self, cache: SharedCache, block_format: KvFormat) -> None:
        parts, blocks, part_bytes = cache.blocks.shape
        dtype = _DTYPES[block_format.dtype]
        layers = block_format.num_layers
        self._values = cache.blocks.view(dtype).reshape(
            layers, parts // layers, blocks, part_bytes // dtype.itemsize
        )
        self._parts, self._elements = _LAYOUTS[block_format.layout](block_format)

    def read(self, blocks: IndexArray, offsets: IndexArray) -> npt.NDArray[np.generic]:
        """Return the values of tokens, [num_layers, 2, kv_heads, T, head_dim].

        `blocks`, `offsets`: int[T], block of each token and its place in it.
        """
        return self._values[:, self._parts, blocks[:, None], self._elements[:, :, offsets]]

    def write(self, blocks: IndexArray, offsets: IndexArray, values: npt.NDArray[np.generic]) -> None:
        """Store the values of tokens, see `read`, in the dtype of the cache."""
        self._values[:, self._parts, blocks[:, None], self._elements[:, :, offsets]] = values


class Converter:
    """Converts blocks that were read into `staging`, a cache of the other engine's format.

    own: the cache of this engine
    """

    def __init__(self, own: SharedCache, own_format: KvFormat, other: KvFormat) -> None:
        self._own, self._own_format, self._other = own, own_format, other
        blocks = max(1, STAGING_BYTES // other.block_bytes)
        self.staging = SharedCache.create(CacheShape(other.num_parts, blocks, other.part_bytes))

    @cached_property
    def _views(self) -> tuple[BlockView, BlockView]:
        return BlockView(self.staging, self._other), BlockView(self._own, self._own_format)

    def write(self, first_block: int, count: int, first_token: int, targets: list[int]) -> None:
        """Convert the first `count` blocks of the staging cache, which are the sequence's blocks from `first_block` on.

        Tokens before `first_token`, where the targets begin, and behind the targets are left out.
        """
        source, target = self._views
        size, own_size = self._other.block_size, self._own_format.block_size
        places = token_places(first_block * size, count * size, first_token, len(targets) * own_size)
        sources, wanted = places - first_block * size, places - first_token
        blocks = np.array(targets, np.intp)[wanted // own_size]
        offsets = wanted % own_size
        # Kernels may read whole blocks: a place without a token must not hold what another sequence has left.
        self._own.blocks[:, blocks[offsets == 0]] = 0
        values = source.read(sources // size, sources % size)
        target.write(blocks, offsets, values)


def token_places(start: int, count: int, first: int, wanted: int) -> IndexArray:
    """Return the positions of the tokens in both ranges: `count` from `start` on, `wanted` from `first` on."""
    return np.arange(max(start, first), min(start + count, first + wanted), dtype=np.intp)


def mismatch(own: KvFormat, other: KvFormat) -> str:
    """Return why blocks of another cache can neither be copied nor converted; empty if they can."""
    if own.model != other.model:
        return "the engines have different models, or options that change keys and values"
    if own == other:
        return ""
    difference = own.difference(other)
    for one in (own, other):
        if one.layout not in _LAYOUTS:
            return f"{difference}, and the layout '{one.layout}' cannot be converted"
        if one.dtype not in _DTYPES:
            return f"{difference}, and the dtype '{one.dtype}' cannot be converted"
    for name in ("num_layers", "kv_heads", "head_dim"):
        if getattr(own, name) != getattr(other, name):
            return f"{name} is {getattr(own, name)} here and {getattr(other, name)} there"
    for one in (own, other):
        if one.block_size < 1 or one.block_bytes != expected_bytes(one):
            return f"{difference}, and a block of the layout '{one.layout}' has {one.block_bytes} bytes"
    return ""


def expected_bytes(block_format: KvFormat) -> int:
    """Return the bytes that a block of this layout, dtype and shape must have."""
    tokens, dim = block_format.block_size, block_format.head_dim
    if block_format.layout == "native":
        tokens, dim = _round_up(tokens, _PANEL), _round_up(dim, _DEPTH)
    values = 2 * block_format.num_layers * block_format.kv_heads * tokens * dim
    return values * _DTYPES[block_format.dtype].itemsize


def _heads_layout(block_format: KvFormat) -> tuple[IndexArray, IndexArray]:
    """A part for the keys of each head, then one for the values of each head: [block_size, head_dim]."""
    heads, size, dim = block_format.kv_heads, block_format.block_size, block_format.head_dim
    parts = np.arange(2 * heads, dtype=np.intp).reshape(2, heads, 1, 1)
    elements = np.arange(size * dim, dtype=np.intp).reshape(1, 1, size, dim)
    return parts, np.broadcast_to(elements, (2, heads, size, dim))


def _tokens_layout(block_format: KvFormat) -> tuple[IndexArray, IndexArray]:
    """A part for the keys of a layer, then one for its values: [block_size, kv_heads, head_dim]."""
    heads, size, dim = block_format.kv_heads, block_format.block_size, block_format.head_dim
    elements = np.arange(size * heads * dim, dtype=np.intp).reshape(1, size, heads, dim).swapaxes(1, 2)
    return np.arange(2, dtype=np.intp).reshape(2, 1, 1, 1), np.broadcast_to(elements, (2, heads, size, dim))


def _native_layout(block_format: KvFormat) -> tuple[IndexArray, IndexArray]:
    """One part per layer with the packed panels of `csrc/kernels/kv_cache.h`."""
    heads, dim = block_format.kv_heads, block_format.head_dim
    interleave = 4 // _DTYPES[block_format.dtype].itemsize
    slots, width = _round_up(block_format.block_size, _PANEL), _round_up(dim, _DEPTH)
    slot = np.arange(block_format.block_size, dtype=np.intp)[:, None]
    d = np.arange(dim, dtype=np.intp)
    keys = d // interleave * slots * interleave + slot * interleave + d % interleave
    values = slot // interleave * _PANEL * interleave + slot % interleave
    values = values + d // _PANEL * slots * _PANEL + d % _PANEL * interleave
    head = np.stack([keys, width * slots + values])
    first = 2 * width * slots * np.arange(heads, dtype=np.intp).reshape(1, heads, 1, 1)
    return np.zeros((1, 1, 1, 1), np.intp), first + head[:, None]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_LAYOUTS: dict[str, Callable[[KvFormat], tuple[IndexArray, IndexArray]]] = {
    "native": _native_layout,
    "heads": _heads_layout,
    "tokens": _tokens_layout,
}
"""By name: the part of a layer that holds a value, and its place there, each int[2, kv_heads, block_size, head_dim]."""
