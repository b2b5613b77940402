"""Embeddings as an add-on of the engine core: pools the hidden states of a prompt step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.addon import Addon
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.step import Step
from neso.engine.pooling.pooler import PooledSoFar, Pooler, PoolingPlan
from neso.engine.runners.base import Logits, Runner
from neso.generation.output import FinishReason

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Hidden states [start, end) of the step belong to one sequence; `last`: they end its prompt."""

    sequence: Sequence
    start: int
    end: int
    last: bool


class PoolingAddon(Addon):
    """State of a sequence: the pooled part of its prompt."""

    def __init__(self, runner: Runner, pooler: Pooler | None = None) -> None:
        self._runner, self._pooler = runner, pooler or Pooler("last")

    def admit(self, sequence: Sequence) -> None:
        params = sequence.request.pooling
        if params is not None:
            sequence.addons[self] = PooledSoFar(self._pooler.kind_for(params))
            sequence.uses_sampler = False
            sequence.sync_only = True
            sequence.needs_every_position = params.pooling != "last"

    def extend(self, step: Step) -> None:
        flat_positions: list[int] = []
        found: list[_Rows] = []
        for scheduled in step.users[self]:
            sequence, pooled = scheduled.sequence, scheduled.sequence.addons[self]
            # The prompt of a preempted sequence is computed again, but no position is pooled twice.
            first = max(sequence.num_computed_tokens, pooled.num_tokens)
            if not sequence.needs_every_position:
                first = scheduled.end - 1 if scheduled.samples else scheduled.end
            if first < scheduled.end:
                start, offset = len(flat_positions), scheduled.query_start - sequence.num_computed_tokens
                flat_positions += range(offset + first, offset + scheduled.end)
                found.append(_Rows(sequence, start, len(flat_positions), scheduled.samples))
        if found:
            step.addon_data[self] = found
            step.add_part(PoolingPlan(np.array(flat_positions, np.int32)))

    def update(self, step: Step, logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
        parts: list[_Rows] = step.addon_data.get(self, [])
        if not parts:
            return []
        outputs = []
        hidden = self._runner.hidden_states()
        for part in parts:
            pooled: PooledSoFar = part.sequence.addons[self]
            pooled.add(hidden[part.start : part.end])
            if part.last:
                params = part.sequence.request.pooling
                assert params is not None
                outputs.append(_output(part.sequence, self._pooler.finish(pooled.vector(), params)))
                scheduler.release(part.sequence)
        return outputs


def _output(sequence: Sequence, vector: Float32Array) -> SequenceOutput:
    valid = np.isfinite(vector).all()
    return SequenceOutput(
        request_id=sequence.request.request_id,
        index=0,
        token_ids=[],
        finish_reason=FinishReason.STOP if valid else FinishReason.ERROR,
        pooled=vector.tobytes() if valid else b"",
        cached_tokens=sequence.num_cached_tokens,
        scheduled_ns=sequence.scheduled_ns,
        error="" if valid else "the model produced NaN hidden states",
    )
