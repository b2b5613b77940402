"""KV-cache accounting: allocates cache blocks for the tokens of sequences, and frees them.

A block table, with block size 4, a prompt of 10 tokens of which 6 are computed:

    tokens    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9
    blocks    [ full,     | [ partly    | not yet allocated
                cached ]  |   written ] |
    computed  ───────────────────▲ num_computed_tokens

Full blocks before `num_computed_tokens` may be shared (prefix hits, forks) and are never written again. The block that
is written next can only be shared by a fork; it is copied before the first write (`_make_writable`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.block_pool import BlockPool, IntegrityError
from neso.engine.core.prefix_cache import CachedBlock, HostCache, PrefixCache
from neso.engine.core.sequence import NO_BLOCK, CacheToken, Sequence

BlockCopy = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class BlockHold:
    """Blocks in use by something other than a sequence: a transfer to or from another engine."""

    blocks: list[int]


class KVCacheManager:
    """Owns the block pool and the prefix cache. Block tables are changed only here.

    With a `window`, blocks outside the attention window of all layers are freed while their sequence runs.

    - max_new_tokens: maximum for a sequence in a step
    - max_unregistered_tokens: maximum number of tokens of a sequence that are computed by a step in flight and
      therefore not registered in the prefix cache yet
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        window: AttentionWindow | None = None,
        max_new_tokens: int = 1,
        max_unregistered_tokens: int = 0,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self._window = window
        self._max_new_tokens = max_new_tokens
        # Blocks outside the window are freed when they are registered.
        most_new = max_new_tokens + (max_unregistered_tokens if enable_prefix_caching else 0)
        self._max_held = window.max_blocks_in_window(most_new, block_size) if window else num_blocks + 1
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(block_size, HostCache(num_host_blocks))
        self._caching = enable_prefix_caching
        self._holds: set[BlockHold] = set()

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks_held(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence holds at a time until it has `num_tokens` tokens."""
        return min(self.blocks_for(num_tokens), self._max_held)

    def longest_sequence(self, num_tokens: int) -> int:
        """Return the length of the longest sequence that fits the whole cache, at most `num_tokens`."""
        whole_cache = self.pool.num_blocks
        return (
            num_tokens if self.max_blocks_held(num_tokens) <= whole_cache else whole_cache * self.block_size
        )

    def blocks_to_come(self, sequence: Sequence) -> int:
        """Return an upper limit of the blocks that a sequence and its pending forks may still allocate."""
        whole = self.blocks_for(sequence.max_tokens)
        own = max(0, whole - len(sequence.block_table)) + self._writes_to_shared(sequence)
        of_a_fork = whole - sequence.num_prompt_tokens // self.block_size
        if self._window is not None:
            # A sequence frees blocks as it allocates new ones, but shared blocks do not return to the pool.
            forks = sequence.forks_pending
            own = min(own, self._max_held - (0 if forks else self._num_held_alone(sequence)))
            of_a_fork = min(of_a_fork, self._max_held)
        return own + sequence.forks_pending * of_a_fork

    def room_for_drafts(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Return the number of draft tokens that fit a step in addition to the new tokens.

        Only blocks counted by `blocks_to_come` are used. A tree may have more tokens than the sequence can still
        generate.
        """
        room = self.blocks_for(sequence.max_tokens) * self.block_size - sequence.num_tokens
        return room if self._window is None else min(room, self._max_new_tokens - num_new_tokens)

    def attach_prefix(self, sequence: Sequence) -> None:
        """Start an empty sequence from the cached blocks of its longest known prefix.

        A waiting sequence keeps its match; the next attempt only validates and extends it.
        """
        sequence.cache_parent = sequence.cache_identity
        if not self._caching or sequence.needs_every_position:
            return
        sequence.prefix_match = self.prefix_cache.match(
            sequence.cache_identity, sequence.cache_tokens, sequence.prefix_match
        )
        found = self._affordable(sequence.prefix_match) if sequence.prefix_match else []
        if not found:
            return
        sequence.cache_parent = found[-1].node
        sequence.num_cached_blocks = len(found)
        sequence.num_computed_tokens = len(found) * self.block_size
        outside = range(0)
        if self._window is not None and not sequence.keeps_window:
            outside = self._window.blocks_outside_window(sequence.num_computed_tokens, self.block_size)
        sequence.num_window_freed_blocks = outside.stop if outside else 0
        wanted = [cached for i, cached in enumerate(found) if i not in outside]
        sequence.block_table = array("i", self._acquire(wanted))
        sequence.block_table[outside.start : outside.start] = array("i", [NO_BLOCK]) * len(outside)
        self._retain(sequence, range(len(found)))

    def _affordable(self, found: list[CachedBlock]) -> list[CachedBlock]:
        """Return the first of these blocks for which the pool has free blocks; blocks in use need none."""
        left = self.pool.num_free
        for i, cached in enumerate(found):
            if cached.block is None or self.pool.references(cached.block) == 0:
                if not left:
                    return found[:i]
                left -= 1
        return found

    def _acquire(self, found: list[CachedBlock]) -> list[int]:
        """Take the blocks of a prefix; blocks on the host are loaded into new blocks."""
        # Take all blocks before the first is loaded, because an allocation may evict blocks to the host, or from it.
        on_host = {}
        for cached in found:
            if cached.block is not None:
                self.pool.share(cached.block)
            else:
                on_host[cached.key] = self.prefix_cache.host.take(cached.key)
        blocks = []
        for cached in found:
            block = cached.block
            if block is None:
                block = self._allocate()
                self.prefix_cache.load(cached, on_host[cached.key], block)
            blocks.append(block)
        return blocks

    def try_grow(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Allocate the blocks for positions [num_computed_tokens, num_tokens); None if there are not enough.

        Returns the block copies that must precede the writes of the step.
        """
        if self._window is not None and not sequence.keeps_window:
            self._free_outside_window(sequence, self._window)
        shared = self._writes_to_shared(sequence)
        # After a rejected draft, the table may have more blocks than needed.
        missing = max(0, self.blocks_for(num_tokens) - len(sequence.block_table))
        if missing + shared > self.pool.num_free:
            return None
        copies = [self._make_writable(sequence)] if shared else []
        for _ in range(missing):
            sequence.block_table.append(self._allocate())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Make `child` share the blocks and the position of `parent`, and release the child's own blocks."""
        for block in _blocks(parent):
            self.pool.share(block)
        self.free(child)
        child.block_table = parent.block_table[:]
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_blocks = parent.num_cached_blocks
        child.num_window_freed_blocks = parent.num_window_freed_blocks
        child.cache_parent = parent.cache_parent

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Register the computed full blocks in the prefix cache. The steps that computed them must have succeeded."""
        if not self._caching:
            return
        size = self.block_size
        full = range(sequence.num_cached_blocks, sequence.num_computed_tokens // size)
        if not full:
            return
        token_ids = sequence.cache_tokens
        for i in full:
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            sequence.cache_parent = self.prefix_cache.insert(
                sequence.cache_parent, tokens, sequence.block_table[i]
            )
            sequence.num_cached_blocks = i + 1
        self._retain(sequence, full)

    def _retain(self, sequence: Sequence, places: range) -> None:
        """Set the request's retention priorities for blocks of a sequence, given by index."""
        retention = sequence.request.retention
        if retention is None:
            return
        for i in places:
            block = sequence.block_table[i]
            wanted = retention.at(i * self.block_size, sequence.num_prompt_tokens)
            if wanted is not None and block != NO_BLOCK:
                priority, milliseconds = wanted
                self.pool.retain(block, priority, None if milliseconds is None else milliseconds / 1000)

    def free(self, sequence: Sequence) -> None:
        """Release all blocks, last first, so that ends of prefixes are reused before their beginnings. Idempotent."""
        for block in reversed(_blocks(sequence)):
            self.pool.release(block, content_cached=block in self.prefix_cache)
        sequence.block_table = array("i")
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0
        sequence.num_window_freed_blocks = 0
        sequence.cache_parent = None

    def hold(self, blocks: list[int]) -> BlockHold:
        """Keep blocks that are in use or cached until `drop`."""
        for block in blocks:
            self.pool.share(block)
        return self._add_hold(list(blocks))

    def merge(self, *holds: BlockHold) -> BlockHold:
        """Replace holds by one of all their blocks."""
        self._holds.difference_update(holds)
        return self._add_hold([block for hold in holds for block in hold.blocks])

    def reserve(self, num_blocks: int) -> BlockHold:
        """Allocate blocks for a transfer. Raises `KeyError` if there are too few; check `num_free` before."""
        return self._add_hold([self._allocate() for _ in range(num_blocks)])

    def register_blocks(
        self, parent: Hashable, tokens: list[CacheToken] | list[int], blocks: list[int]
    ) -> None:
        """Register full blocks of a hold in the prefix cache.

        `parent`: the node before the first of them, or the cache identity. `tokens`: of all these blocks.
        """
        size = self.block_size
        for i, block in enumerate(blocks):
            parent = self.prefix_cache.insert(parent, tuple(tokens[i * size : (i + 1) * size]), block)

    def drop(self, hold: BlockHold) -> None:
        """End a hold. Blocks that are not in use otherwise become free, and stay in the prefix cache."""
        self._holds.remove(hold)
        for block in reversed(hold.blocks):
            self.pool.release(block, content_cached=block in self.prefix_cache)

    def _add_hold(self, blocks: list[int]) -> BlockHold:
        hold = BlockHold(blocks)
        self._holds.add(hold)
        return hold

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that every block is free or referenced as often as it occurs in block tables and holds.

        Raises `IntegrityError`.
        """
        holders = Counter(block for sequence in sequences for block in _blocks(sequence))
        for hold in self._holds:
            holders.update(hold.blocks)
        self.pool.check_integrity(holders)
        self.prefix_cache.host.check_integrity()
        for sequence in sequences:
            if sequence.num_computed_tokens > len(sequence.block_table) * self.block_size:
                raise IntegrityError(f"sequence {sequence.id} has computed tokens beyond its block table")

    def _free_outside_window(self, sequence: Sequence, window: AttentionWindow) -> None:
        """Release the blocks that are outside the attention window."""
        outside = window.blocks_outside_window(sequence.num_computed_tokens, self.block_size)
        # Blocks must be registered before they are freed. Accepted draft tokens are registered by the next step.
        end = min(outside.stop, sequence.num_cached_blocks) if self._caching else outside.stop
        for i in range(max(outside.start, sequence.num_window_freed_blocks), end):
            block = sequence.block_table[i]
            self.pool.release(block, content_cached=block in self.prefix_cache)
            sequence.block_table[i] = NO_BLOCK
            sequence.num_window_freed_blocks = i + 1

    def _num_held_alone(self, sequence: Sequence) -> int:
        return sum(self.pool.references(block) == 1 for block in _blocks(sequence))

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self.prefix_cache.evict(block)
        return block

    def _writes_to_shared(self, sequence: Sequence) -> bool:
        """Whether the next block to write is shared."""
        first_written = sequence.num_computed_tokens // self.block_size
        return (
            first_written < len(sequence.block_table)
            and self.pool.references(sequence.block_table[first_written]) > 1
        )

    def _make_writable(self, sequence: Sequence) -> BlockCopy:
        position = sequence.num_computed_tokens // self.block_size
        source = sequence.block_table[position]
        target = self._allocate()
        self.pool.release(source, content_cached=source in self.prefix_cache)
        sequence.block_table[position] = target
        return source, target


def _blocks(sequence: Sequence) -> list[int] | array[int]:
    """Return the blocks of a sequence, in order."""
    if not sequence.num_window_freed_blocks:
        return sequence.block_table
    return [block for block in sequence.block_table if block != NO_BLOCK]
