"""Converts engine-core outputs to client outputs: detokenization, stop strings, log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from neso.engine.core.request import EngineRequest, PositionLogprobs, SequenceOutput
from neso.engine.errors import EngineBusy, EngineError
from neso.engine.ipc.messages import own_id
from neso.engine.text.stop_strings import SequenceText, StopWordFilter, StopWords
from neso.engine.text.tokenizer import EngineTokenizer
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    InvalidParameter,
    PooledOutput,
    SpanSink,
    TokenLogprobs,
    Usage,
)
from neso.generation.output import FloatRows

_PROMPT_CONTEXT = 8
"""Number of prompt tokens at the end that determine whether the output keeps the space before its first word."""


def _error_of(output: SequenceOutput) -> Exception:
    """Return the error of a sequence that the engine failed."""
    if output.error_field:
        return InvalidParameter(output.error_field, output.error)
    return EngineBusy(output.error) if output.refused else EngineError(output.error)


@dataclass(slots=True)
class _SequenceState:
    """Text state of one sequence of a request."""

    text: SequenceText
    stop_words: StopWordFilter | None = None
    cumulative_logprob: float | None = None
    finished: bool = False


@dataclass(slots=True)
class RequestState:
    """Output state of a generation request in flight.

    `finished`: whether all sequences are finished. `stopped`: indices of sequences that were ended by a stop string in
    the last `process` call. The core still runs them; the caller must abort them.
    """

    request: EngineRequest
    tokenizer: EngineTokenizer
    tracer: SpanSink | None = None
    finished: bool = False
    stopped: list[int] = field(default_factory=list)
    _id: str = field(init=False)
    _sequences: list[_SequenceState] = field(init=False)
    _completion_tokens: int = 0
    _cached_tokens: int = 0
    _scheduled_ns: int = 0
    _preemptions: int = 0
    _draft_tokens: int = 0
    _accepted_draft_tokens: int = 0
    _prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False)
    _context_logits: list[bytes] = field(default_factory=list)
    _best_of_deltas: list[list[Completion]] | None = None
    _started: bool = False

    def __post_init__(self) -> None:
        self._id = own_id(self.request.request_id)
        params = self.request.sampling
        num_sequences = params.best_of or params.n
        hides_stop_words = params.stop_words and not params.include_stop_str_in_output
        stop_words = StopWords(params.stop_words) if hides_stop_words else None
        self._sequences = [self._make_sequence(stop_words) for _ in range(num_sequences)]
        if num_sequences > params.n:
            self._best_of_deltas = [[] for _ in range(num_sequences)]
        self._prompt_logprobs = [None] if params.prompt_logprobs is not None else None

    def _make_sequence(self, stop_words: StopWords | None) -> _SequenceState:
        params = self.request.sampling
        text = SequenceText(
            self.tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                shown_special_tokens=params.shown_special_tokens,
                prompt_token_ids=self.request.prompt_token_ids[-_PROMPT_CONTEXT:],
            ),
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return _SequenceState(text, None if stop_words is None else StopWordFilter(stop_words))

    def process(self, outputs: list[SequenceOutput]) -> GenerationOutput | None:
        """Process the outputs of one step for this request; returns None if there is nothing to output yet.

        Raises `EngineError` if the engine failed the request, `EngineBusy` if it had no capacity for it,
        `InvalidParameter` if a parameter is the cause.
        """
        self.stopped.clear()
        deltas = []
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise _error_of(output)
            self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
            self._scheduled_ns = self._scheduled_ns or output.scheduled_ns
            self._preemptions += output.preemptions
            self._draft_tokens += output.draft_tokens
            self._accepted_draft_tokens += output.accepted_draft_tokens
            if output.prompt_logprobs and self._prompt_logprobs is not None:
                self._prompt_logprobs += [self._token_logprobs(entry) for entry in output.prompt_logprobs]
            if output.context_logits:
                self._context_logits.append(output.context_logits)
            has_delta = output.token_ids or output.finish_reason is not None
            if has_delta and not self._sequences[output.index].finished:
                deltas.append(self._delta(output))
        self.finished = finished = all(sequence.finished for sequence in self._sequences)
        if self._best_of_deltas is not None:
            for delta in deltas:
                self._best_of_deltas[delta.index].append(delta)
            deltas = _best(self._best_of_deltas, self.request.sampling.n) if deltas and finished else []
        if not deltas:
            return None
        first, self._started = not self._started, True
        request = self.request
        return GenerationOutput(
            request_id=self._id,
            outputs=deltas,
            usage=Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=self._completion_tokens,
                cached_tokens=self._cached_tokens,
                draft_tokens=self._draft_tokens,
                accepted_draft_tokens=self._accepted_draft_tokens,
            ),
            finished=finished,
            num_sequences=request.sampling.n,
            prompt_token_ids=request.prompt_token_ids if first else [],
            prompt_logprobs=self._prompt_logprobs if first else None,
            context_logits=self._take_context_logits() if first and self._context_logits else None,
            scheduled_ns=self._scheduled_ns if first else 0,
            preemptions=self._preemptions,
        )

    def _take_context_logits(self) -> FloatRows:
        rows, self._context_logits = b"".join(self._context_logits), []
        return _rows(rows, len(self.request.prompt_token_ids))

    def _delta(self, output: SequenceOutput) -> Completion:
        """Return the tokens of one step as text, up to a stop string."""
        state = self._sequences[output.index]
        finish_reason, token_ids = output.finish_reason, output.token_ids
        num_held = 0 if state.stop_words is None else state.stop_words.num_held
        visible, stop_reason = self._visible_tokens(state, output)
        update = state.text.add(visible)
        text = update.text
        if update.stop_reason is not None:
            if finish_reason is None:
                self.stopped.append(output.index)
            finish_reason, stop_reason = FinishReason.STOP, update.stop_reason
            token_ids = token_ids[: max(0, update.num_tokens_kept - num_held)]
        elif finish_reason is not None:
            text += state.text.finish()
        self._completion_tokens += len(token_ids)
        state.finished = finish_reason is not None
        entries = output.logprobs[: len(token_ids)]
        if output.cumulative_logprob is not None:
            state.cumulative_logprob = output.cumulative_logprob
        elif entries:
            state.cumulative_logprob = (state.cumulative_logprob or 0.0) + sum(e.logprob for e in entries)
        has_logprobs = entries and self.request.sampling.logprobs is not None
        logits = output.generation_logits
        return Completion(
            index=output.index,
            text=text,
            token_ids=token_ids,
            logprobs=[self._token_logprobs(entry) for entry in entries] if has_logprobs else None,
            cumulative_logprob=state.cumulative_logprob,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            generation_logits=_rows(logits, len(output.token_ids))[: len(token_ids)] if logits else None,
        )

    def _visible_tokens(
        self, state: _SequenceState, output: SequenceOutput
    ) -> tuple[list[int], str | int | None]:
        """Return the tokens without stop tokens and stop words, and the stop token or word that ended the sequence."""
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
        visible, word = state.stop_words.finish(token_ids, by_word=by_word)
        return visible, stop_reason if word is None else self.tokenizer.decode(list(word))

    def _token_logprobs(self, entry: PositionLogprobs) -> TokenLogprobs:
        text = self.tokenizer.token_text
        return TokenLogprobs(
            token_id=entry.token_id,
            token=text(entry.token_id),
            logprob=entry.logprob,
            rank=entry.rank,
            top=tuple((i, p, text(i)) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)),
        )


def _best(deltas: list[list[Completion]], n: int) -> list[Completion]:
    """Return the n sequences with the highest mean log probability, best first, as in OpenAI's `best_of`."""
    completions = [Completion.joined(parts) for parts in deltas]
    completions.sort(key=lambda c: (c.cumulative_logprob or 0.0) / max(1, len(c.token_ids)), reverse=True)
    return [replace(completion, index=index) for index, completion in enumerate(completions[:n])]


def _rows(values: bytes, count: int) -> FloatRows:
    """Decode float32[count, vocab_size]."""
    return np.frombuffer(values, np.float32).reshape(count, -1)


@dataclass(slots=True)
class PooledState:
    """Output state of a pooling request in flight."""

    request: EngineRequest
    finished: bool = False
    stopped: tuple[int, ...] = ()

    def process(self, outputs: list[SequenceOutput]) -> PooledOutput:
        """Process the only output of the request. Raises `EngineError`, `EngineBusy`, `InvalidParameter`."""
        (output,) = outputs
        self.finished = True
        if output.finish_reason is FinishReason.ERROR:
            raise _error_of(output)
        return PooledOutput(
            request_id=output.request_id,
            values=np.frombuffer(output.pooled, np.float32),
            num_prompt_tokens=len(self.request.prompt_token_ids),
        )
