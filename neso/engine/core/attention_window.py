"""Sliding-window attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A token attends to itself, the `size - 1` tokens before it, and the first `sinks` tokens of its sequence.

    Attention sinks: https://arxiv.org/abs/2309.17453.
    """

    size: int
    sinks: int = 0

    def blocks_outside_window(self, num_computed: int, block_size: int) -> range:
        """Return the block-table indices whose tokens are not attended to from position `num_computed` on."""
        first = -(-self.sinks // block_size)
        return range(first, max(first, (num_computed - self.size + 1) // block_size))

    def max_blocks_in_window(self, num_new_tokens: int, block_size: int) -> int:
        """Return the maximum number of blocks held by a sequence in a step that adds `num_new_tokens` tokens."""
        return -(-self.sinks // block_size) - (-(self.size - 1 + num_new_tokens) // block_size) + 1
