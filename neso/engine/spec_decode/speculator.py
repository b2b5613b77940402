"""Speculative decoding as an add-on of the engine core: proposes draft tokens, lays out trees, verifies drafts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from neso.engine.core.addon import Addon, Failures
from neso.engine.core.draft import Draft
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import DraftStats, StepCounts
from neso.engine.core.step import Step
from neso.engine.runners.base import Logits
from neso.engine.sampling.sampler import SampledToken, Sampler
from neso.engine.sampling.state import state_of
from neso.engine.sampling.token_sampling import RowMasks
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
        """Fill in draft tokens.

        Called before every step, after scheduling: drafts may have been cut, and blocks are allocated.
        """

    def observe(self, sequences: list[Sequence], verified: list[Verified]) -> None:
        """Receive the sequences that were sampled in a step, before their tokens are appended."""


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
        sequence.draft = draft_of(sequence.request)
        if sequence.draft is not None or self.proposer is not None:
            sequence.addons[self] = True
            sequence.sync_only = True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if self in parent.addons:
            child.addons[self] = True

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
                if sequence.draft is None and room > 0:
                    sequence.draft = self.proposer.propose(sequence, min(max_tokens, room))
        except Exception:
            self._give_up()
            # The tokens of a draft may only be set in `complete`.
            for sequence in decoding:
                sequence.draft = None
        return []

    # -- steps --------------------------------------------------------------------------------------------------

    def prepare(self, step: Step, scheduler: Scheduler) -> Failures:
        if self.proposer is None:
            return []
        started = time.perf_counter()
        try:
            self.proposer.complete(step)
        except Exception:
            self._give_up()
            for scheduled in step.scheduled:
                scheduled.drop_drafts()
                scheduled.sequence.draft = None
            return []
        longest = max((scheduled.num_draft_tokens for scheduled in step.scheduled), default=0)
        if longest:
            self._length.observe_proposal(min(longest, self._length.longest), time.perf_counter() - started)
        return []

    def extend(self, step: Step) -> None:
        """Add draft trees to the step, and the block copies required by accepted tokens of trees."""
        copies = []
        has_tree = False
        if not step.users(self):
            return
        for row, scheduled in enumerate(step.scheduled):
            copies += [(row, source, target) for source, target in scheduled.sequence.slot_copies]
            draft = scheduled.sequence.draft if scheduled.num_draft_tokens else None
            has_tree = has_tree or (draft is not None and draft.tree is not None)
        if copies:
            step.extensions["slot_copies"] = np.array(copies, np.int32)
        if has_tree:
            step.extensions.update(_trees(step))

    def verifies(self, step: Step) -> bool:
        return self.proposer is not None or step.counts.num_draft_tokens > 0

    def verify(
        self,
        sampler: Sampler,
        logits: Logits,
        sequences: list[Sequence],
        num_drafts: list[int],
        masks: RowMasks | None,
    ) -> list[tuple[list[SampledToken], list[int]]]:
        """Return for each sequence its next tokens (at least one) and the indices of the accepted draft tokens."""
        states = [state_of(sequence) for sequence in sequences]
        drafts = [sequence.draft for sequence in sequences]
        verified = verify(sampler, logits, states, drafts, num_drafts, masks)
        for result, count in zip(verified, num_drafts, strict=True):
            if count:
                self._length.observe_draft(count, len(result.path))
                self._stats.count(count, len(result.path))
        if self.proposer is not None:
            try:
                self.proposer.observe(sequences, verified)
            except Exception:
                self._give_up()
        return [(result.tokens, result.path) for result in verified]

    def observe(self, counts: StepCounts, seconds: float) -> None:
        if not counts.num_context_tokens:
            self._length.observe_step(counts.num_decoding, counts.num_draft_tokens, seconds)

    def stats(self) -> dict[str, Any]:
        return {"drafts": self._stats.copy()}

    def _give_up(self) -> None:
        logger.exception("speculative decoding failed; the engine continues without it")
        self.proposer = None


def _trees(step: Step) -> dict[str, Any]:
    depths: list[int] = []
    masks: list[int] = []
    for scheduled in step.scheduled:
        draft = scheduled.sequence.draft if scheduled.num_draft_tokens else None
        if draft is None or draft.tree is None:
            depths += range(scheduled.num_new_tokens)
            masks += [0] * scheduled.num_new_tokens
        else:
            depths += (0, *draft.tree.depths[: scheduled.num_draft_tokens])
            masks += (1, *draft.tree.masks[: scheduled.num_draft_tokens])
    return {"tree_depths": np.array(depths, np.int32), "tree_masks": np.array(masks, np.uint64)}
