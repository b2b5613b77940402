"""All beam searches that an engine has under way."""

from __future__ import annotations

import itertools
from operator import itemgetter

from neso.engine.beams.beam_search import BeamGroup, InvalidLogits
from neso.engine.beams.placement import place
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.runners.base import Logits
from neso.generation.output import FinishReason


class BeamSearch:
    """Takes the logits of sequences in lockstep, and keeps the sequences as the searches want them.

    The scheduler knows a search by its sequences only: one while the prompt is computed, then one a beam. After
    preemption it is one again, with what all beams have in common, from which they are forked anew.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: dict[str, BeamGroup] = {}

    def add(self, sequence: Sequence) -> None:
        """Take note of a request that the scheduler has taken, if it is for beams."""
        if sequence.lockstep is not None:
            self._groups[sequence.request.request_id] = BeamGroup(sequence)

    def forget(self, request_id: str) -> None:
        """The request has no sequences any more."""
        self._groups.pop(request_id, None)

    def advance(self, rows: list[tuple[Sequence, int]], logits: Logits) -> list[SequenceOutput]:
        """Take a step: for each sequence in lockstep that was computed, its row of the logits.

        Gives outputs for searches that have come to their end; all tokens at once.
        """
        outputs: list[SequenceOutput] = []
        for request_id, mine in itertools.groupby(rows, lambda row: row[0].request.request_id):
            outputs += self._advance(self._groups[request_id], dict(map(itemgetter(0, 1), mine)), logits)
        return outputs

    def check_integrity(self) -> None:
        """Check that searches and sequences agree. Raises `IntegrityError`."""
        for request_id, group in self._groups.items():
            sequences = self._scheduler.sequences_of(request_id)
            if not sequences or sequences[0].lockstep is None:
                raise IntegrityError(f"beam search '{request_id}' has no sequences")
            members = sequences[0].lockstep.members
            if set(members) != set(sequences):
                raise IntegrityError(f"beam search '{request_id}' and the scheduler know other sequences")
            if len(members) > 1 and [m.token_ids for m in members] != [b.token_ids for b in group.beams]:
                raise IntegrityError(f"beam search '{request_id}': a sequence is not what its beam is")

    def _advance(self, group: BeamGroup, row_of: dict[Sequence, int], logits: Logits) -> list[SequenceOutput]:
        lockstep = next(iter(row_of)).lockstep
        assert lockstep is not None
        members = lockstep.members
        if len(members) < len(group.beams):
            # It was preempted, and what the beams have in common is computed again.
            place(self._scheduler, lockstep, [0] * len(group.beams), [beam.token_ids for beam in group.beams])
            return []
        try:
            parents = group.advance(logits[[row_of[member] for member in members]])
        except InvalidLogits:
            return self._finish(members[0], [_broken(group)])
        if not parents:
            return self._finish(members[0], _results(group, members[0]))
        place(self._scheduler, lockstep, parents, [beam.token_ids for beam in group.beams])
        return []

    def _finish(self, member: Sequence, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        self._scheduler.release(member)
        return outputs


def _results(group: BeamGroup, member: Sequence) -> list[SequenceOutput]:
    """The `n` best; where there are fewer, because nothing else may be generated, the rest is empty."""
    request = group.request
    outputs = []
    for index, hypothesis in enumerate(group.hypotheses.best[: request.sampling.n]):
        steps = hypothesis.path.steps()
        ended = hypothesis.reason is FinishReason.STOP and steps[-1].token_id in request.end_token_ids
        outputs.append(
            SequenceOutput(
                request_id=request.request_id,
                index=index,
                token_ids=[step.token_id for step in steps],
                finish_reason=hypothesis.reason,
                end_token_id=steps[-1].token_id if ended else None,
                logprobs=[step.logprobs for step in steps if step.logprobs is not None],
                cumulative_logprob=hypothesis.cumulative_logprob,
                generation_logits=b"".join(step.logits for step in steps),
                cached_tokens=member.num_cached_tokens,
                scheduled_ns=member.scheduled_ns,
                preemptions=member.num_preemptions,
            )
        )
    outputs += [
        SequenceOutput(
            request_id=request.request_id, index=index, token_ids=[], finish_reason=FinishReason.STOP
        )
        for index in range(len(outputs), request.sampling.n)
    ]
    return outputs


def _broken(group: BeamGroup) -> SequenceOutput:
    return SequenceOutput(
        request_id=group.request.request_id,
        index=0,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        error="the model gave logits that are not numbers",
    )
