"""Speculative decoding as an add-on of the engine core: proposes draft tokens, lays out trees, verifies drafts."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from neso.engine.core.addon import Addon, Failures
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import DraftStats, StepCounts
from neso.engine.core.step import DraftTokens, ScheduledSequence, Step
from neso.engine.core.step_plan import Int32Array
from neso.engine.runners.base import Logits
from neso.engine.sampling.sampler import SampledToken, Sampler
from neso.engine.sampling.state import state_of
from neso.engine.sampling.token_sampling import RowMasks
from neso.engine.spec_decode.draft import NO_SLOT_COPIES, NO_TREE, Draft, DraftTree, DraftTreePlan
from neso.engine.spec_decode.draft_length import DraftLength
from neso.engine.spec_decode.request_draft import draft_of
from neso.engine.spec_decode.verification import verify

if TYPE_CHECKING:
    from neso.engine.spec_decode.verification import Verified

logger = logging.getLogger(__name__)


class Proposer:
    """Proposes draft tokens. It stores its state of a sequence in `sequence.addons[self]`."""

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """Propose at most `max_tokens` draft tokens that follow the known ones; None for no draft.

        The number of tokens must be final; the tokens themselves may be set in `complete`.
        """
        raise NotImplementedError

    def complete(self, step: Step) -> None:
        """Set the tokens of drafts. A draft without tokens is dropped.

        Called before every step, after scheduling: drafts may have been cut, and blocks are allocated.
        """

    def observe(self, sequences: list[Sequence], verified: list[Verified]) -> None:
        """Receive the sequences that were sampled in a step, before their tokens are appended."""


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """State of a sequence.

    - draft: follows the first `position` tokens; no longer valid when the sequence has more
    - slot_copies: (from, to) positions whose keys and values the next step copies
    """

    draft: Draft | None = None
    position: int = 0
    slot_copies: list[tuple[int, int]] = field(default_factory=list)

    def draft_at(self, position: int) -> Draft | None:
        """Return the draft that follows the first `position` tokens."""
        return self.draft if self.draft and self.position == position else None

    def accept(self, sequence: Sequence, path: list[int]) -> None:
        """Count accepted draft tokens as computed; `path` has their indices in the draft, ascending.

        Their keys and values follow those of the known tokens, in draft order. The next step copies tree nodes that are
        not at their final position.
        """
        self.draft = None
        known = sequence.num_computed_tokens
        sequence.num_computed_tokens += len(path)
        self.slot_copies = [(known + node, known + place) for place, node in enumerate(path) if node != place]
        # The copies read slots that may be outside the window of the accepted tokens.
        sequence.keeps_window = bool(self.slot_copies)


class SpeculativeDecoding(Addon):
    """Verifies the drafts supplied with requests and, if there is a proposer, the drafts that it proposes.

    A draft never fails a request: if a proposer raises, no more drafts are proposed.
    """

    def __init__(self, proposer: Proposer | None = None, length: DraftLength | None = None) -> None:
        self.proposer = proposer
        self._length = length or DraftLength(1, fixed=True)
        self._stats = DraftStats()

    # -- sequences ----------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        draft = draft_of(sequence.request)
        if draft is not None or self.proposer is not None:
            sequence.addons[self] = _DraftedSequence(draft, sequence.num_tokens)
            sequence.sync_only = True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if self in parent.addons:
            child.addons[self] = _DraftedSequence()

    def stop(self, sequence: Sequence) -> None:
        state: _DraftedSequence | None = sequence.addons.get(self)
        if state is not None:
            self._clear_slot_copies(sequence, state)

    def begin_step(self, scheduler: Scheduler) -> Failures:
        """Propose drafts for the sequences that are decoding."""
        if self.proposer is None:
            return []
        decoding = [
            s
            for s in scheduler.running
            if s.num_uncomputed_tokens == 1 and not s.forks_pending and s.group is None
        ]
        max_tokens = self._length.choose(len(decoding))
        if not max_tokens:
            return []
        try:
            for sequence in decoding:
                # A sampled token follows the draft, so a sequence with only one token left needs no draft.
                room = sequence.request.max_tokens - sequence.num_output_tokens - 1
                state: _DraftedSequence = sequence.addons[self]
                if room > 0 and not state.draft_at(sequence.num_tokens):
                    state.draft = self.proposer.propose(sequence, min(max_tokens, room))
                    state.position = sequence.num_tokens
        except Exception:
            self._disable()
            # The tokens of a draft may only be set in `complete`.
            for sequence in decoding:
                sequence.addons[self].draft = None
        return []

    def draft(self, sequence: Sequence, num_new_tokens: int) -> DraftTokens | None:
        state: _DraftedSequence | None = sequence.addons.get(self)
        draft = None if state is None else state.draft_at(sequence.num_tokens)
        # The root of a tree must be the first new token.
        return draft if draft is not None and (draft.tree is None or num_new_tokens == 1) else None

    # -- steps --------------------------------------------------------------------------------------------------

    def prepare(self, step: Step, scheduler: Scheduler) -> Failures:
        if self.proposer is None:
            return []
        started = time.perf_counter()
        try:
            self.proposer.complete(step)
        except Exception:
            self._disable()
            for scheduled in step.users.get(self, ()):
                scheduled.drop_drafts()
                scheduled.sequence.addons[self].draft = None
            return []
        longest = max((scheduled.num_draft_tokens for scheduled in step.scheduled), default=0)
        if longest:
            self._length.observe_proposal(min(longest, self._length.longest), time.perf_counter() - started)
        return []

    def extend(self, step: Step) -> None:
        """Add draft trees to the step, and the slot copies of accepted tokens of trees."""
        copies = []
        has_tree = False
        for row, scheduled in enumerate(step.scheduled):
            state: _DraftedSequence | None = scheduled.sequence.addons.get(self)
            if state is not None:
                copies += [(row, source, target) for source, target in state.slot_copies]
            has_tree = has_tree or _tree(scheduled) is not None
        if copies or has_tree:
            slot_copies = np.array(copies, np.int32) if copies else NO_SLOT_COPIES
            masks, depths = _masks_and_depths(step) if has_tree else (NO_TREE.masks, NO_TREE.depths)
            step.add_part(DraftTreePlan(slot_copies, masks, depths))

    def update(self, step: Step, logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
        for scheduled in step.users[self]:
            self._clear_slot_copies(scheduled.sequence, scheduled.sequence.addons[self])
        return []

    def verifies(self, step: Step) -> bool:
        return self.proposer is not None or step.counts.num_draft_tokens > 0

    def verify(
        self,
        sampler: Sampler,
        logits: Logits,
        sequences: list[Sequence],
        drafts: list[DraftTokens | None],
        num_drafts: list[int],
        masks: RowMasks | None,
    ) -> list[list[SampledToken]]:
        """Return the next tokens of each sequence, and count the accepted draft tokens as computed."""
        states = [state_of(sequence) for sequence in sequences]
        computed = [draft if isinstance(draft, Draft) else None for draft in drafts]
        verified = verify(sampler, logits, states, computed, num_drafts, masks)
        for sequence, result, count in zip(sequences, verified, num_drafts, strict=True):
            if count:
                self._length.observe_draft(count, len(result.path))
                self._stats.count(count, len(result.path))
                sequence.addons[self].accept(sequence, result.path)
        if self.proposer is not None:
            try:
                self.proposer.observe(sequences, verified)
            except Exception:
                self._disable()
        return [result.tokens for result in verified]

    def observe(self, counts: StepCounts, seconds: float) -> None:
        if self.proposer is not None and not counts.num_context_tokens:
            self._length.observe_step(counts.num_decoding, counts.num_draft_tokens, seconds)

    def stats(self) -> dict[str, Any]:
        return {"drafts": self._stats.copy()} if self._stats.drafts else {}

    def _clear_slot_copies(self, sequence: Sequence, state: _DraftedSequence) -> None:
        state.slot_copies = []
        sequence.keeps_window = False

    def _disable(self) -> None:
        logger.exception("speculative decoding failed; the engine continues without it")
        self.proposer = None


def _tree(scheduled: ScheduledSequence) -> DraftTree | None:
    """Return the tree of draft tokens that a sequence computes in a step; None for a chain or no draft tokens."""
    draft = scheduled.draft
    return draft.tree if scheduled.num_draft_tokens and isinstance(draft, Draft) else None


def _masks_and_depths(step: Step) -> tuple[npt.NDArray[np.uint64], Int32Array]:
    """Return `DraftTreePlan.masks` and `DraftTreePlan.depths` of all new tokens."""
    masks: list[int] = []
    depths: list[int] = []
    for scheduled in step.scheduled:
        tree = _tree(scheduled)
        if tree is None:
            masks += [0] * scheduled.num_new_tokens
            depths += range(scheduled.num_new_tokens)
        else:
            masks += (1, *tree.masks[: scheduled.num_draft_tokens])
            depths += (0, *tree.depths[: scheduled.num_draft_tokens])
    return np.array(masks, np.uint64), np.array(depths, np.int32)
