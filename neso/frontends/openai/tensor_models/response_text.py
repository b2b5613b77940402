"""Responses of models with text tensors, converted to generation outputs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from neso.engine.text.stop_strings import StopChecker
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    SamplingParams,
    TokenizerLike,
    TokenLogprobs,
    Usage,
)
from neso.server.errors import InternalError
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import Tensor

_REPLACEMENT = "\ufffd"


class OutputText:
    """Text of one sequence. Each response contains new text, or with `accumulates` the whole text so far.

    prompts: possible forms of the prompt; the first form that the text begins with is removed, unless it is the
    whole text (echo model).
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        prompts: Sequence[str] = (),
        accumulates: bool = False,
    ) -> None:
        self._stop = StopChecker(stop, include_stop_str_in_output=include_stop)
        self._accumulates = accumulates
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompts = [prompt for prompt in prompts if prompt]
        self._seen = ""
        self._held = ""

    @property
    def stop_reason(self) -> str | None:
        """The stop string at which the text ended, or None."""
        return self._stop.matched

    def add(self, text: bytes, *, match_stop: bool = True) -> str:
        """Add a response's text. Returns the new text for the client."""
        fresh = self._fresh(text)
        if self._prompts:
            self._held += fresh
            fresh = self._without_prompt()
        return self._stop.add(fresh, match=match_stop).text

    def finish(self) -> str:
        """End the text. Returns the held-back text."""
        held = self._held + self._decoder.decode(b"", final=True)
        self._held, self._prompts = "", []
        return self._stop.add(held).text + self._stop.flush()

    def _fresh(self, text: bytes) -> str:
        if not self._accumulates:
            return self._decoder.decode(text)
        whole = text.decode("utf-8", "replace").rstrip(_REPLACEMENT)
        fresh = whole[len(self._seen) :] if whole.startswith(self._seen) else ""
        self._seen += fresh
        return fresh

    def _without_prompt(self) -> str:
        """Return the held-back text without the prompt; "" until it is known whether it begins with the prompt."""
        text = self._held.lstrip()  # detokenizers may drop or add a space before the first word
        for prompt in map(str.lstrip, self._prompts):
            if text.startswith(prompt) and len(text) > len(prompt):
                self._held, self._prompts = "", []
                return text[len(prompt) :]
        if any(prompt.lstrip().startswith(text) for prompt in self._prompts):
            return ""
        held, self._held, self._prompts = self._held, "", []
        return held


class TextLogprobs:
    """Assigns log probabilities that come without token ids to the tokens of each piece of text.

    If the tokenizer splits a piece into the same number of tokens as log probabilities, they belong to these tokens;
    otherwise the piece counts as one token with their sum. Log probabilities without text are held back until text
    arrives; end-of-sequence tokens have no text.
    """

    def __init__(self, tokenizer: TokenizerLike | None) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[float] = []

    def add(self, text: str, values: Sequence[float]) -> list[TokenLogprobs]:
        """Return the tokens of the next piece of text."""
        values = [*self._waiting, *values]
        if not text or not values:
            self._waiting = values
            return []
        self._waiting = []
        tokenizer = self._tokenizer
        tokens = tokenizer.encode(text, add_special_tokens=False) if tokenizer is not None else []
        if tokenizer is not None and len(tokens) in (len(values), len(values) - 1) and len(tokens) > 1:
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
            return [
                TokenLogprobs(token, shown, number, 0)
                for token, shown, number in zip(tokens, texts, values, strict=False)
            ]
        return [TokenLogprobs(tokens[0] if len(tokens) == 1 else -1, text, sum(values), 0)]


class TokenLimit:
    """Enforces `max_tokens` on the text of one sequence, for models without an input for it."""

    def __init__(self, tokenizer: TokenizerLike, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._left = max_tokens

    def add(self, text: str) -> tuple[str, bool]:
        """Return the text up to the limit, and whether the limit is reached."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        left, self._left = self._left, max(self._left - len(tokens), 0)
        if len(tokens) <= left:
            return text, not self._left
        kept = self._tokenizer.decode(tokens[:left], skip_special_tokens=False)
        return kept.rstrip("\ufffd"), True


_NOT_FINISHED = ("", "none", "null", "not_finished")
_REASONS = {
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "cancelled": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class TextResponse:
    """One response. `text` is UTF-8 and may end within a character; missing outputs are None."""

    text: bytes = b""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    piece_logprobs: tuple[float, ...] = ()

    @classmethod
    def of(cls, response: InferenceResponse) -> TextResponse:
        """Read a response. Raises `ServerError`: the response's error, or `InternalError` for invalid outputs."""
        response.raise_error()
        outputs = {tensor.name: tensor for tensor in response.outputs}
        reason = _text(outputs.get("finish_reason")).decode("utf-8", "replace").lower()
        stop = _text(outputs.get("stop_reason")).decode("utf-8", "replace")
        return cls(
            _text(outputs.get("text_output")),
            None if reason in _NOT_FINISHED else _REASONS.get(reason, FinishReason.STOP),
            None if stop.lower() in _NOT_FINISHED else stop,
            _count(outputs.get("num_input_tokens")),
            _count(outputs.get("num_output_tokens")),
            _logprobs(outputs.get("logprobs")),
            _values(outputs.get("output_log_probs")),
        )


def _text(tensor: Tensor | None) -> bytes:
    if tensor is None or not tensor.array.size:
        return b""
    first = tensor.array.reshape(-1)[0]
    if not isinstance(first, bytes):
        raise InternalError(f"the model's output '{tensor.name}' has no strings")
    return first


def _count(tensor: Tensor | None) -> int | None:
    if tensor is None or not tensor.array.size:
        return None
    return int(np.asarray(tensor.array).reshape(-1)[0])


def _values(tensor: Tensor | None) -> tuple[float, ...]:
    return () if tensor is None else tuple(np.asarray(tensor.array, np.float64).reshape(-1).tolist())


def _logprobs(tensor: Tensor | None) -> list[TokenLogprobs] | None:
    """Parse vLLM's format: per position an object from token id to logprob, rank and text, generated token first."""
    text = _text(tensor)
    if not text:
        return None
    try:
        positions = orjson.loads(text)
        return [_position(position) for position in positions or ()]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InternalError(f"the model's output 'logprobs' cannot be read: {error!r}") from None


def _position(position: dict[str, dict[str, Any]]) -> TokenLogprobs:
    entries = [
        (
            int(token),
            float(entry["logprob"]),
            str(entry.get("decoded_token") or ""),
            int(entry.get("rank") or 0),
        )
        for token, entry in position.items()
    ]
    token_id, logprob, text, rank = next(iter(entries))
    top = sorted(((token, value, text) for token, value, text, _ in entries), key=lambda entry: -entry[1])
    return TokenLogprobs(token_id, text, logprob, rank, tuple(top))


class OutputSequence:
    """Converts the responses for one sequence to outputs.

    tokenizer: counts tokens if the model does not; None if unknown.
    limit: for a model without an input for `max_tokens`.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        text: OutputText,
        tokenizer: TokenizerLike | None,
        limit: TokenLimit | None = None,
    ) -> None:
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._sampling = sampling
        self._text = text
        self._tokenizer = tokenizer
        self._limit = limit
        self._text_logprobs = TextLogprobs(tokenizer)
        self._sent = ""
        self._reported: int | None = None
        self._counted = 0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | None = None
        self.done = False

    def read(self, response: TextResponse, *, final: bool) -> GenerationOutput | None:
        """Return the output for a response, None if it adds no data. Sets `done` at the end of the sequence."""
        match_stop = self._num_tokens >= self._sampling.min_tokens
        self._update(response)
        text = self._text.add(response.text, match_stop=match_stop)
        if final:
            text += self._text.finish()
        self.done = final
        if self._text.stop_reason is not None:
            self._stop(FinishReason.STOP, self._text.stop_reason)
        if self._limit is not None:
            text = self._limited(self._limit, text)
        self._sent += text
        self._count(text)
        logprobs = self._logprobs(response)
        return self._output(text, logprobs) if text or logprobs or self.done else None

    @property
    def _num_tokens(self) -> int:
        return self._counted if self._reported is None else self._reported

    def _update(self, response: TextResponse) -> None:
        """Update counts and finish reason."""
        if response.num_input_tokens is not None:
            self._num_prompt_tokens = response.num_input_tokens
        if response.num_output_tokens is not None:
            self._reported = (self._reported or 0) + response.num_output_tokens
        if response.finish_reason is not None:
            self._finish_reason, self._stop_reason = response.finish_reason, response.stop_reason

    def _stop(self, reason: FinishReason, stop: str | None = None) -> None:
        self.done = True
        self._finish_reason, self._stop_reason = reason, stop

    def _limited(self, limit: TokenLimit, text: str) -> str:
        kept, reached = limit.add(text)
        if kept != text or (reached and not self.done):
            self._stop(FinishReason.LENGTH)
        return kept

    def _count(self, text: str) -> None:
        if self._tokenizer is None or self._reported is not None:
            return
        if self.done:  # separate pieces can have more tokens than the joined text
            self._counted = len(self._tokenizer.encode(self._sent, add_special_tokens=False))
        elif text:
            self._counted += len(self._tokenizer.encode(text, add_special_tokens=False))

    def _logprobs(self, response: TextResponse) -> list[TokenLogprobs] | None:
        """Return log probabilities with the requested number of top tokens."""
        top = self._sampling.logprobs
        if top is None:
            return None
        if response.piece_logprobs:
            return self._text_logprobs.add(response.text.decode("utf-8", "replace"), response.piece_logprobs)
        entries = response.logprobs or []
        return [replace(entry, top=entry.top[:top]) for entry in entries] if top >= 0 else entries

    def _output(self, text: str, logprobs: list[TokenLogprobs] | None) -> GenerationOutput:
        delta = Completion(0, text, [], logprobs=logprobs)
        if self.done:
            delta = replace(delta, finish_reason=self._reason(), stop_reason=self._stop_reason)
        usage = Usage(self._num_prompt_tokens, self._num_tokens)
        return GenerationOutput(self._request_id, [delta], usage, finished=self.done)

    def _reason(self) -> FinishReason:
        """Return the model's finish reason, or infer it from the number of tokens."""
        if self._finish_reason is not None:
            return self._finish_reason
        limit = None if self._limit is not None else self._sampling.max_tokens
        return FinishReason.STOP if limit is None or self._num_tokens < limit else FinishReason.LENGTH
