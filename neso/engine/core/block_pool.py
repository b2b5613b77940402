"""The blocks of the paged key-value cache: who holds each, and which are free."""

from __future__ import annotations

from neso.engine.core.free_blocks import FreeBlocks


class IntegrityError(AssertionError):
    """The books do not balance: a block is lost, held twice, or free and held at once."""


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the free ones in the order of their reuse.

    A free block may still hold a cached prefix: it stands behind those that do not, and `share` takes it back out.
    Paged attention: https://arxiv.org/abs/2309.06180, section 4.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = FreeBlocks(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """Take the block that is to be reused first. Raises `KeyError` if there is none: ask `num_free` first."""
        block = self._free.take()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Hold a block that somebody holds already, or one whose content outlived its last holder."""
        if self._references[block] == 0:
            self._free.remove(block)
        self._references[block] += 1

    def release(self, block: int, *, content_cached: bool) -> None:
        """Let go of a block. The last holder frees it: to be reused last if its content may be asked for again."""
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.add(block, content_cached=content_cached)
        elif self._references[block] < 0:
            raise IntegrityError(f"block {block} was released more often than held")

    def retain(self, block: int, priority: int, seconds: float | None) -> None:
        """Say when the content of a block that is held is to make room for others, once it is free."""
        self._free.retain(block, priority, seconds)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Compare with `holders`, block → how many block tables name it. Raises `IntegrityError`."""
        for block, count in enumerate(self._references):
            if count != holders.get(block, 0):
                raise IntegrityError(
                    f"block {block} has {count} references, {holders.get(block, 0)} tables name it"
                )
            if (count == 0) != (block in self._free):
                raise IntegrityError(
                    f"block {block} has {count} references and is free: {block in self._free}"
                )
