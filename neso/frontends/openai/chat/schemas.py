"""Request and response types of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from neso.frontends.openai.schemas import (
    FailFastList,
    GenerationFields,
    Integer,
    ReturnedTimings,
    StopReason,
    UsageInfo,
    open_object,
)


class ChatMessage(BaseModel):
    """A message. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | FailFastList[dict[str, Any]] | None = Field(
        None, description="Text, or parts of type `text` or `image_url`."
    )
    name: str | None = None
    tool_calls: FailFastList[dict[str, Any]] | None = Field(
        None, description="As in the response that made them."
    )
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="Constrain calls to the schema also with `tool_choice` auto."
    )


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionRequest(GenerationFields):
    """The body of `POST /v1/chat/completions`."""

    messages: FailFastList[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="Takes precedence over `max_tokens`."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=-1)] | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="False keeps only the first call.")
    reasoning_effort: str | None = Field(None, description="Passed to the chat template.")
    include_reasoning: bool | None = Field(
        None, description="Extension: false omits reasoning from the response."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extension: variables of the template."
    )
    add_generation_prompt: bool | None = Field(None, description="Extension; default: true.")
    continue_final_message: bool | None = Field(None, description="Extension: continue the last message.")


@open_object
class TopLogprob(TypedDict):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


@open_object
class TokenLogprob(TopLogprob):
    """A generated token, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


@open_object
class ChatLogprobs(TypedDict):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]


@open_object
class FunctionCall(TypedDict):
    """A function and its arguments."""

    name: str
    arguments: Annotated[str, Field(description="JSON text.")]


@open_object
class ToolCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


@open_object
class AssistantMessage(TypedDict):
    """The generated message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="Extension: reasoning before the content.")]
    ]
    tool_calls: NotRequired[list[ToolCall]]


ChatFinishReason = Literal["stop", "length", "tool_calls"]


@open_object
class ChatCompletionResponseChoice(TypedDict):
    """A generated message."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason


@open_object
class ChatCompletionResponse(TypedDict):
    """The response of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    timings: NotRequired[ReturnedTimings]


@open_object
class ChatDelta(TypedDict):
    """The part of a message that a chunk adds."""

    role: NotRequired[Literal["assistant"] | None]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[Annotated[str | None, Field(description="Extension.")]]
    tool_calls: NotRequired[list[dict[str, Any]]]


@open_object
class ChatCompletionStreamChoice(TypedDict):
    """The part of a choice that a chunk adds."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


@open_object
class ChatCompletionStreamResponse(TypedDict):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatCompletionStreamChoice]
    usage: NotRequired[UsageInfo | None]
    timings: NotRequired[ReturnedTimings]
