"""The requests of OpenAI's API, with the extensions that vLLM's users know.

Fields that are not here are accepted and ignored, because OpenAI's clients send new ones all the time; those
that would change the answer and cannot be honoured are refused (see `refusals`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from neso.generation.sampling_params import MAX_N

# The engine's messages carry integers of a machine's size.
Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = list[TokenId]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Word = Annotated[str | TokenIds, Field(union_mode="left_to_right")]


class StreamOptions(BaseModel):
    """What a stream tells beside its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Extension: usage so far in every chunk.")


class ResponseFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]


class GenerationFields(BaseModel):
    """What completions and chats have in common. A field that is null is as one left out."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(None, description="Choices for each prompt.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted, not used.")
    response_format: ResponseFormat | None = Field(None, description="For completions an extension.")

    top_k: Annotated[Integer, Field(ge=-1)] | None = Field(None, description="Extension.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Extension.")
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = Field(None, description="Extension.")
    min_tokens: Annotated[Integer, Field(ge=0)] | None = Field(None, description="Extension.")
    ignore_eos: bool | None = Field(None, description="Extension.")
    stop_token_ids: list[TokenId] | None = Field(None, description="Extension.")
    stop_words: list[TokenIds] | None = Field(None, description="Extension: sequences of tokens that end it.")
    bad_words: list[Word] | None = Field(
        None, description="Extension: texts or sequences of tokens to avoid."
    )
    allowed_token_ids: list[TokenId] | None = Field(None, description="Extension: no others are generated.")
    no_repeat_ngram_size: Integer | None = Field(None, description="Extension.")
    embedding_bias: list[Annotated[float, Field(ge=-1e30, le=1e30)]] | None = Field(
        None, description="Extension: a bias for each token."
    )
    top_p_decay: float | None = Field(None, description="Extension.")
    top_p_min: float | None = Field(None, description="Extension.")
    top_p_reset_ids: Integer | None = Field(None, description="Extension.")
    best_of: Integer | None = Field(
        None,
        description="Sequences that are sampled, of which the `n` likeliest are choices. For chats an extension.",
    )
    use_beam_search: bool | None = Field(None, description="Extension: `n` (or `best_of`) beams.")
    beam_width: Integer | None = Field(None, description="Extension: beams, more than `n` if need be.")
    length_penalty: float | None = Field(None, description="Extension: of a beam search.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Extension: of a beam search.")
    beam_search_diversity_rate: float | None = Field(None, description="Extension: of a beam search.")
    prompt_logprobs: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="Extension: so many most likely tokens for each position of the prompt."
    )
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = Field(
        None,
        description="Extension: only the prompt's last so many tokens; -1: as many as there is room for.",
    )
    return_token_ids: bool | None = Field(None, description="Extension: those of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Extension: tokens of `logprobs` by number, as `token_id:1`."
    )
    skip_special_tokens: bool | None = Field(None, description="Extension.")
    include_stop_str_in_output: bool | None = Field(None, description="Extension.")
    add_special_tokens: bool | None = Field(None, description="Extension: those of the tokenizer.")
    priority: Integer | None = Field(None, description="Extension: lower is served first.")
    cache_salt: str | None = Field(None, description="Extension: whom the prefix cache is shared with.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as several."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationFields):
    """The body of `POST /v1/completions`."""

    prompt: (
        Annotated[
            str | TokenIds | list[str] | list[TokenIds],
            Field(union_mode="left_to_right", description="One prompt or several, as text or as token ids."),
        ]
        | None
    ) = None
    prompt_embeds: str | list[str] | None = Field(
        None,
        description="Extension: prompts as vectors, each a tensor by `torch.save` or `numpy.save`, in base64.",
    )
    echo: bool | None = None
    logprobs: Annotated[Integer, Field(ge=-1)] | None = None
    suffix: str | None = Field(None, description="Refused: fill-in-the-middle is not supported.")


class ChatMessage(BaseModel):
    """One message of a chat. Further fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = Field(None, description="Text, or parts of type `text`.")
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, description="As in the answer that made them.")
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Calls fit the schema also with `tool_choice` auto.")


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionRequest(GenerationFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="Goes before `max_tokens`."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=-1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="False keeps the first call only.")
    reasoning_effort: str | None = Field(None, description="For the chat template.")
    include_reasoning: bool | None = Field(None, description="Extension: false leaves reasoning out.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Extension: for the template.")
    add_generation_prompt: bool | None = Field(None, description="Extension; true unless given.")
    continue_final_message: bool | None = Field(None, description="Extension: go on with the last message.")
