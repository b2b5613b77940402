"""Draft tokens proposed by a smaller model with the same vocabulary.

The draft model has its own KV cache with the same layout as the model's, and no accounting of its own: block tables
index both caches. It computes the same tokens as the model in the same step, so blocks that are reused from the prefix
cache, shared by forks or copied are valid in both caches. If it lags behind (by the last token of a fully accepted
draft, because drafting was disabled, or by the blocks of another engine), it catches up before the next draft. Missing
keys and values reduce the acceptance rate, never the correctness. Its context may be shorter than the model's:
positions after its end are neither computed nor drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neso.engine.core.sequence import NO_BLOCK, Sequence
from neso.engine.core.step import ScheduledSequence, Step, padded_block_tables
from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout, Float32Array, Logits, Runner
from neso.engine.sampling.state import SamplingState, state_of
from neso.engine.sampling.token_sampling import SamplingBatch, probabilities_of
from neso.engine.spec_decode.draft import Draft
from neso.engine.spec_decode.speculator import Proposer
from neso.engine.spec_decode.verification import draw_one

MAX_CATCH_UP_TOKENS = 512
"""Maximum number of tokens of a sequence that the draft model computes in one step. A sequence that lags further behind
gets drafts in a later step.
"""


@dataclass(slots=True)
class _DraftInput:
    """New tokens of a sequence for the draft model, starting at a position.

    `draft`: the draft to fill with `num_draft_tokens` tokens; None to only catch up.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    draft: Draft | None = None
    num_draft_tokens: int = 0
    state: SamplingState | None = None


class DraftModelProposer(Proposer):
    """Runs a draft model in the same steps as the model; `vocab_size` is the vocabulary size of the model.

    With `probabilistic`, draft tokens of requests with a temperature are sampled with the parameters of the request.
    """

    def __init__(
        self, runner: Runner, layout: CacheLayout, vocab_size: int, *, probabilistic: bool = True
    ) -> None:
        self._runner = runner
        self._runner.allocate_cache(layout)
        self._block_size = layout.block_size
        self._vocab_size = vocab_size
        self._probabilistic = probabilistic
        self._steps = 0
        self._pending: dict[int, Draft] = {}  # drafts without tokens yet, by sequence id

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        max_tokens = min(max_tokens, self._runner.max_position - sequence.num_tokens)
        if max_tokens < 1:
            return None
        draft = self._pending[sequence.id] = Draft([0] * max_tokens)
        return draft

    def complete(self, step: Step) -> None:
        pending, self._pending = self._pending, {}
        found = [self._catch_up(scheduled) for scheduled in step.scheduled]
        drafting, lags = [], False
        for scheduled, item in zip(step.scheduled, found, strict=True):
            draft = pending.pop(scheduled.sequence.id, None)
            if draft is None:
                continue
            reaches_end = item and item.start + len(item.token_ids) == scheduled.sequence.num_tokens
            if item is None or not reaches_end or not scheduled.num_draft_tokens:
                lags |= item is not None and not reaches_end
                scheduled.drop_drafts()
                draft.token_ids = []
                continue
            item.draft, item.num_draft_tokens = draft, scheduled.num_draft_tokens
            item.state = state_of(scheduled.sequence)
            drafting.append(item)
        for draft in pending.values():
            draft.token_ids = []
        inputs = [item for item in found if item is not None]
        # A step without prompts and drafts can be computed later, when the draft model catches up.
        computes = (
            drafting
            or lags
            or step.block_copies
            or not all(scheduled.decodes for scheduled in step.scheduled)
        )
        for item in inputs:
            end = item.start + (len(item.token_ids) if computes else 0)
            item.sequence.addons[self] = (item.sequence.num_preemptions, end)
        if computes and inputs:
            self._draft_tokens(inputs, drafting, step.block_copies)

    def _catch_up(self, scheduled: ScheduledSequence) -> _DraftInput | None:
        """Return the tokens to compute so that the draft model reaches the model's position, without the draft.

        Returns None if its whole context is computed and the sequence is longer than that.
        """
        sequence = scheduled.sequence
        end = scheduled.end - scheduled.num_draft_tokens
        preemptions, computed = sequence.addons.get(self, (-1, 0))
        if preemptions != sequence.num_preemptions:
            # Imported blocks have no keys and values of the draft model.
            computed = max(0, sequence.num_computed_tokens - sequence.num_imported_tokens)
        longest = self._runner.max_position
        if computed >= longest < end:
            return None
        end = min(end, longest)
        # Positions computed after the known tokens belong to rejected draft tokens.
        start = min(computed, end - 1)
        if self._needs_freed_block(sequence, start):
            start = max(start, min(sequence.num_computed_tokens, end - 1))
        end = min(end, start + MAX_CATCH_UP_TOKENS)
        return _DraftInput(sequence, start, sequence.token_ids[start:end])

    def _needs_freed_block(self, sequence: Sequence, position: int) -> bool:
        """Whether the draft model attends at `position` to blocks that were freed because they left the window."""
        window = self._runner.window
        if window is None:
            return False
        first = max(0, position - window.size + 1) // self._block_size
        return NO_BLOCK in sequence.block_table[first : position // self._block_size]

    def _draft_tokens(
        self, inputs: list[_DraftInput], drafting: list[_DraftInput], copies: list[tuple[int, int]]
    ) -> None:
        """Catch up, then draft one token at a time."""
        for item in drafting:
            assert item.draft is not None
            item.draft.token_ids = []
        logits = self._step(inputs, [item.draft is not None for item in inputs], copies)
        while drafting:
            self._append_tokens(drafting, logits)
            drafting = [item for item in drafting if item.draft and len(item.draft) < item.num_draft_tokens]
            if drafting:
                next_inputs = [self._next_input(item) for item in drafting]
                logits = self._step(next_inputs, [True] * len(next_inputs), [])

    def _next_input(self, item: _DraftInput) -> _DraftInput:
        """Return the last draft token as input."""
        assert item.draft is not None
        position = item.sequence.num_tokens + len(item.draft) - 1
        item.sequence.addons[self] = (item.sequence.num_preemptions, position + 1)
        return _DraftInput(item.sequence, position, item.draft.token_ids[-1:])

    def _step(
        self, inputs: list[_DraftInput], needs_logits: list[bool], copies: list[tuple[int, int]]
    ) -> Logits:
        """Compute the tokens; return the logits of the last token of each input that needs them."""
        self._steps += 1
        # The vocabulary may have less padding than the model's.
        token_ids = np.array([token for item in inputs for token in item.token_ids], np.int32)
        query_start = np.cumsum([0, *(len(item.token_ids) for item in inputs)], dtype=np.int32)
        return self._runner.step(
            StepPlan(
                step=self._steps,
                sequence_ids=np.array([item.sequence.id for item in inputs], np.int32),
                token_ids=np.where(token_ids < self._runner.vocab_size, token_ids, 0),
                query_start=query_start,
                num_computed=np.array([item.start for item in inputs], np.int32),
                block_tables=padded_block_tables([item.sequence.block_table for item in inputs]),
                block_copies=np.array(copies, np.int32).reshape(-1, 2),
                logits_rows=query_start[1:][np.array(needs_logits, bool)] - 1,
            )
        )

    def _append_tokens(self, drafting: list[_DraftInput], logits: Logits) -> None:
        """Append one token to each draft, from its logits row."""
        count = len(drafting)
        zeros = np.zeros(count, np.float32)
        greedy = SamplingBatch(
            zeros, np.zeros(count, np.int32), np.ones(count, np.float32), zeros, np.zeros(count)
        )
        tokens = self._runner.choose(logits, greedy)
        for row, (item, token) in enumerate(zip(drafting, tokens.tolist(), strict=True)):
            assert item.draft is not None and item.state is not None
            # A token outside the model's vocabulary, or INVALID_TOKEN from NaN logits, counts as a rejected draft
            # token.
            if not 0 <= token < self._vocab_size:
                token = 0
            if self._probabilistic and not item.state.params.greedy:
                token = self._draw(item, token, logits[row])
            item.draft.token_ids.append(token)

    def _draw(self, item: _DraftInput, most_likely: int, logits: Float32Array) -> int:
        """Sample a token with the request's parameters, and store the distribution in the draft."""
        assert item.draft is not None and item.state is not None
        if item.draft.probabilities is None:
            item.draft.probabilities = np.zeros((item.num_draft_tokens, self._vocab_size), np.float32)
        probabilities = item.draft.probabilities[len(item.draft)]
        logits = logits[: self._vocab_size]
        if np.isnan(logits).any():
            probabilities[most_likely] = 1.0
            return most_likely
        probabilities[: len(logits)] = probabilities_of(logits, item.state.params)
        return draw_one(probabilities, item.state.uniform())
