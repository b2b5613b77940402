"""Types shared by the requests and responses of several resources.

Requests are pydantic models. Unknown fields are accepted and ignored, because OpenAI's clients regularly send new ones;
unsupported fields that would change the result are rejected (see `request_params.reject_unsupported`). Responses are
typed dictionaries, which handlers build directly; pydantic only generates their JSON schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from neso.generation.sampling_params import MAX_N

Item = TypeVar("Item")
FailFastList = Annotated[list[Item], Field(fail_fast=True)]
"""A list in a request. Only its first invalid item is reported; a report on each of a million items took 27 s."""
Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""An integer of the engine's messages: 32 bits."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = FailFastList[TokenId]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Word = Annotated[str | TokenIds, Field(union_mode="left_to_right")]

open_object = with_config(ConfigDict(extra="allow"))
"""Decorator of a response type that may have additional fields."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Extension: usage so far in every chunk.")


class ResponseFormat(BaseModel):
    """Output format: text, JSON, or JSON that matches a schema."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]


class GenerationFields(BaseModel):
    """Fields shared by completions and chat completions. A null field is the same as an omitted one."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(None, description="Choices per prompt.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    stop: str | FailFastList[str] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted, not used.")
    response_format: ResponseFormat | None = Field(None, description="An extension for completions.")

    top_k: Annotated[Integer, Field(ge=-1)] | None = Field(None, description="Extension.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Extension.")
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = Field(None, description="Extension.")
    min_tokens: Annotated[Integer, Field(ge=0)] | None = Field(None, description="Extension.")
    ignore_eos: bool | None = Field(None, description="Extension.")
    stop_token_ids: TokenIds | None = Field(None, description="Extension.")
    stop_words: FailFastList[TokenIds] | None = Field(
        None, description="Extension: token sequences that stop generation."
    )
    bad_words: FailFastList[Word] | None = Field(
        None, description="Extension: texts or token sequences that are never generated."
    )
    allowed_token_ids: TokenIds | None = Field(None, description="Extension: the only tokens allowed.")
    no_repeat_ngram_size: Integer | None = Field(None, description="Extension.")
    embedding_bias: FailFastList[Annotated[float, Field(ge=-1e30, le=1e30)]] | None = Field(
        None, description="Extension: a logit bias per token of the vocabulary."
    )
    top_p_decay: float | None = Field(None, description="Extension.")
    top_p_min: float | None = Field(None, description="Extension.")
    top_p_reset_ids: Integer | None = Field(None, description="Extension.")
    best_of: Integer | None = Field(
        None,
        description="Sequences to sample; the `n` most likely are returned. An extension for chat completions.",
    )
    use_beam_search: bool | None = Field(
        None, description="Extension: beam search with `n` (or `best_of`) beams."
    )
    beam_width: Integer | None = Field(None, description="Extension: number of beams, at least `n`.")
    length_penalty: float | None = Field(None, description="Extension: of beam search.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Extension: of beam search.")
    beam_search_diversity_rate: float | None = Field(None, description="Extension: of beam search.")
    prompt_logprobs: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="Extension: number of most likely tokens per prompt position."
    )
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = Field(
        None,
        description="Extension: keep only the last tokens of the prompt; -1: as many as the context allows.",
    )
    return_token_ids: bool | None = Field(
        None, description="Extension: return token ids of prompt and output."
    )
    return_timings: bool | None = Field(
        None, description="Extension: return times of queue, prefill and decode as `timings`."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Extension: name tokens in `logprobs` by id, as `token_id:1`."
    )
    skip_special_tokens: bool | None = Field(None, description="Extension.")
    include_stop_str_in_output: bool | None = Field(None, description="Extension.")
    logits_processor: str | None = Field(
        None, description="Extension: name of a logits processor that is registered with the model."
    )
    add_special_tokens: bool | None = Field(
        None, description="Extension: add the tokenizer's special tokens to the prompt."
    )
    priority: Integer | None = Field(None, description="Extension: lower is scheduled first.")
    cache_salt: str | None = Field(
        None, description="Extension: share cached prefixes only with requests that have the same salt."
    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@open_object
class ErrorObject(TypedDict):
    """The error."""

    message: str
    type: str
    param: Annotated[str | None, Field(description="The invalid field.")]
    code: str | None


@open_object
class ErrorResponse(TypedDict):
    """Body of an error response."""

    error: ErrorObject


@open_object
class PromptTokensDetails(TypedDict):
    """Details of the prompt tokens: the number found in the prefix cache."""

    cached_tokens: int


@open_object
class TimingsInfo(TypedDict):
    """Milliseconds of the phases of a request, and numbers of tokens: computed, cached, generated, draft tokens."""

    queue_ms: float
    prompt_ms: float
    predicted_ms: float
    prompt_n: int
    cache_n: int
    predicted_n: int
    draft_n: int
    draft_n_accepted: int


@open_object
class UsageInfo(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


StopReason = Annotated[
    str | int | None, Field(description="Extension: the stop string or stop token that ended generation.")
]
PromptLogprobs = Annotated[
    list[dict[str, Any] | None], Field(description="Extension: with `prompt_logprobs`.")
]
ReturnedTimings = Annotated[TimingsInfo, Field(description="Extension: with `return_timings`.")]
ReturnedTokenIds = Annotated[list[int], Field(description="Extension: with `return_token_ids`.")]
