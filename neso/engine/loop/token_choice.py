"""From the logits of a step to the next tokens of its sequences."""

from __future__ import annotations

from neso.engine.core.batch import Batch
from neso.engine.core.finish import finish_reason
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import DraftStats
from neso.engine.guided.grammar import GuideError, refused
from neso.engine.guided.guides import Guides
from neso.engine.runners.base import Logits
from neso.engine.sampling.sampler import SampledToken, Sampler
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN
from neso.engine.spec_decode.speculator import Speculator
from neso.engine.spec_decode.verification import verify
from neso.generation.output import FinishReason


class TokenChoice:
    """Samples, verifies drafts, and says which sequences have ended; remembers what that takes by sequence."""

    def __init__(
        self, scheduler: Scheduler, sampler: Sampler, guides: Guides, speculator: Speculator | None
    ) -> None:
        self.draft_stats = DraftStats()
        self.sampler = sampler
        self._scheduler, self._guides, self._speculator = scheduler, guides, speculator
        self._states: dict[int, SamplingState] = {}

    def choose(self, batch: Batch, logits: Logits) -> list[SequenceOutput]:
        """Give every sequence that samples in this step its tokens. The rows of its logits come first."""
        if self._speculator is not None or any(batch.num_drafts):
            return self._choose_with_drafts(batch, logits)
        sequences = [s for sampled in batch.sampled for s in (sampled, *self._scheduler.fork(sampled))]
        masks = self._guides.row_masks(sequences)
        tokens = self.sampler.sample(logits, [self.state(s) for s in sequences], masks)
        return [
            self.take(sequence, sequence.num_tokens, [token])
            for sequence, token in zip(sequences, tokens, strict=True)
        ]

    def take(
        self, sequence: Sequence, position: int, tokens: list[SampledToken], num_drafts: int = 0
    ) -> SequenceOutput:
        """Put tokens from a position on: the end, or where something stands for it. Those behind an end are lost."""
        request = sequence.request
        if tokens[0].token_id == INVALID_TOKEN:
            self._scheduler.release(sequence)
            message = "the model gave logits that are not numbers, or nothing may come next"
            return SequenceOutput.failed(request.request_id, sequence.index, message)
        is_first = position == sequence.num_prompt_tokens
        sequence.draft = None
        del sequence.token_ids[position:]
        taken: list[SampledToken] = []
        reason, end_token = None, None
        for token in tokens:
            reason = finish_reason(request, sequence.token_ids, token.token_id)
            sequence.token_ids.append(token.token_id)
            taken.append(token)
            end_token = token.token_id if reason is FinishReason.STOP else None
            try:
                if self._guides.advance(sequence, token.token_id, ends=end_token is not None):
                    reason = FinishReason.STOP
            except GuideError as error:
                self._scheduler.release(sequence)
                return refused(request, error, sequence.index)
            if reason is not None:
                self._scheduler.release(sequence)
                break
        return SequenceOutput(
            request_id=request.request_id,
            index=sequence.index,
            token_ids=[token.token_id for token in taken],
            finish_reason=reason,
            end_token_id=end_token if end_token in request.end_token_ids else None,
            logprobs=[token.logprobs for token in taken if token.logprobs is not None],
            generation_logits=b"".join(token.logits for token in taken),
            cached_tokens=sequence.num_cached_tokens,
            scheduled_ns=sequence.scheduled_ns if is_first else 0,
            preemptions=sequence.num_preemptions if reason is not None else 0,
            draft_tokens=num_drafts,
            accepted_draft_tokens=min(len(taken), len(tokens) - 1),
        )

    def state(self, sequence: Sequence) -> SamplingState:
        """What the sampler remembers of a sequence."""
        state = self._states.get(sequence.id)
        if state is None:
            state = SamplingState.create(sequence.request, sequence.text_token_ids, sequence.index)
            self._states[sequence.id] = state
        return state

    def forget(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        self._states.pop(sequence.id, None)
        self._guides.forget(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)

    @property
    def sequence_ids(self) -> set[int]:
        """Sequences of which something is remembered."""
        return {*self._states, *self._guides.sequence_ids}

    def _choose_with_drafts(self, batch: Batch, logits: Logits) -> list[SequenceOutput]:
        """As `choose`, where some sequences have drafts: they get all tokens up to the first that is wrong."""
        sequences: list[Sequence] = []
        num_drafts: list[int] = []
        for sampled, count in zip(batch.sampled, batch.num_drafts, strict=True):
            forks = self._scheduler.fork(sampled)
            sequences += (sampled, *forks)
            num_drafts += (count, *(0 for _ in forks))
        states = [self.state(sequence) for sequence in sequences]
        drafts = [sequence.draft for sequence in sequences]
        masks = self._guides.masks_along(sequences, drafts, num_drafts)
        verified = verify(self.sampler, logits, states, drafts, num_drafts, masks)
        if self._speculator is not None:
            self._speculator.observe_drafts(sequences, verified, num_drafts)
        outputs = []
        for sequence, result, count in zip(sequences, verified, num_drafts, strict=True):
            outputs.append(self.take(sequence, sequence.num_tokens, result.tokens, count))
            if count:
                self.draft_stats.count(count, len(result.path))
            if not sequence.released:
                sequence.accept(result.path)
        return outputs
