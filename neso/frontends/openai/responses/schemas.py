"""The request of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from neso.frontends.openai.schemas import FailFastList, Integer, PromptTokensDetails, open_object


class _Item(BaseModel):
    model_config = ConfigDict(extra="allow")


class TextPart(_Item):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ImagePart(_Item):
    """An image of a message."""

    type: Literal["input_image"]
    image_url: str = Field(description="A `data:` URL.")
    detail: str | None = Field(None, description="Accepted, not used.")


class RefusalPart(_Item):
    """A refusal of the model."""

    type: Literal["refusal"]
    refusal: str


def _kind(value: Any) -> str | None:
    """Return the discriminator of an item or part; upper case, unlike fields, see `errors.validation_error`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and isinstance(value, dict) and "role" in value:
        kind = "message"
    return kind.upper() if isinstance(kind, str) else None


ContentPart = Annotated[
    Annotated[TextPart, Tag("INPUT_TEXT")]
    | Annotated[TextPart, Tag("OUTPUT_TEXT")]
    | Annotated[TextPart, Tag("TEXT")]
    | Annotated[ImagePart, Tag("INPUT_IMAGE")]
    | Annotated[RefusalPart, Tag("REFUSAL")],
    Discriminator(
        _kind,
        custom_error_type="unknown_part",
        custom_error_message="must be a content part of type input_text, output_text, input_image or refusal",
    ),
]
OutputPart = Annotated[
    Annotated[TextPart, Tag("INPUT_TEXT")]
    | Annotated[TextPart, Tag("OUTPUT_TEXT")]
    | Annotated[TextPart, Tag("TEXT")],
    Discriminator(
        _kind,
        custom_error_type="unknown_part",
        custom_error_message="must be a content part of type input_text",
    ),
]


class MessageItem(_Item):
    """A message of the user, the system or the assistant."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | FailFastList[ContentPart]


class FunctionCallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | FailFastList[OutputPart]


class ReasoningText(_Item):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of the model before the next item."""

    type: Literal["reasoning"]
    summary: FailFastList[ReasoningText] | None = None
    content: FailFastList[ReasoningText] | None = None


InputItem = Annotated[
    Annotated[MessageItem, Tag("MESSAGE")]
    | Annotated[FunctionCallItem, Tag("FUNCTION_CALL")]
    | Annotated[FunctionCallOutputItem, Tag("FUNCTION_CALL_OUTPUT")]
    | Annotated[ReasoningItem, Tag("REASONING")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="must be an item of type message, function_call, function_call_output or reasoning",
    ),
]


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
WITH_LOGPROBS = "message.output_text.logprobs"


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="Constrain calls to the schema also with `tool_choice` auto."
    )

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if value != "function":
            raise PydanticCustomError(
                "hosted_tool",
                "tools of type {kind} are not supported: only functions, which the client runs",
                {"kind": repr(value)},
            )
        return value


class NamedFunction(BaseModel):
    """A function, by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    """The subset of the tools that may be called in this turn."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: FailFastList[NamedFunction] = Field(min_length=1)


class TextFormat(BaseModel):
    """Format of the output text."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="For type `json_schema`.")
    strict: bool | None = None


class TextOptions(BaseModel):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted, not used.")


class ReasoningOptions(BaseModel):
    """Options of reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Accepted, not used.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted, not used."
    )


class ResponseStreamOptions(BaseModel):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description="Accepted, not used.")


class ResponseRequest(BaseModel):
    """The body of `POST /v1/responses`.

    The extensions of chat completions (`top_k`, `seed`, `stop`, `structured_outputs`, `chat_template_kwargs` and so on)
    are accepted under the same names.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    input: str | FailFastList[InputItem] = Field(
        description="A user message, or the items of a conversation."
    )
    instructions: str | None = Field(None, description="System message of this response only.")
    previous_response_id: str | None = Field(None, description="The response to continue.")
    store: bool | None = Field(None, description="Store the response for later requests; default: true.")
    background: bool | None = Field(None, description="Return at once and generate in the background.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_tool_calls: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="For hosted tools: accepted, not used."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    include: FailFastList[Includable] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: FailFastList[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="False keeps only the first call.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` drops the oldest messages of a conversation that is too long."
    )
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = (
        Field(None, max_length=16)
    )
    user: str | None = Field(None, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(None, description="Accepted, not used: prefixes are cached anyway.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="Accepted, not used."
    )

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are requested."""
        return WITH_LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    @property
    def is_stored(self) -> bool:
        return self.store is not False


@open_object
class OutputItem(TypedDict):
    """A message, a function call, or reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]


@open_object
class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens_details: dict[str, int]


@open_object
class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


@open_object
class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


@open_object
class ResponseObject(TypedDict):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    max_output_tokens: int | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    metadata: dict[str, str]


@open_object
class ResponseEvent(TypedDict):
    """An event of a response's stream; further fields depend on its type."""

    type: str
    sequence_number: int


@open_object
class DeletedResponse(TypedDict):
    """A response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@open_object
class ItemList(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@open_object
class InputTokens(TypedDict):
    """The number of prompt tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
