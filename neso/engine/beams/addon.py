"""Beam search as an add-on of the engine core: each live beam is a sequence on forked blocks of the paged KV cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import itemgetter

from neso.engine.beams.beam_search import BeamSearch, InvalidLogits
from neso.engine.core.addon import Addon
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.step import Step
from neso.engine.runners.base import Logits
from neso.generation.output import FinishReason


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The sequences of a beam search: at most `size` members with the same number of tokens.

    The search is a single sequence while its prompt is computed, then one sequence per beam. After preemption it is a
    single sequence again, with the common prefix of all beams, from which the beams are forked again.
    """

    members: list[Sequence]
    size: int
    search: BeamSearch

    def num_ready_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens that a step may compute now.

        All but the last token, until the last token is the only one left for every member.
        """
        if all(member.num_uncomputed_tokens == 1 for member in self.members):
            return 1
        return sequence.num_uncomputed_tokens - (len(self.members) > 1)

    def common_prefix(self) -> list[int]:
        # In sorted order, the first and last member have the shortest common prefix.
        tokens = [member.token_ids for member in self.members]
        first, last = min(tokens), max(tokens)
        length = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), len(first))
        return first[:length]


class BeamSearchAddon(Addon):
    """State of a sequence: its beam group."""

    def admit(self, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        if sampling.uses_beams:
            group = BeamGroup([sequence], sampling.num_sequences, BeamSearch(sequence))
            sequence.group = sequence.addons[self] = group
            sequence.uses_sampler = False
            sequence.sync_only = True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if self in parent.addons:
            child.addons[self] = parent.addons[self]

    def extend(self, step: Step) -> None:
        rows = []
        for scheduled in step.users[self]:
            if scheduled.samples:
                last = scheduled.query_start + scheduled.num_new_tokens - 1
                rows.append((scheduled.sequence, step.add_logits_rows([last]).start))
        if rows:
            step.addon_data[self] = rows

    def update(self, step: Step, logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
        """Advance the searches. Returns the outputs of searches that have ended, with all tokens at once."""
        outputs: list[SequenceOutput] = []
        rows: list[tuple[Sequence, int]] = step.addon_data.get(self, [])
        for _, of_group in itertools.groupby(rows, lambda row: id(row[0].group)):
            outputs += _advance(dict(map(itemgetter(0, 1), of_group)), logits, scheduler)
        return outputs

    def check_integrity(self, scheduler: Scheduler) -> None:
        groups = {id(s.group): s.addons[self] for s in scheduler.running if self in s.addons}
        for group in groups.values():
            name = group.search.request.request_id
            if set(group.members) != set(scheduler.sequences_of(name)):
                raise IntegrityError(f"beam search '{name}': its members are not the request's sequences")
            beams = [beam.token_ids for beam in group.search.beams]
            if len(group.members) > 1 and [member.token_ids for member in group.members] != beams:
                raise IntegrityError(f"beam search '{name}': a sequence has other tokens than its beam")


def _advance(row_of: dict[Sequence, int], logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
    group = next(iter(row_of)).group
    assert isinstance(group, BeamGroup)
    search, members = group.search, group.members
    if len(members) < len(search.beams):
        # The group was preempted, and its common prefix has been recomputed.
        place(scheduler, group, [0] * len(search.beams))
        return []
    try:
        parents = search.advance(logits[[row_of[member] for member in members]])
    except InvalidLogits:
        scheduler.release(members[0])
        return [SequenceOutput.failed(search.request.request_id, 0, "the model produced NaN logits")]
    if not parents:
        scheduler.release(members[0])
        return _results(search, members[0])
    place(scheduler, group, parents)
    return []


def place(scheduler: Scheduler, group: BeamGroup, parents: list[int]) -> None:
    """Make the beams the members of `group`; beam i continues from member parents[i].

    The first beam that continues from a member replaces it; further beams share its blocks. This needs no new block,
    because a shared block is copied when it is written.
    """
    members = group.members
    continued = set(parents)
    idle = [member for i, member in enumerate(members) if i not in continued]
    free_indices = iter(sorted(set(range(group.size)) - {member.index for member in members}))
    placed: list[Sequence] = []
    for parent in parents:
        origin = members[parent]
        if parent in continued:
            continued.discard(parent)
            placed.append(origin)
        elif idle:
            child = idle.pop()
            scheduler.kv.fork(origin, child)
            placed.append(child)
        else:
            child = scheduler.fork_one(origin, next(free_indices))
            child.num_preemptions = origin.num_preemptions
            placed.append(child)
    for member in idle:
        scheduler.release_one(member)
    for member, beam in zip(placed, group.search.beams, strict=True):
        member.token_ids = beam.token_ids
        member.forks_pending = 0
    # Reserve sequences for beams that may be added later.
    placed[0].forks_pending = group.size - len(placed)
    group.members = placed


def _results(search: BeamSearch, member: Sequence) -> list[SequenceOutput]:
    """Return the `n` best hypotheses; empty outputs if there are fewer, because no other text is possible."""
    request = search.request
    outputs = []
    for index, hypothesis in enumerate(search.hypotheses.best[: request.sampling.n]):
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
