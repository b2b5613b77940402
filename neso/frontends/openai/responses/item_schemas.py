"""The items of a conversation, as clients write them. Fields that are not here are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


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
