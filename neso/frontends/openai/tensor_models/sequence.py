"""One sequence of a request, from the model's responses to outputs."""

from __future__ import annotations

from dataclasses import replace

from neso.frontends.openai.tensor_models.answer_text import AnswerText
from neso.frontends.openai.tensor_models.piece_logprobs import PieceLogprobs
from neso.frontends.openai.tensor_models.response import TextResponse
from neso.frontends.openai.tensor_models.token_limit import TokenLimit
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    SamplingParams,
    TokenizerLike,
    TokenLogprobs,
    Usage,
)


class Sequence:
    """Reads the responses for one sequence, the only one of the outputs that it makes.

    `tokenizer` counts the tokens that the model does not count; None where there is none. `limit`: of a model that
    does not know `max_tokens`.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        text: AnswerText,
        tokenizer: TokenizerLike | None,
        limit: TokenLimit | None = None,
    ) -> None:
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._sampling = sampling
        self._text = text
        self._tokenizer = tokenizer
        self._limit = limit
        self._pieces = PieceLogprobs(tokenizer)
        self._shown = ""
        self._reported: int | None = None
        self._counted = 0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | None = None
        self.done = False

    def read(self, response: TextResponse, *, final: bool) -> GenerationOutput | None:
        """The output that a response makes, None if it shows nothing new. After the last, `done` is True."""
        enough = self._num_tokens >= self._sampling.min_tokens
        self._note(response)
        text = self._text.add(response.text, match_stop=enough)
        if final:
            text += self._text.finish()
        self.done = final
        if self._text.stop_reason is not None:
            self._stop(FinishReason.STOP, self._text.stop_reason)
        if self._limit is not None:
            text = self._within(self._limit, text)
        self._shown += text
        self._count(text)
        logprobs = self._logprobs(response)
        return self._output(text, logprobs) if text or logprobs or self.done else None

    @property
    def _num_tokens(self) -> int:
        return self._counted if self._reported is None else self._reported

    def _note(self, response: TextResponse) -> None:
        """Take in what a response says beside its text."""
        if response.num_input_tokens is not None:
            self._num_prompt_tokens = response.num_input_tokens
        if response.num_output_tokens is not None:
            self._reported = (self._reported or 0) + response.num_output_tokens
        if response.finish_reason is not None:
            self._finish_reason, self._stop_reason = response.finish_reason, response.stop_reason

    def _stop(self, reason: FinishReason, stop: str | None = None) -> None:
        self.done = True
        self._finish_reason, self._stop_reason = reason, stop

    def _within(self, limit: TokenLimit, text: str) -> str:
        kept, reached = limit.add(text)
        if kept != text or (reached and not self.done):
            self._stop(FinishReason.LENGTH)
        return kept

    def _count(self, text: str) -> None:
        if self._tokenizer is None or self._reported is not None:
            return
        if self.done:  # pieces of a text may have more tokens than the whole
            self._counted = len(self._tokenizer.encode(self._shown, add_special_tokens=False))
        elif text:
            self._counted += len(self._tokenizer.encode(text, add_special_tokens=False))

    def _logprobs(self, response: TextResponse) -> list[TokenLogprobs] | None:
        """As many as were asked for: the token itself comes beside them."""
        wanted = self._sampling.logprobs
        if wanted is None:
            return None
        if response.piece_logprobs:
            return self._pieces.add(response.text.decode("utf-8", "replace"), response.piece_logprobs)
        entries = response.logprobs or []
        return [replace(entry, top=entry.top[:wanted]) for entry in entries] if wanted >= 0 else entries

    def _output(self, text: str, logprobs: list[TokenLogprobs] | None) -> GenerationOutput:
        delta = Completion(0, text, [], logprobs=logprobs)
        if self.done:
            delta = replace(delta, finish_reason=self._reason(), stop_reason=self._stop_reason)
        usage = Usage(self._num_prompt_tokens, self._num_tokens)
        return GenerationOutput(self._request_id, [delta], usage, finished=self.done)

    def _reason(self) -> FinishReason:
        """Why it has ended: what the model says, or what the number of its tokens tells."""
        if self._finish_reason is not None:
            return self._finish_reason
        limit = None if self._limit is not None else self._sampling.max_tokens
        return FinishReason.STOP if limit is None or self._num_tokens < limit else FinishReason.LENGTH
