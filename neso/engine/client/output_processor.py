"""Turns the tokens that the engine core gives back into text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from neso.engine.best_of import BestOf
from neso.engine.core.request import EngineRequest, PositionLogprobs, SequenceOutput
from neso.engine.errors import EngineBusy, EngineError
from neso.engine.open_tokenizer import EngineText
from neso.engine.text.sequence_text import SequenceText, StopWordFilter, StopWords
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    InvalidParameter,
    TokenLogprobs,
    Usage,
)
from neso.generation.output import FloatRows


@dataclass(slots=True)
class SequenceState:
    """One sequence of a request, on the side of the text."""

    text: SequenceText
    stop_words: StopWordFilter | None = None
    num_tokens: int = 0
    cumulative_logprob: float | None = None
    finished: bool = False


@dataclass(slots=True)
class RequestState:
    """Follows one request from its first token to its last; `finished` when all its sequences are."""

    request: EngineRequest
    tokenizer: EngineText
    sequences: list[SequenceState] = field(init=False)
    cached_tokens: int = 0
    scheduled_ns: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    _prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False)
    _context_logits: list[bytes] = field(default_factory=list)
    _best_of: BestOf | None = None
    _started: bool = False

    def __post_init__(self) -> None:
        params = self.request.sampling
        hidden = params.stop_words and not params.include_stop_str_in_output
        stop_words = StopWords(params.stop_words) if hidden else None
        self.sequences = [self._sequence(stop_words) for _ in range(params.best_of or params.n)]
        if len(self.sequences) > params.n:
            self._best_of = BestOf(params.n)
        self._prompt_logprobs = [None] if params.prompt_logprobs is not None else None

    def _sequence(self, stop_words: StopWords | None) -> SequenceState:
        params = self.request.sampling
        text = SequenceText(
            # The end of the prompt says whether the first word keeps the space before it.
            self.tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                shown_special_tokens=params.shown_special_tokens,
                prompt_token_ids=self.request.prompt_token_ids[-8:],
            ),
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return SequenceState(text, None if stop_words is None else StopWordFilter(stop_words))

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def process(self, outputs: list[SequenceOutput]) -> GenerationOutput | None:
        """Take the outputs of one step for this request; None while there is nothing to tell.

        Raises `EngineError` when the engine failed the request, `EngineBusy` when it had no room for it,
        `InvalidParameter` when a parameter is at fault. A sequence that a stop string has ended is `finished` here
        while the core still runs it: the caller aborts it (see `stopped_by_text`).
        """
        deltas = []
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                if output.error_field:
                    raise InvalidParameter(output.error_field, output.error)
                raise (EngineBusy if output.refused else EngineError)(output.error)
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            self.scheduled_ns = self.scheduled_ns or output.scheduled_ns
            self.preemptions += output.preemptions
            self.draft_tokens += output.draft_tokens
            self.accepted_draft_tokens += output.accepted_draft_tokens
            if output.prompt_logprobs and self._prompt_logprobs is not None:
                self._prompt_logprobs += [self._logprobs(entry) for entry in output.prompt_logprobs]
            if output.context_logits:
                self._context_logits.append(output.context_logits)
            gives = output.token_ids or output.finish_reason is not None
            if gives and not self.sequences[output.index].finished:
                deltas.append(self._delta(output))
        if self._best_of is not None:
            self._best_of.add(deltas)
            deltas = self._best_of.best() if deltas and self.finished else []
        if not deltas:
            return None
        first, self._started = not self._started, True
        return GenerationOutput(
            request_id=self.request.request_id,
            outputs=deltas,
            usage=Usage(
                prompt_tokens=len(self.request.prompt_token_ids),
                completion_tokens=sum(sequence.num_tokens for sequence in self.sequences),
                cached_tokens=self.cached_tokens,
                draft_tokens=self.draft_tokens,
                accepted_draft_tokens=self.accepted_draft_tokens,
            ),
            finished=self.finished,
            num_sequences=self.request.sampling.n,
            prompt_token_ids=self.request.prompt_token_ids if first else [],
            prompt_logprobs=self._prompt_logprobs if first else None,
            context_logits=self._take_context_logits() if first else None,
            scheduled_ns=self.scheduled_ns if first else 0,
            preemptions=self.preemptions,
        )

    def _take_context_logits(self) -> FloatRows | None:
        if not self._context_logits:
            return None
        rows, self._context_logits = b"".join(self._context_logits), []
        return _rows(rows, len(self.request.prompt_token_ids))

    def _delta(self, output: SequenceOutput) -> Completion:
        state = self.sequences[output.index]
        params = self.request.sampling
        reason, token_ids = output.finish_reason, output.token_ids
        num_held = 0 if state.stop_words is None else state.stop_words.num_held
        shown, stop_reason = self._shown(state, output)
        update = state.text.add(shown)
        text = update.text
        if update.stop_reason is not None:
            reason, stop_reason = FinishReason.STOP, update.stop_reason
            token_ids = token_ids[: max(0, update.num_tokens_kept - num_held)]
        elif reason is not None:
            text += state.text.finish()
        state.num_tokens += len(token_ids)
        state.finished = reason is not None
        entries = output.logprobs[: len(token_ids)]
        if output.cumulative_logprob is not None:
            state.cumulative_logprob = output.cumulative_logprob
        elif entries:
            state.cumulative_logprob = (state.cumulative_logprob or 0.0) + sum(e.logprob for e in entries)
        asked = bool(entries) and params.logprobs is not None
        logits = output.generation_logits
        return Completion(
            index=output.index,
            text=text,
            token_ids=token_ids,
            logprobs=[self._logprobs(entry) for entry in entries] if asked else None,
            cumulative_logprob=state.cumulative_logprob,
            finish_reason=reason,
            stop_reason=stop_reason,
            generation_logits=_rows(logits, len(output.token_ids))[: len(token_ids)] if logits else None,
        )

    def _shown(self, state: SequenceState, output: SequenceOutput) -> tuple[list[int], str | int | None]:
        """Tokens whose text may be shown now, and the stop token or word that ended the sequence."""
        params = self.request.sampling
        stop_reason: str | int | None = None
        token_ids = output.token_ids
        by_token = output.end_token_id is not None
        if by_token and output.end_token_id in params.stop_token_ids:
            stop_reason = output.end_token_id
        if by_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        if state.stop_words is None:
            return token_ids, stop_reason
        if output.finish_reason is None:
            return state.stop_words.add(token_ids), None
        by_word = output.finish_reason is FinishReason.STOP and not by_token
        shown, word = state.stop_words.finish(token_ids, by_word=by_word)
        return shown, stop_reason if word is None else self.tokenizer.decode(list(word))

    def _logprobs(self, entry: PositionLogprobs) -> TokenLogprobs:
        text = self.tokenizer.token_text
        return TokenLogprobs(
            token_id=entry.token_id,
            token=text(entry.token_id),
            logprob=entry.logprob,
            rank=entry.rank,
            top=tuple((i, p, text(i)) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)),
        )


def stopped_by_text(outputs: list[SequenceOutput], state: RequestState) -> list[int]:
    """Indices of sequences that a stop string has ended while the engine core still runs them."""
    return [o.index for o in outputs if o.finish_reason is None and state.sequences[o.index].finished]


def _rows(values: bytes, count: int) -> FloatRows:
    """float32[count, vocabulary]."""
    return np.frombuffer(values, np.float32).reshape(count, -1)
