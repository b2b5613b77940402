"""One engine step: the scheduled sequences, and the layout of their tokens and logits rows for the runner."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from neso.engine.core.kv_manager import BlockCopy
from neso.engine.core.prefix_cache import BlockTransfer
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import StepCounts
from neso.engine.core.step_plan import NO_TRANSFERS, Int32Array, PlanPart, StepPlan


class DraftTokens(Protocol):
    """Tokens proposed by an add-on to follow the known tokens of a sequence: a chain or the nodes of a tree."""

    token_ids: list[int]

    def __len__(self) -> int: ...

    @property
    def is_chain(self) -> bool: ...

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root to a node, including the node; empty for the root, -1."""


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence in a step: computes `num_new_tokens` tokens, starting at `num_computed_tokens`.

    The last `num_draft_tokens` of them are the first tokens of `draft`. `query_start`: flat position of the first.
    """

    sequence: Sequence
    num_new_tokens: int
    num_draft_tokens: int = 0
    query_start: int = 0
    draft: DraftTokens | None = None

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.sequence.num_computed_tokens + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether the last known token is computed, so that the next one can be sampled."""
        return self.end - self.num_draft_tokens == len(self.sequence.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether only the last known token and draft tokens are computed."""
        return self.num_new_tokens - self.num_draft_tokens == 1 and self.samples

    def drop_drafts(self) -> None:
        """Remove the draft tokens from the step."""
        self.num_new_tokens -= self.num_draft_tokens
        self.num_draft_tokens = 0
        self.draft = None


@dataclass(slots=True, eq=False)
class Step:
    """The scheduler's decision and, after `lay_out`, the logits rows.

    - scheduled: the sequences, in the order of the plan
    - sampled: sequences whose next tokens are sampled. Their logits rows come first: one row per sequence, plus one for
      each pending fork (the same position, repeated) or each draft token
    - logits_rows: flat positions whose logits are computed; add-ons append theirs with `add_logits_rows`
    - parts: `StepPlan.parts`, provided by add-ons
    - addon_data: data passed from an add-on's `extend` to its `update`
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    block_transfers: list[BlockTransfer] = field(default_factory=list)
    sampled: list[ScheduledSequence] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    counts: StepCounts = field(default_factory=StepCounts)
    parts: dict[type[PlanPart], PlanPart] = field(default_factory=dict)
    addon_data: dict[object, Any] = field(default_factory=dict)
    _users: dict[object, list[ScheduledSequence]] | None = None

    @property
    def sequences(self) -> list[Sequence]:
        return [scheduled.sequence for scheduled in self.scheduled]

    @property
    def users(self) -> Mapping[object, list[ScheduledSequence]]:
        """The scheduled sequences that have state of an add-on, by add-on."""
        if self._users is None:
            self._users = {}
            for scheduled in self.scheduled:
                for key in scheduled.sequence.addons:
                    self._users.setdefault(key, []).append(scheduled)
        return self._users

    def drop_released(self) -> None:
        """Remove sequences that were released after scheduling."""
        self.scheduled = [s for s in self.scheduled if not s.sequence.released]
        self._users = None

    def lay_out(self) -> None:
        """Lay out the new tokens contiguously, and assign logits rows to the sequences that sample."""
        position = num_decoding = num_drafts = 0
        for scheduled in self.scheduled:
            scheduled.query_start = position
            position += scheduled.num_new_tokens
            num_drafts += scheduled.num_draft_tokens
            if not scheduled.samples:
                continue
            num_decoding += scheduled.num_new_tokens - scheduled.num_draft_tokens == 1
            if scheduled.sequence.uses_sampler:
                last_known = position - 1 - scheduled.num_draft_tokens
                self.logits_rows += range(last_known, position)
                self.logits_rows += [last_known] * scheduled.sequence.forks_pending
                self.sampled.append(scheduled)
        self.counts = StepCounts(
            num_decoding,
            len(self.scheduled) - num_decoding,
            position,
            position - num_decoding - num_drafts,
            num_drafts,
        )

    def add_logits_rows(self, positions: Iterable[int]) -> range:
        """Request the logits of flat positions; returns their rows."""
        first = len(self.logits_rows)
        self.logits_rows += positions
        return range(first, len(self.logits_rows))

    def add_part(self, part: PlanPart) -> None:
        """Add an add-on's inputs to the plan."""
        self.parts[type(part)] = part

    def plan(self, number: int) -> StepPlan:
        """Create the arrays for the runner. At least one sequence must be scheduled."""
        sequence_ids, token_ids, query_start, num_computed, tables = [], list[int](), [], [], []
        for scheduled in self.scheduled:
            sequence, computed = scheduled.sequence, scheduled.sequence.num_computed_tokens
            sequence_ids.append(sequence.id)
            query_start.append(len(token_ids))
            num_computed.append(computed)
            tables.append(sequence.block_table)
            num_known = scheduled.num_new_tokens - scheduled.num_draft_tokens
            token_ids += sequence.token_ids[computed : computed + num_known]
            if scheduled.draft is not None:
                token_ids += scheduled.draft.token_ids[: scheduled.num_draft_tokens]
        query_start.append(len(token_ids))
        return StepPlan(
            step=number,
            sequence_ids=np.array(sequence_ids, np.int32),
            token_ids=np.array(token_ids, np.int32),
            query_start=np.array(query_start, np.int32),
            num_computed=np.array(num_computed, np.int32),
            block_tables=padded_block_tables(tables),
            block_copies=np.array(self.block_copies, np.int32).reshape(-1, 2),
            block_transfers=np.array(self.block_transfers, np.int32)
            if self.block_transfers
            else NO_TRANSFERS,
            logits_rows=np.array(self.logits_rows, np.int32),
            parts=self.parts,
        )


def padded_block_tables(block_tables: list[array[int]]) -> Int32Array:
    """Return `StepPlan.block_tables`."""
    width = max(map(len, block_tables))
    padded = np.full((len(block_tables), width), -1, np.int32)
    # A slice of a memoryview copies an array of ints without objects for its elements.
    entries = padded.reshape(-1).data
    for start, table in zip(range(0, padded.size, width), block_tables, strict=True):
        entries[start : start + len(table)] = table
    return padded
