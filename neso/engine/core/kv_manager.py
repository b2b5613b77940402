"""Gives sequences the cache blocks that their tokens need, and takes them back.

A block table, with block size 4, a prompt of 10 tokens of which 6 are computed:

    tokens    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9
    blocks    [ full,     | [ partly    | not yet allocated
                cached ]  |   written ] |
    computed  ───────────────────▲ num_computed_tokens

Full blocks behind `num_computed_tokens` may be shared (prefix hits, forks) and are never written again. Only the
block in which writing goes on can be shared by a fork; it is copied before the first write (`_make_writable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.block_pool import BlockPool, IntegrityError
from neso.engine.core.prefix_cache import CachedBlock, HostCache, PrefixCache
from neso.engine.core.sequence import NO_BLOCK, Sequence

BlockCopy = tuple[int, int]


class KVCacheManager:
    """Owns the pool and the prefix cache; the only one who changes block tables.

    With a `window`, blocks that no layer sees any more go back to the pool while their sequence runs.
    `max_new_tokens`: of a sequence in a step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        window: AttentionWindow | None = None,
        max_new_tokens: int = 1,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self._window = window
        self._max_new_tokens = max_new_tokens
        self._max_held = window.max_blocks_in_window(max_new_tokens, block_size) if window else num_blocks + 1
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(block_size, HostCache(num_host_blocks))
        self._caching = enable_prefix_caching

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks_held(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most on its way to `num_tokens` tokens."""
        return min(self.blocks_for(num_tokens), self._max_held)

    def longest_sequence(self, num_tokens: int) -> int:
        """How much of `num_tokens` tokens one sequence can have: what needs more than the whole cache never ends."""
        whole_cache = self.pool.num_blocks
        return (
            num_tokens if self.max_blocks_held(num_tokens) <= whole_cache else whole_cache * self.block_size
        )

    def blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that a sequence, and those that fork from it, may still take until they have all their tokens."""
        whole = self.blocks_for(sequence.max_tokens)
        own = max(0, whole - len(sequence.block_table)) + self._writes_to_shared(sequence)
        of_a_fork = whole - sequence.num_prompt_tokens // self.block_size
        if self._window is not None:
            # It gives blocks back as it takes new ones, but from those that it shares the pool gains nothing.
            forks = sequence.forks_pending
            own = min(own, self._max_held - (0 if forks else self._num_held_alone(sequence)))
            of_a_fork = min(of_a_fork, self._max_held)
        return own + sequence.forks_pending * of_a_fork

    def room_for_drafts(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Tokens of a draft that a step has room for beside new ones, in blocks that `blocks_to_come` counts.

        Those of a tree are more than the sequence may have.
        """
        room = self.blocks_for(sequence.max_tokens) * self.block_size - sequence.num_tokens
        return room if self._window is None else min(room, self._max_new_tokens - num_new_tokens)

    def attach_prefix(self, sequence: Sequence) -> None:
        """Start an empty sequence from the cached blocks of its longest known prefix."""
        sequence.cache_parent = sequence.request.cache_identity
        if not self._caching or sequence.needs_every_position():
            return
        found = self._held_together(self.prefix_cache.match(sequence.cache_parent, sequence.cache_tokens))
        if not found:
            return
        sequence.cache_parent = found[-1].node
        sequence.num_cached_blocks = len(found)
        sequence.num_computed_tokens = len(found) * self.block_size
        passed = self._passed(sequence)
        sequence.num_window_freed_blocks = passed.stop if passed else 0
        wanted = [cached for i, cached in enumerate(found) if i not in passed]
        sequence.block_table = self._hold(wanted)
        sequence.block_table[passed.start : passed.start] = [NO_BLOCK] * len(passed)
        self._retain(sequence, range(len(found)))

    def _held_together(self, found: list[CachedBlock]) -> list[CachedBlock]:
        """As many of these as there are free blocks for."""
        left = self.pool.num_free
        for i, cached in enumerate(found):
            if cached.block is None or self.pool.references(cached.block) == 0:
                if not left:
                    return found[:i]
                left -= 1
        return found

    def _hold(self, found: list[CachedBlock]) -> list[int]:
        """The blocks of a prefix, those among them that are on the host brought back."""
        # All are held or taken before room is made for the first: that pushes others to the host, or off it.
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
        """Make room to write positions [num_computed_tokens, num_tokens): all of it or, with None, nothing.

        Returns the block copies to do before the step writes.
        """
        self._give_back_passed(sequence)
        shared = self._writes_to_shared(sequence)
        # Behind a draft that was wrong there are more blocks than are needed, which makes no other one free.
        missing = max(0, self.blocks_for(num_tokens) - len(sequence.block_table))
        if missing + shared > self.pool.num_free:
            return None
        copies = [self._make_writable(sequence)] if shared else []
        for _ in range(missing):
            sequence.block_table.append(self._allocate())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on where `parent` is, on the same blocks; it gives back its own."""
        for block in _blocks(parent):
            self.pool.share(block)
        self.free(child)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_blocks = parent.num_cached_blocks
        child.num_window_freed_blocks = parent.num_window_freed_blocks
        child.cache_parent = parent.cache_parent

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Register the blocks that are full and computed now, so that other sequences find them."""
        if not self._caching:
            return
        size = self.block_size
        full = range(sequence.num_cached_blocks, sequence.num_computed_tokens // size)
        token_ids = sequence.cache_tokens if full else []
        for i in full:
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            sequence.cache_parent = self.prefix_cache.insert(
                sequence.cache_parent, tokens, sequence.block_table[i]
            )
            sequence.num_cached_blocks = i + 1
        self._retain(sequence, full)

    def _retain(self, sequence: Sequence, places: range) -> None:
        """Give blocks of a sequence, by their places, the priorities that its request has for them."""
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
        """Let go of all blocks, the last first: ends of prefixes are reused before their beginnings. Idempotent."""
        for block in reversed(_blocks(sequence)):
            self.pool.release(block, content_cached=block in self.prefix_cache)
        sequence.block_table = []
        sequence.slot_copies = []
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0
        sequence.num_window_freed_blocks = 0
        sequence.cache_parent = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that blocks are conserved: every one free or held as often as tables name it.

        Raises `IntegrityError`.
        """
        holders = Counter(block for sequence in sequences for block in _blocks(sequence))
        self.pool.check_integrity(holders)
        self.prefix_cache.host.check_integrity()
        for sequence in sequences:
            if sequence.num_computed_tokens > len(sequence.block_table) * self.block_size:
                raise IntegrityError(f"sequence {sequence.id} has computed tokens beyond its block table")

    def _passed(self, sequence: Sequence) -> range:
        """Places in a block table that are behind the window."""
        if self._window is None:
            return range(0)
        return self._window.blocks_outside_window(sequence.num_computed_tokens, self.block_size)

    def _give_back_passed(self, sequence: Sequence) -> None:
        """Let go of the blocks that the window has passed."""
        # What is to be moved must be there until it is.
        if sequence.slot_copies:
            return
        passed = self._passed(sequence)
        # Drafts that were accepted are registered by the step after.
        end = min(passed.stop, sequence.num_cached_blocks) if self._caching else passed.stop
        for i in range(max(passed.start, sequence.num_window_freed_blocks), end):
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
        """Whether the block in which writing goes on is somebody else's too."""
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


def _blocks(sequence: Sequence) -> list[int]:
    """The blocks that a sequence holds, in order."""
    if not sequence.num_window_freed_blocks:
        return sequence.block_table
    return [block for block in sequence.block_table if block != NO_BLOCK]
