"""Token selection: samples the next tokens of sequences from the logits of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from neso.engine.core.addon import Addon, RequestError
from neso.engine.core.request import PositionLogprobs, SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence, finish_reason
from neso.engine.core.step import DraftTokens, Step
from neso.engine.runners.base import LaunchedLogits, Logits
from neso.engine.sampling.sampler import LaunchedSampling, SampledToken, Sampler
from neso.engine.sampling.state import SamplingState, state_of
from neso.engine.sampling.token_sampling import INVALID_TOKEN, RowMasks
from neso.generation.output import FinishReason


@runtime_checkable
class TokenConstraint(Protocol):
    """An add-on that constrains the next tokens of sequences, such as guided decoding."""

    def row_masks(
        self, sequences: list[Sequence], drafts: list[DraftTokens | None], num_drafts: list[int]
    ) -> RowMasks | None:
        """Return masks of the logits rows: sequence i has 1 + num_drafts[i]. None if no row is masked."""

    def accept_token(self, sequence: Sequence, token_id: int, *, ends: bool) -> bool:
        """Process the next token of a sequence; returns whether no token can follow it.

        `ends`: the token ends the sequence. Raises `RequestError`.
        """


@runtime_checkable
class DraftVerifier(Protocol):
    """An add-on that decides which draft tokens are accepted."""

    def verifies(self, step: Step) -> bool:
        """Whether the tokens of a step must be selected by `verify`."""

    def verify(
        self,
        sampler: Sampler,
        logits: Logits,
        sequences: list[Sequence],
        drafts: list[DraftTokens | None],
        num_drafts: list[int],
        masks: RowMasks | None,
    ) -> list[list[SampledToken]]:
        """Return the next tokens of each sequence, at least one, and count the accepted draft tokens as computed.

        All tokens but the last are accepted draft tokens. The first num_drafts[i] tokens of drafts[i] were computed.
        """


class TokenSelector:
    """Samples tokens, appends them to their sequences, and releases the sequences that end."""

    def __init__(self, scheduler: Scheduler, sampler: Sampler, addons: Iterable[Addon]) -> None:
        self.sampler = sampler
        self._scheduler = scheduler
        self._constraint: TokenConstraint | None = None
        self._verifier: DraftVerifier | None = None
        for addon in addons:
            if isinstance(addon, TokenConstraint):
                self._constraint = addon
            if isinstance(addon, DraftVerifier):
                self._verifier = addon

    def select(self, step: Step, logits: Logits) -> list[SequenceOutput]:
        """Sample tokens for every sequence that reached its last known token; their logits rows come first."""
        sequences: list[Sequence] = []
        drafts: list[DraftTokens | None] = []
        num_drafts: list[int] = []
        for scheduled in step.sampled:
            sequences.append(scheduled.sequence)
            drafts.append(scheduled.draft)
            num_drafts.append(scheduled.num_draft_tokens)
            if scheduled.sequence.forks_pending:
                forks = self._scheduler.fork(scheduled.sequence)
                sequences += forks
                drafts += [None] * len(forks)
                num_drafts += [0] * len(forks)
        masks = None
        if self._constraint is not None and self._constraint in step.users:
            masks = self._constraint.row_masks(sequences, drafts, num_drafts)
        if self._verifier is not None and self._verifier.verifies(step):
            verified = self._verifier.verify(self.sampler, logits, sequences, drafts, num_drafts, masks)
            return [
                self.append_tokens(sequence, sequence.num_tokens, tokens, count)
                for sequence, tokens, count in zip(sequences, verified, num_drafts, strict=True)
            ]
        sampled = self.sampler.sample(logits, [state_of(sequence) for sequence in sequences], masks)
        return [
            self.append_tokens(sequence, sequence.num_tokens, [token])
            for sequence, token in zip(sequences, sampled, strict=True)
        ]

    def needs_known_tokens(self, step: Step, states: list[SamplingState]) -> bool:
        """Whether sampling the tokens of a step requires that the host knows the tokens of the previous step."""
        constrained = self._constraint is not None and self._constraint in step.users
        return constrained or any(state.needs_known_tokens for state in states)

    def launch(self, step: Step, logits: LaunchedLogits, states: list[SamplingState]) -> LaunchedSampling:
        """Start to sample the tokens of a launched step without forks and drafts."""
        masks = None
        if self._constraint is not None and self._constraint in step.users:
            sequences = [scheduled.sequence for scheduled in step.sampled]
            masks = self._constraint.row_masks(sequences, [None] * len(sequences), [0] * len(sequences))
        return LaunchedSampling.launch(logits, states, masks)

    def append_tokens(
        self, sequence: Sequence, position: int, tokens: list[SampledToken], num_drafts: int = 0
    ) -> SequenceOutput:
        """Write tokens at `position`: the end, or the position of placeholders.

        Tokens after one that ends it are dropped.
        """
        request = sequence.request
        if tokens[0].token_id == INVALID_TOKEN:
            error = RequestError("the model produced NaN logits, or no next token is allowed")
            return self._fail(sequence, sequence.error or error)
        if sequence.error is not None:
            return self._fail(sequence, sequence.error)
        is_first = position == sequence.num_prompt_tokens + len(request.output_token_ids)
        del sequence.token_ids[position:]
        token_ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        logits = b""
        reason, end_token = None, None
        for token in tokens:
            reason = finish_reason(request, sequence.token_ids, token.token_id)
            sequence.token_ids.append(token.token_id)
            token_ids.append(token.token_id)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            logits += token.logits
            end_token = token.token_id if reason is FinishReason.STOP else None
            if self._constraint is not None:
                try:
                    if self._constraint.accept_token(sequence, token.token_id, ends=end_token is not None):
                        reason = FinishReason.STOP
                except RequestError as error:
                    return self._fail(sequence, error)
            if reason is not None:
                self._scheduler.release(sequence)
                break
        return SequenceOutput(
            request_id=request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            finish_reason=reason,
            end_token_id=end_token if end_token in request.end_token_ids else None,
            logprobs=logprobs,
            generation_logits=logits,
            cached_tokens=sequence.num_cached_tokens,
            scheduled_ns=sequence.scheduled_ns if is_first else 0,
            imported_tokens=sequence.num_imported_tokens if is_first else 0,
            import_error=sequence.import_error if is_first else "",
            imported=sequence.imported if is_first else None,
            preemptions=sequence.num_preemptions if reason is not None else 0,
            draft_tokens=num_drafts,
            accepted_draft_tokens=min(len(token_ids), len(tokens) - 1),
        )

    def _fail(self, sequence: Sequence, error: RequestError) -> SequenceOutput:
        self._scheduler.release(sequence)
        return SequenceOutput.failed(
            sequence.request.request_id, sequence.index, str(error), error_field=error.field
        )
