"""Paged KV cache and attention of the reference runner, over a flat batch.

The blocks and masks of a step depend on the layer's window but not on the layer, so they are planned once per step and
window (`AttentionPlan`) and used in each layer. There are two kinds of work:

- sequences with one new token (decode) are grouped by context length and padded to the longest of the group;
- a sequence with more new tokens (prefill) is processed alone, in tiles of queries, to limit the size of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.reference.layers import softcap
from neso.engine.runners.shared_cache import CacheShape, SharedCache
from neso.engine.spec_decode.draft import DraftTreePlan
from neso.engine.specs.decoder_spec import DecoderSpec

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


class KVCache:
    """One array per layer, float32[2 * kv_heads, num_blocks, block_size, head_dim]: keys first, then values.

    With heads first, the gathered blocks of a sequence are a contiguous matrix per head.
    """

    def __init__(self, spec: DecoderSpec, layout: CacheLayout) -> None:
        self.block_size = layout.block_size
        self._kv_heads = spec.num_kv_heads
        shape = (spec.num_layers, 2 * spec.num_kv_heads, layout.num_blocks, layout.block_size, spec.head_dim)
        self.shared: SharedCache | None = None
        if layout.shared:
            part_bytes = 4 * layout.block_size * spec.head_dim
            self.shared = SharedCache.create(CacheShape(shape[0] * shape[1], layout.num_blocks, part_bytes))
            self._layers = list(self.shared.blocks.view(np.float32).reshape(shape))
        else:
            self._layers = [np.zeros(shape[1:], np.float32) for _ in range(spec.num_layers)]
        self._scratch = np.empty(0, np.float32)

    @staticmethod
    def bytes_per_block(spec: DecoderSpec, block_size: int) -> int:
        return spec.num_layers * 2 * spec.num_kv_heads * block_size * spec.head_dim * 4

    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy blocks in all layers; int32[C, 2] of (source, target). All sources are read before any write."""
        if len(copies):
            for layer in self._layers:
                layer[:, copies[:, 1]] = layer[:, copies[:, 0]]

    def copy_slots(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy single tokens in all layers, int32[C] slots each. All sources are read before any write."""
        if len(sources):
            for layer in self._layers:
                slots = layer.reshape(len(layer), -1, layer.shape[-1])
                slots[:, targets] = slots[:, sources]

    def write(self, layer: int, slots: Int32Array, keys_values: Float32Array) -> None:
        """Store float32[T, 2 * kv_heads, head_dim] at slots int32[T] (block * block_size + offset).

        Writing the first slot of a block zeroes the rest, because attention reads whole blocks and a weight of 0 would
        not mask a NaN left by another sequence.
        """
        blocks, offsets = np.divmod(slots, self.block_size)
        cache = self._layers[layer]
        cache[:, blocks[offsets == 0]] = 0
        cache[:, blocks, offsets] = keys_values.swapaxes(0, 1)

    def gather(self, layer: int, tables: Int32Array) -> tuple[Float32Array, Float32Array]:
        """Return keys and values of S sequences with tables int32[S, B]: each float32[kv_heads, S, B * block_size, D].

        They are copies in a scratch buffer, valid until the next call.
        """
        cache = self._layers[layer]
        heads, _, block_size, head_dim = cache.shape
        size = heads * tables.size * block_size * head_dim
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        gathered = self._scratch[:size].reshape(heads, *tables.shape, block_size, head_dim)
        np.take(cache, tables, axis=1, out=gathered, mode="clip")  # other modes copy twice
        keys_values = gathered.reshape(heads, len(tables), -1, head_dim)
        return keys_values[: self._kv_heads], keys_values[self._kv_heads :]


# Block counts within a decode group differ by at most a quarter plus a few blocks ...
_PADDING_RATIO = 1.25
_PADDING_BLOCKS = 2
# ... and the group gathers at most this many slots, to stay in the CPU cache.
_GROUP_SLOTS = 2048
_TILE_QUERIES = 128


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One batched attention product: S sequences, Q queries each, L cache slots.

    - rows[S, Q]: rows of the queries in the flat batch
    - tables[S, L / block_size]: blocks to gather
    - mask[S, 1, Q, L]: added to the scores; 0 for visible slots, -inf for others
    """

    rows: npt.NDArray[np.intp]
    tables: Int32Array
    mask: Float32Array


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention work of a step for layers with the same window."""

    work: list[AttentionWork]

    @classmethod
    def make(cls, plan: StepPlan, block_size: int, window: int | None, sinks: int = 0) -> AttentionPlan:
        """Plan the attention work of a step.

        `window`: tokens that each token attends to, itself included, besides the first `sinks`; None: all.
        """
        lengths = np.diff(plan.query_start)
        ends = plan.num_computed + lengths
        work = [
            _span(plan, group, 0, 1, block_size, window, sinks)
            for group in _decode_groups(np.flatnonzero(lengths == 1), ends, block_size, window)
        ]
        for sequence in np.flatnonzero(lengths > 1):
            length = int(lengths[sequence])
            for first in range(0, length, _TILE_QUERIES):
                last = min(first + _TILE_QUERIES, length)
                work.append(_span(plan, np.array([sequence]), first, last, block_size, window, sinks))
        return cls(work)


def attend(
    plan: AttentionPlan,
    queries: Float32Array,
    cache: KVCache,
    layer: int,
    scale: float,
    cap: float | None,
    out: Float32Array,
) -> None:
    """Compute attention of queries float32[T, heads, D] in one layer, into out float32[T, heads, D].

    `cap`: soft cap of the scores. Heads that share keys and values become rows of one product, so keys and values are
    not repeated.
    """
    heads, head_dim = queries.shape[1:]
    for work in plan.work:
        keys, values = cache.gather(layer, work.tables)
        kv_heads, (sequences, count) = len(keys), work.rows.shape
        shape = (sequences, count, kv_heads, heads // kv_heads, head_dim)
        # [S, Q, kv_heads, group, D] -> [kv_heads, S, group, Q, D] -> [kv_heads, S, group * Q, D]
        grouped = (queries[work.rows] * np.float32(scale)).reshape(shape).transpose(2, 0, 3, 1, 4)
        grouped = grouped.reshape(kv_heads, sequences, -1, head_dim)
        scores = grouped @ keys.swapaxes(-1, -2)
        if cap is not None:
            scores = softcap(scores, cap)
        scores.reshape(kv_heads, sequences, -1, count, scores.shape[-1])[...] += work.mask
        attended = softmax_weighted(scores, values)
        attended = attended.reshape(kv_heads, sequences, -1, count, head_dim).transpose(1, 3, 0, 2, 4)
        out[work.rows] = attended.reshape(sequences, count, heads, head_dim)


def softmax_weighted(scores: Float32Array, values: Float32Array) -> Float32Array:
    """Return softmax(scores) @ values; overwrites the scores."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    weighted = scores @ values
    weighted /= scores.sum(axis=-1, keepdims=True)
    return weighted


def _decode_groups(
    sequences: npt.NDArray[np.intp], ends: Int32Array, block_size: int, window: int | None
) -> Iterator[npt.NDArray[np.intp]]:
    """Split sequences into groups of similar context length, to limit padding."""
    context = ends[sequences] if window is None else np.minimum(ends[sequences], window)
    order = np.argsort(context, kind="stable")
    blocks = -(-context[order] // block_size)
    start = 0
    for index in range(1, len(order) + 1):
        if index < len(order):
            fits = blocks[index] <= _PADDING_RATIO * blocks[start] + _PADDING_BLOCKS
            if fits and blocks[index] * block_size * (index + 1 - start) <= _GROUP_SLOTS:
                continue
        yield sequences[order[start:index]]
        start = index


def _span(
    plan: StepPlan,
    sequences: npt.NDArray[np.intp],
    first: int,
    last: int,
    block_size: int,
    window: int | None,
    sinks: int,
) -> AttentionWork:
    """Create the work for new tokens `first` to `last` (exclusive) of each of the sequences."""
    offsets = np.arange(first, last)
    rows = plan.query_start[sequences][:, None] + offsets
    written = plan.num_computed[sequences][:, None] + offsets  # [S, Q]
    tree = plan.part(DraftTreePlan)
    if tree is not None and not (len(tree.masks) and tree.masks[rows[0, 0]]):
        tree = None
    positions = written if tree is None else plan.num_computed[sequences][:, None] + tree.depths[rows]
    oldest = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    sinks = 0 if window is None else sinks
    sink_blocks = -(-sinks // block_size)
    # The blocks of the sinks, then those from the oldest visible token to the newest query. Padding is masked but must
    # be initialized, so it repeats the newest query's block.
    first_block = np.maximum(oldest[:, 0] // block_size, sink_blocks)
    last_block = written[:, -1] // block_size
    in_window = first_block[:, None] + np.arange(max(0, (last_block - first_block).max() + 1))
    of_sinks = np.broadcast_to(np.arange(sink_blocks), (len(sequences), sink_blocks))
    columns = np.concatenate([of_sinks, in_window], axis=1)
    used = columns <= last_block[:, None]
    blocks = plan.block_tables[sequences[:, None], np.where(used, columns, last_block[:, None])]
    slots = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(len(sequences), 1, -1)
    if tree is None:
        key_positions, visible = slots, slots <= positions[:, :, None]
    else:
        key_positions, visible = _tree_keys(plan, tree, int(sequences[0]), slots)
    visible = visible & ((key_positions >= oldest[:, :, None]) | (slots < sinks))
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return AttentionWork(rows, blocks, mask[:, None])


def _tree_keys(
    plan: StepPlan, tree: DraftTreePlan, sequence: int, slots: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the key positions and visibility for a sequence whose new tokens are a tree of draft tokens.

    Positions of the keys in slots [1, 1, L]; for each token whether a key is its own or an ancestor's, bool[1, Q, L].
    """
    computed = int(plan.num_computed[sequence])
    begin, end = plan.query_start[sequence : sequence + 2].tolist()
    node = np.clip(slots - computed, 0, end - begin - 1)
    is_node = (slots >= computed) & (slots < computed + end - begin)
    positions = np.where(is_node, computed + tree.depths[begin + node], slots)
    masks = tree.masks[begin:end][None, :, None]
    on_path = (masks >> node.astype(np.uint64)) & np.uint64(1) != 0
    return positions, (slots < computed) | (is_node & on_path)
