"""The contract of a tool call parser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

MAX_CALL_CHARS = 131072
"""Longest call that is read, unless the server is told otherwise."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of the function `name` begins; `index` counts the calls of the message from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


ToolEvent = Content | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call: `schema` is the JSON schema of its arguments.

    `strict`: whether the client wants calls that fit the schema also where the model is free to call.
    """

    name: str
    schema: dict[str, Any]
    strict: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """A whole message: its content, and its calls as (name, JSON text of the arguments)."""

    content: str
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: ToolEvent) -> None:
        """Take an event in."""
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, ToolCallStart):
            self.calls.append((event.name, ""))
        else:
            name, arguments = self.calls[event.index]
            self.calls[event.index] = (name, arguments + event.fragment)


class ToolStream(ABC):
    """Reads one message while it is generated.

    The events, joined, do not depend on how the text was cut into pieces.
    """

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """What more text makes known."""

    @abstractmethod
    def finish(self) -> list[ToolEvent]:
        """What is known once there is no more text."""

    @property
    def cut_off(self) -> bool:
        """Whether a call that was announced has been cut off because it was too long."""
        return False


class ToolParser(ABC):
    """A format of tool calls.

    Formats of other packages are entry points of the group `neso.tool_parsers`: classes of this kind, which are made
    without arguments.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens that the format is made of: they are shown to the parser also where special tokens are skipped."""

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether a model whose chat template this is writes its calls in this format."""
        return False

    @abstractmethod
    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        """Begin to read a message, whose writer knows `functions`.

        An eager reader announces a call as soon as its name is known, and passes its arguments on as they are written;
        another one announces only calls that are complete and valid. What is no valid call is content, as it was
        written. So is a call of more than `max_call_chars`; one that is announced is cut off there.
        """

    @abstractmethod
    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> dict[str, Any]:
        """The format, of those of structural tags, of a message that calls one of `functions`, or several of them."""

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> dict[str, Any] | None:
        """The format of a message with any text, in which a call, once begun, fits its function's schema.

        None where the beginning of a call cannot be told from other text.
        """
        return None

    def parse(
        self, text: str, functions: Sequence[Function] = (), *, max_call_chars: int = MAX_CALL_CHARS
    ) -> ParsedMessage:
        """Read a whole message."""
        stream = self.stream(functions, eager=False, max_call_chars=max_call_chars)
        message = ParsedMessage("")
        for event in stream.feed(text) + stream.finish():
            message.add(event)
        return message
