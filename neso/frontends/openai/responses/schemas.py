"""The request of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from neso.frontends.openai.requests.schemas import Integer
from neso.frontends.openai.responses.item_schemas import InputItem

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
