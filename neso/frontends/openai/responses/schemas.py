"""The request of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from neso.frontends.openai.schemas import Integer


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
    """What a model said in place of an answer."""

    type: Literal["refusal"]
    refusal: str


def _kind(value: Any) -> str | None:
    """The tag of an item or part: upper case, so that the names of fields in errors are those of the client."""
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
    """A message: the user's, the system's, or one that the model answered."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class FunctionCallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[OutputPart]


class ReasoningText(_Item):
    """A part of what a model thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """What a model thought before it said what follows."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None


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
    strict: bool | None = Field(None, description="Calls fit the schema also with `tool_choice` auto.")

    @field_validator("type", mode="before")
    @classmethod
    def _runs_at_the_client(cls, value: Any) -> Any:
        if value != "function":
            raise PydanticCustomError(
                "hosted_tool",
                "tools of type {kind} are not there: only functions, which the client runs, can be called",
                {"kind": repr(value)},
            )
        return value


class NamedFunction(BaseModel):
    """A function, by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    """Those of the tools that may be called in this turn."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1)


class TextFormat(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Of type `json_schema`.")
    strict: bool | None = None


class TextOptions(BaseModel):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted, not used.")


class ReasoningOptions(BaseModel):
    """How the model is to reason."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For the chat template."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Accepted, not used.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted, not used."
    )


class ResponseStreamOptions(BaseModel):
    """What a stream holds beside its events."""

    include_obfuscation: bool | None = Field(None, description="Accepted, not used.")


class ResponseRequest(BaseModel):
    """The body of `POST /v1/responses`.

    Extensions of chats (`top_k`, `seed`, `stop`, `structured_outputs`, `chat_template_kwargs` and so on) are taken by
    the same names.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    input: str | list[InputItem] = Field(description="What the user says, or the items of a conversation.")
    instructions: str | None = Field(None, description="The system's message, of this response only.")
    previous_response_id: str | None = Field(None, description="The response that this one continues.")
    store: bool | None = Field(None, description="Keep the response for later requests; true unless given.")
    background: bool | None = Field(None, description="Answer at once, and generate meanwhile.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_tool_calls: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="Of hosted tools: accepted, not used."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    include: list[Includable] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="False keeps the first call only.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` leaves out the oldest messages of a conversation that is too long."
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
        """Whether log probabilities are to be told."""
        return WITH_LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    @property
    def is_stored(self) -> bool:
        return self.store is not False
