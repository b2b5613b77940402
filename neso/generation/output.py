"""Output of a generation request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.generation.request import text_size

FloatRows = npt.NDArray[np.float32]


class FinishReason(str, Enum):
    """Why a sequence ended. Values are the OpenAI API's where defined."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's length limit."""
    ABORT = "abort"
    """The client cancelled or disconnected."""
    ERROR = "error"
    """The engine failed the request."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of its token and of the most likely tokens.

    `top` is sorted, most likely first: (token id, log probability, text of the token). `rank` starts at 1.
    """

    token_id: int
    token: str
    logprob: float
    rank: int
    top: tuple[tuple[int, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sequence of a request: the whole sequence, or in a stream the part added since the last output.

    - index: in [0, n)
    - text: ends at a character boundary and never contains a part of a stop string
    - cumulative_logprob: of the whole sequence so far, if log probabilities are requested; the score in beam search
    - finish_reason: set when the sequence is finished
    - stop_reason: the stop string or stop token that ended the sequence, or the text of a stop word of several tokens;
      None after an end-of-sequence token or at the length limit
    - generation_logits: float32[tokens, vocab_size], the logits that the tokens were sampled from, if requested
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    generation_logits: FloatRows | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def joined(deltas: Sequence[Completion]) -> Completion:
        """Join the deltas of one sequence, in order, into one completion."""
        if len(deltas) == 1:
            return deltas[0]
        logits = [delta.generation_logits for delta in deltas if delta.generation_logits is not None]
        return replace(
            deltas[-1],
            text="".join([delta.text for delta in deltas]),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            logprobs=[entry for delta in deltas for entry in delta.logprobs or ()] or None,
            generation_logits=np.concatenate(logits) if logits else None,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request so far; `accepted_draft_tokens` of the `draft_tokens` became output."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Output of a request: the whole output (`LLM.generate`) or one message of a stream.

    - outputs: one completion per sequence, by index; a stream message has deltas of one or more sequences
    - finished: True for the last message; beam search and best_of have only one message
    - num_sequences: n of the request
    - prompt_token_ids: in the first message of a stream
    - prompt_logprobs, context_logits: in the first message, if requested: one entry for each prompt token, None for the
      first; float32[prompt, vocab_size]
    - scheduled_ns: start of the prefill in ns of the monotonic clock, in the first message; 0 if unknown
    - preemptions: number of preemptions of the finished sequences
    - prompt: as given to `LLM.generate`
    """

    request_id: str
    outputs: list[Completion]
    usage: Usage
    finished: bool
    num_sequences: int = 1
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    context_logits: FloatRows | None = field(default=None, repr=False, compare=False)
    scheduled_ns: int = 0
    preemptions: int = 0
    prompt: Any = None

    @property
    def size(self) -> int:
        """Approximate memory of the outputs in bytes."""
        size = 1024 + 36 * len(self.prompt_token_ids)
        for completion in self.outputs:
            size += 256 + text_size(completion.text) + 36 * len(completion.token_ids)
            size += sum(256 + 160 * len(entry.top) for entry in completion.logprobs or ())
            if completion.generation_logits is not None:
                size += completion.generation_logits.nbytes
        size += sum(256 + 160 * len(entry.top) for entry in self.prompt_logprobs or () if entry is not None)
        return size + (0 if self.context_logits is None else self.context_logits.nbytes)

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.outputs[0].text

    @property
    def deltas(self) -> list[Completion]:
        """`outputs` of a stream message."""
        return self.outputs

    @property
    def draft_tokens(self) -> int:
        return self.usage.draft_tokens

    @property
    def accepted_draft_tokens(self) -> int:
        return self.usage.accepted_draft_tokens

    @staticmethod
    def joined(messages: Sequence[GenerationOutput], prompt: Any = None) -> GenerationOutput:
        """Join the messages of one stream, in order, into one output."""
        by_index: dict[int, list[Completion]] = {}
        for message in messages:
            for delta in message.outputs:
                by_index.setdefault(delta.index, []).append(delta)
        first, last = messages[0], messages[-1]
        return replace(
            first,
            outputs=[Completion.joined(by_index[index]) for index in sorted(by_index)],
            usage=last.usage,
            finished=last.finished,
            preemptions=last.preemptions,
            prompt=prompt,
        )
