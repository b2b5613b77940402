"""Input of a runner for one step: immutable arrays, so that a step can be recorded and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

NO_POSITIONS = np.empty(0, np.int32)
NO_TRANSFERS = np.empty((0, 3), np.int32)
NO_ROWS = np.empty((0, 0), np.float32)

NO_COPIES = np.empty((0, 3), np.int32)
NO_DEPTHS = np.empty(0, np.int32)
NO_MASKS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A flat batch: the new tokens of all scheduled sequences, concatenated without padding.

    With S sequences, T new tokens, R logits rows (arrays are int32 unless stated otherwise, read-only):

    - sequence_ids[S]: ids of the sequences, unique over the engine's life.
    - token_ids[T]: the new tokens; those of sequence s are query_start[s]:query_start[s + 1]. The value -1 - r refers
      to the token sampled for row r of the previous step, which may still be running.
    - query_start[S + 1]: from 0 to T; every sequence has at least one new token.
    - num_computed[S]: number of tokens of s whose keys and values are in the cache. The new tokens of s have the
      positions num_computed[s], num_computed[s] + 1, ... except in a tree.
    - block_tables[S, B]: cache blocks of s in order of position, padded with -1. The table also covers the new tokens;
      this step writes their keys and values at block_tables[s, p // block_size], offset p % block_size.
    - block_copies[C, 2]: (source, target) blocks to copy before any keys and values are written (copy-on-write).
    - block_transfers[H, 3]: (to host, block, host block) to copy in this order before all other operations: to the host
      if the first element is 1, from the host if it is 0. Only for runners with "host_cache".
    - logits_rows[R]: flat positions in [0, T) whose logits are returned, in this order; a position may repeat.

    Extensions, filled by add-ons:

    - adapter_slots[S]: the runner's slot with the adapter of s, -1 for none; None: no sequence has an adapter.
    - hidden_rows[H]: flat positions whose final hidden states are returned. Only for runners with "hidden_states".
    - embedding_positions[E]: flat positions, ascending, where a row of `embeddings` float32[E, hidden] replaces the
      embedding of the token; the token id there is a placeholder. Only for runners with "input_embeddings".
    - slot_copies[C, 3]: (s, from, to) positions of sequence s whose keys and values are copied, after the block copies
      and before any new keys and values are written; all slots are read before any is written.
    - tree_masks[T], uint64: if not 0, the token is in a draft tree and attends, among its sequence's new tokens, to
      those whose bits are set, itself included. Token i is written to the slot of position num_computed[s] + i, as
      always, but its position is num_computed[s] + tree_depths[i]. Both arrays are empty if there is no tree. Only for
      runners with "tree_attention".
    """

    step: int
    sequence_ids: Int32Array
    token_ids: Int32Array
    query_start: Int32Array
    num_computed: Int32Array
    block_tables: Int32Array
    block_copies: Int32Array
    logits_rows: Int32Array
    adapter_slots: Int32Array | None = None
    hidden_rows: Int32Array = field(default_factory=lambda: NO_POSITIONS)
    embedding_positions: Int32Array = field(default_factory=lambda: NO_POSITIONS)
    block_transfers: Int32Array = field(default_factory=lambda: NO_TRANSFERS)
    embeddings: Float32Array = field(default_factory=lambda: NO_ROWS)
    slot_copies: Int32Array = field(default_factory=lambda: NO_COPIES)
    tree_depths: Int32Array = field(default_factory=lambda: NO_DEPTHS)
    tree_masks: npt.NDArray[np.uint64] = field(default_factory=lambda: NO_MASKS)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def positions(self) -> Int32Array:
        """Return the position of every new token in its sequence, int32[T]."""
        if not len(self.tree_depths):
            return self.slot_positions()
        return (np.repeat(self.num_computed, np.diff(self.query_start)) + self.tree_depths).astype(np.int32)

    def slot_positions(self) -> Int32Array:
        """Return the position whose slot each new token is written to, int32[T].

        Differs from `positions` only in a tree.
        """
        lengths = np.diff(self.query_start)
        starts = np.repeat(self.num_computed - self.query_start[:-1], lengths)
        return (starts + np.arange(self.num_tokens, dtype=np.int32)).astype(np.int32)

    def moved_slots(self, block_size: int) -> tuple[Int32Array, Int32Array]:
        """Return the cache slots to copy from, and to, for `slot_copies`."""
        rows, sources, targets = self.slot_copies.T
        return (
            self.block_tables[rows, sources // block_size] * block_size + sources % block_size,
            self.block_tables[rows, targets // block_size] * block_size + targets % block_size,
        )

    def slots(self, block_size: int) -> Int32Array:
        """Return the cache slot (block * block_size + offset) that every new token is written to, int32[T]."""
        positions = self.slot_positions()
        rows = np.repeat(np.arange(self.num_sequences), np.diff(self.query_start))
        return self.block_tables[rows, positions // block_size] * block_size + positions % block_size

    def dump(self, path: Path) -> None:
        """Write the plan to an .npz file for `load`."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        arrays = {name: np.asarray(value) for name, value in values.items() if value is not None}
        np.savez(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> StepPlan:
        """Read a file written by `dump`."""
        with np.load(path) as saved:
            arrays = {name: saved[name] for name in saved.files}
        return cls(**{**arrays, "step": int(arrays["step"])})
