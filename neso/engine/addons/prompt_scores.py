"""Log probabilities of prompt tokens, and logits of prompt positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neso.engine.core.addon import Addon
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.step import Step
from neso.engine.runners.base import Logits
from neso.engine.sampling.logprobs import position_logprobs


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Logits rows of the prompt positions [first, last), used to score the prompt tokens `targets`."""

    sequence: Sequence
    rows: range
    targets: list[int]
    last: int


class PromptScores(Addon):
    """State of a sequence: the number of prompt positions that were reported. Removed once all were reported."""

    def admit(self, sequence: Sequence) -> None:
        request = sequence.request
        reported = bool(request.output_token_ids)  # by the engine that computed the first token
        if request.sampling.needs_prompt_scores and not reported and _num_scorable(sequence) > 0:
            sequence.addons[self] = 0
            sequence.sync_only = True
            sequence.needs_every_position = True

    def extend(self, step: Step) -> None:
        found: list[_Rows] = []
        for scheduled in step.users[self]:
            sequence = scheduled.sequence
            # The prompt of a preempted sequence is recomputed, but not reported again.
            first = max(sequence.num_computed_tokens, sequence.addons[self])
            last = min(scheduled.end - scheduled.num_draft_tokens, _num_scorable(sequence))
            if first < last:
                # The logits at position p score the token at p + 1.
                targets = sequence.token_ids[first + 1 : min(last + 1, sequence.num_prompt_tokens)]
                offset = scheduled.query_start - sequence.num_computed_tokens
                rows = step.add_logits_rows(range(offset + first, offset + last))
                found.append(_Rows(sequence, rows, targets, last))
        if found:
            step.addon_data[self] = found

    def update(self, step: Step, logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
        outputs = []
        for part in step.addon_data.get(self, ()):
            outputs.append(_output(part, logits))
            if part.last < _num_scorable(part.sequence):
                part.sequence.addons[self] = part.last
            else:
                del part.sequence.addons[self]
                part.sequence.needs_every_position = False
        return outputs


def _num_scorable(sequence: Sequence) -> int:
    """Return the number of scorable prompt positions: all for logits; for log probabilities all but the last."""
    return sequence.num_prompt_tokens - (not sequence.request.sampling.return_context_logits)


def _output(part: _Rows, logits: Logits) -> SequenceOutput:
    request, params = part.sequence.request, part.sequence.request.sampling
    values = np.asarray(logits[part.rows.start : part.rows.stop])
    logprobs = []
    if params.prompt_logprobs is not None and part.targets:
        logprobs = position_logprobs(values[: len(part.targets)], part.targets, params.prompt_logprobs)
    return SequenceOutput(
        request_id=request.request_id,
        index=part.sequence.index,
        token_ids=[],
        prompt_logprobs=logprobs,
        context_logits=values.tobytes() if params.return_context_logits else b"",
    )
