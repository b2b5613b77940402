"""Micro-batches of a step on pipeline stages: while a stage computes one, the stage before it computes the next.

    stage 0   | 1 | 2 | 3 | 4 |
    stage 1       | 1 | 2 | 3 | 4 |

Only prompt tokens are moved to micro-batches of their own. A step with few tokens takes as long as reading the weights
takes, so halves of it would take as long as the whole.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from neso.engine.core.step_plan import NO_TRANSFERS, Int32Array, StepPlan
from neso.engine.lora.adapter import LoraPlan

MIN_TOKENS = 64
"""Minimum number of tokens of a micro-batch."""
MAX_PER_STAGE = 4
"""Maximum number of micro-batches of a step for each stage."""

_NO_COPIES = np.empty((0, 2), np.int32)
_NO_ROWS = np.empty(0, np.int32)


def micro_batches(plan: StepPlan, num_stages: int) -> list[StepPlan]:
    """Return the plans that execute a step on `num_stages` pipeline stages, in order.

    The last one has all logits rows, so its results are those of the step. Steps with other inputs than tokens and
    adapters are not split.
    """
    count = min(MAX_PER_STAGE * num_stages, plan.num_tokens // MIN_TOKENS)
    if num_stages == 1 or count < 2 or plan.parts.keys() - {LoraPlan}:
        return [plan]
    size = -(-plan.num_tokens // count)
    begins = plan.query_start[:-1].copy()
    ends = plan.query_start[1:].copy()  # of the tokens of each sequence that precede its logits rows
    np.minimum.at(ends, np.searchsorted(plan.query_start, plan.logits_rows, "right") - 1, plan.logits_rows)
    batches: list[StepPlan] = []
    while len(batches) < count - 1 and (ends - begins).sum() >= size:
        available = ends - begins
        taken = np.clip(size - (np.cumsum(available) - available), 0, available).astype(np.int32)
        batches.append(_part(plan, begins, begins + taken, is_first=not batches, is_last=False))
        begins = begins + taken
    last = _part(plan, begins, plan.query_start[1:], is_first=not batches, is_last=True)
    return [*batches, last]


def _part(plan: StepPlan, begins: Int32Array, ends: Int32Array, *, is_first: bool, is_last: bool) -> StepPlan:
    """Return a plan of the flat positions begins[s]:ends[s] of each sequence."""
    chosen = np.flatnonzero(ends > begins)
    lengths = (ends - begins)[chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.arange(starts[-1]) + np.repeat(begins[chosen] - starts[:-1], lengths)
    lora = plan.part(LoraPlan)
    return replace(
        plan,
        sequence_ids=plan.sequence_ids[chosen],
        token_ids=plan.token_ids[positions],
        query_start=starts,
        num_computed=plan.num_computed[chosen] + (begins - plan.query_start[:-1])[chosen],
        block_tables=plan.block_tables[chosen],
        block_copies=plan.block_copies if is_first else _NO_COPIES,
        block_transfers=plan.block_transfers if is_first else NO_TRANSFERS,
        logits_rows=np.searchsorted(positions, plan.logits_rows).astype(np.int32) if is_last else _NO_ROWS,
        parts={} if lora is None else {LoraPlan: LoraPlan(lora.slots[chosen])},
    )
