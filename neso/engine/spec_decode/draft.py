"""Draft tokens: proposals for the next tokens of a sequence, and their trees in a step plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import Int32Array, PlanPart, StepPlan

Float32Array = npt.NDArray[np.float32]
MAX_TREE_NODES = 63
"""Maximum number of nodes of a draft tree: with its root, the last known token, it fits the 64 bits of a mask."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of draft tokens. Nodes come after their parents; the root, number -1, is the last known token.

    - parents[N]: the parent of each node
    - depths[N]: 1 for children of the root
    - masks[N]: the ancestors of a node, and itself; bit 0 is the root, bit i + 1 is node i
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)
    masks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.parents) > MAX_TREE_NODES:
            raise ValueError(f"a draft tree has at most {MAX_TREE_NODES} nodes, not {len(self.parents)}")
        depths: list[int] = []
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} of a draft tree comes before its parent {parent}")
            depths.append(1 if parent < 0 else depths[parent] + 1)
            masks.append((1 if parent < 0 else masks[parent]) | 1 << (node + 1))
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "masks", tuple(masks))


class Distributions(Protocol):
    """Distributions from which draft tokens were drawn: float32[N, vocab_size], or an object that computes its rows."""

    def __getitem__(self, number: int, /) -> Float32Array: ...


@dataclass(slots=True, eq=False)
class Draft:
    """Draft tokens that are computed in one step with the last known token, and then accepted or rejected.

    - token_ids[N]: a chain, or the nodes of `tree`
    - probabilities: the distributions from which the tokens were drawn; None if they were not drawn at random
    - acceptance_threshold: accept a token if the model's probability of it is at least this multiple of its draft
      probability; None for exact verification
    """

    token_ids: list[int]
    tree: DraftTree | None = None
    probabilities: Distributions | None = None
    acceptance_threshold: float | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.tree is None

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root to a node, including the node; empty for the root, -1."""
        if self.tree is None:
            return self.token_ids[: node + 1]
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.tree.parents[node]
        return tokens[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTreePlan(PlanPart):
    """Trees of draft tokens in a step, for runners with "tree_attention".

    - slot_copies int32[C, 3]: (s, from, to) positions of sequence s whose keys and values are copied, after the block
      copies and before any new keys and values are written; all slots are read before any is written.
    - masks uint64[T]: if not 0, the token is in a tree and attends, among its sequence's new tokens, to those whose
      bits are set, itself included; bit i is the i-th new token.
    - depths int32[T]: the position of the i-th new token of s is num_computed[s] + depth; it is written to the slot of
      position num_computed[s] + i, as always.

    `masks` and `depths` are empty if no token is in a tree.
    """

    slot_copies: Int32Array
    masks: npt.NDArray[np.uint64]
    depths: Int32Array

    def copied_slots(self, plan: StepPlan, block_size: int) -> tuple[Int32Array, Int32Array]:
        """Return the cache slots to copy from, and to."""
        rows, sources, targets = self.slot_copies.T
        return (
            plan.block_tables[rows, sources // block_size] * block_size + sources % block_size,
            plan.block_tables[rows, targets // block_size] * block_size + targets % block_size,
        )


NO_SLOT_COPIES = np.empty((0, 3), np.int32)
NO_TREE = DraftTreePlan(NO_SLOT_COPIES, np.empty(0, np.uint64), np.empty(0, np.int32))


def token_positions(plan: StepPlan) -> Int32Array:
    """Return the position of every new token in its sequence, int32[T]."""
    tree = plan.part(DraftTreePlan)
    if tree is None or not len(tree.depths):
        return plan.positions()
    return (np.repeat(plan.num_computed, np.diff(plan.query_start)) + tree.depths).astype(np.int32)
