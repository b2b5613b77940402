"""Prefix cache: finds blocks that already hold the beginning of a prompt, on the device or in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.prefix_keys import BlockChanges, BlockJournal, next_key, root_key
from neso.engine.core.sequence import CacheToken


@dataclass(frozen=True, slots=True, eq=False)
class PrefixNode:
    """Identifies a prefix in the cache. `key`: the same for equal prefixes in all engines, see `prefix_keys`."""

    key: int


class BlockTransfer(NamedTuple):
    """A copy between a device block and a host block: to the host if `store`, otherwise from the host."""

    store: int
    device_block: int
    host_block: int


@dataclass(slots=True)
class HostCacheStats:
    """Number of blocks stored on the host, loaded back, and evicted from it."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0


class HostCache:
    """Second tier of the prefix cache: blocks in host memory, oldest evicted first.

    Blocks move between the tiers: a loaded block leaves the host. The next step executes the transfers in the order in
    which they were created, before it writes to the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.stats = HostCacheStats()
        self._kept: OrderedDict[Hashable, tuple[int, PrefixNode]] = OrderedDict()  # key → (host block, node)
        self._free = list(range(num_blocks))
        self._transfers: list[BlockTransfer] = []

    def __len__(self) -> int:
        return len(self._kept)

    def node_of(self, key: Hashable) -> PrefixNode | None:
        """Return the node of a prefix on the host; None if it is not there."""
        kept = self._kept.get(key)
        return kept[1] if kept is not None else None

    def store(self, key: Hashable, node: PrefixNode, device_block: int) -> PrefixNode | None:
        """Store a device block that is about to be overwritten. Returns the node that is no longer cached, if any."""
        if not self._free and not self._kept:
            return node  # the host has no blocks, or all are being loaded
        dropped: PrefixNode | None = None
        if not self._free:
            _, (oldest, dropped) = self._kept.popitem(last=False)
            self._free.append(oldest)
            self.stats.evicted_blocks += 1
        host_block = self._free.pop()
        self._kept[key] = host_block, node
        self._transfers.append(BlockTransfer(1, device_block, host_block))
        self.stats.stored_blocks += 1
        return dropped

    def nodes(self) -> Iterator[PrefixNode]:
        """Return the nodes of all blocks."""
        return (node for _, node in self._kept.values())

    def take(self, key: Hashable) -> int:
        """Remove a block for loading; it is not overwritten before `load`. Raises `KeyError`."""
        host_block, _ = self._kept.pop(key)
        return host_block

    def load(self, host_block: int, device_block: int) -> None:
        """Load a block returned by `take`."""
        self._transfers.append(BlockTransfer(0, device_block, host_block))
        self._free.append(host_block)
        self.stats.loaded_blocks += 1

    def drop(self, key: Hashable) -> PrefixNode | None:
        """Drop a block, because the device has the same content; returns its node, None if it is not on the host."""
        if key not in self._kept:
            return None
        host_block, node = self._kept.pop(key)
        self._free.append(host_block)
        return node

    def take_transfers(self) -> list[BlockTransfer]:
        """Return the transfers for the next step."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if a block is lost or used twice."""
        blocks = [*self._free, *(block for block, _ in self._kept.values())]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"of {self.num_blocks} blocks of the host, these are known: {sorted(blocks)}"
            )

    def clear(self) -> None:
        """Drop all blocks and pending transfers."""
        self._kept.clear()
        self._free = list(range(self.num_blocks))
        self._transfers = []


Tokens = tuple[CacheToken, ...]


@dataclass(slots=True)
class PrefixCacheStats:
    """Number of prompt tokens that were looked up and found."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block, and the node that identifies the prefix up to its end. `block`: None if it is on the host."""

    block: int | None
    node: PrefixNode
    key: tuple[Hashable, Tokens]


@dataclass(slots=True)
class PrefixCache:
    """A map (parent, tokens) -> cached block, where parent is the node of the previous block.

    The first block's parent is the cache identity of the sequence (adapter version, salt), so prefixes of different
    identities never match. The dictionary compares the tokens themselves, so hash collisions are harmless. Nodes are
    never reused; descendants of an evicted node are unreachable, and their blocks are reused eventually. With a
    `host` tier, evicted blocks are stored there and keep their nodes.
    """

    block_size: int
    host: HostCache = field(default_factory=lambda: HostCache(0))
    stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    _cached: dict[tuple[Hashable, Tokens], CachedBlock] = field(default_factory=dict)
    _key_of_block: dict[int, tuple[Hashable, Tokens]] = field(default_factory=dict)
    _journal: BlockJournal | None = None

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of_block

    def match(
        self,
        identity: Hashable,
        token_ids: list[int] | list[CacheToken],
        known: Iterable[CachedBlock] = (),
    ) -> list[CachedBlock]:
        """Return the cached blocks of the longest known prefix, excluding at least the last token.

        The last token is always computed, because the request needs its logits. `known` is an earlier match of the same
        tokens; blocks that are still cached are not looked up again.
        """
        found = list(takewhile(self._is_current, known))
        parent = found[-1].node if found else identity
        size = self.block_size
        for start in range(len(found) * size, len(token_ids) - size, size):
            cached = self.lookup((parent, tuple(token_ids[start : start + size])))
            if cached is None:
                break
            found.append(cached)
            parent = cached.node
        return found

    def lookup(self, key: tuple[Hashable, Tokens]) -> CachedBlock | None:
        """Return the block that continues a prefix, on the device or on the host."""
        cached = self._cached.get(key)
        if cached is None and (node := self.host.node_of(key)) is not None:
            return CachedBlock(None, node, key)
        return cached

    def _is_current(self, cached: CachedBlock) -> bool:
        if cached.block is None:
            return self.host.node_of(cached.key) == cached.node
        return self._key_of_block.get(cached.block) is cached.key

    def insert(self, parent: Hashable, tokens: Tokens, block: int) -> PrefixNode:
        """Register a full block; returns the node of the prefix that ends with it.

        If another block with the same prefix is cached, that block is kept and its node is returned.
        """
        key = (parent, tokens)
        known = self._cached.get(key)
        if known is not None:
            return known.node
        node = self.host.drop(key)
        if node is None:
            above = parent.key if isinstance(parent, PrefixNode) else root_key(parent)
            node = PrefixNode(next_key(above, tokens))
            if self._journal is not None:
                self._journal.add(node.key)
        self._register(key, node, block)
        return node

    def load(self, cached: CachedBlock, host_block: int, block: int) -> None:
        """Load a host block returned by `host.take` into a device block."""
        self.host.load(host_block, block)
        self._register(cached.key, cached.node, block)

    def _register(self, key: tuple[Hashable, Tokens], node: PrefixNode, block: int) -> None:
        self._cached[key] = CachedBlock(block, node, key)
        self._key_of_block[block] = key

    def evict(self, block: int) -> None:
        """Remove a block that is about to be overwritten from the cache, if present, and store it on the host."""
        key = self._key_of_block.pop(block, None)
        if key is not None:
            evicted = self._cached.pop(key)
            self.stats.evicted_blocks += 1
            dropped = self.host.store(key, evicted.node, block)
            if dropped is not None and self._journal is not None:
                self._journal.remove(dropped.key)

    def clear(self) -> None:
        """Remove everything."""
        self._cached.clear()
        self._key_of_block.clear()
        self.host.clear()
        if self._journal is not None:
            self._journal.clear()

    def all_keys(self) -> BlockChanges:
        """Return the keys of all cached prefixes, and begin to record changes for `take_changes`."""
        if self._journal is None:
            self._journal = BlockJournal()
            for cached in self._cached.values():
                self._journal.add(cached.node.key)
            for node in self.host.nodes():
                self._journal.add(node.key)
        return self._journal.snapshot()

    def take_changes(self) -> BlockChanges | None:
        """Return the changes since the last message; None if there are none, or before `all_keys`."""
        return None if self._journal is None else self._journal.take()
