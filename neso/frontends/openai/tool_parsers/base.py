"""Interface of a tool call parser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

MAX_CALL_CHARS = 131072
"""Default of `--max-tool-call-parse-bytes`: the longest call that is parsed."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of call number `index` (from 0), of the function `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of the JSON text of a call's arguments."""

    index: int
    fragment: str


ToolEvent = Content | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `schema`: JSON schema of its arguments.

    strict: calls must match the schema even if a call is optional.
    """

    name: str
    schema: dict[str, Any]
    strict: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """A whole message: content, and calls as (name, JSON text of the arguments)."""

    content: str
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: ToolEvent) -> None:
        """Append an event."""
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, ToolCallStart):
            self.calls.append((event.name, ""))
        else:
            name, arguments = self.calls[event.index]
            self.calls[event.index] = (name, arguments + event.fragment)


class ToolStream(ABC):
    """Parses one message incrementally. The joined events do not depend on how the text was split."""

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """Add text. Returns the events that later text cannot change."""

    @abstractmethod
    def finish(self) -> list[ToolEvent]:
        """End the text. Returns the remaining events."""

    @property
    def cut_off(self) -> bool:
        """Whether a reported call was truncated because it exceeded the maximum length."""
        return False


class ToolParser(ABC):
    """A format of tool calls.

    Other packages register subclasses as entry points of the group `neso.tool_parsers`; they are instantiated without
    arguments.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens of the format; the parser receives them even if special tokens are skipped."""

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether models with this chat template use this format."""
        return False

    @abstractmethod
    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        """Create a parser for one message of a model that may call `functions`.

        An eager parser reports a call as soon as its name is known, and its arguments as they arrive; otherwise only
        complete and valid calls are reported. Invalid calls are returned as content, like calls of more than
        `max_call_chars` characters; a call that is already reported is truncated there.
        """

    @abstractmethod
    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> dict[str, Any]:
        """Return the structural-tag format of a message with only one call, or one or more calls, of `functions`."""

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> dict[str, Any] | None:
        """Return the structural-tag format of text in which every call matches its function's schema.

        None if the start of a call cannot be distinguished from other text.
        """
        return None

    def parse(
        self, text: str, functions: Sequence[Function] = (), *, max_call_chars: int = MAX_CALL_CHARS
    ) -> ParsedMessage:
        """Parse a whole message."""
        stream = self.stream(functions, eager=False, max_call_chars=max_call_chars)
        message = ParsedMessage("")
        for event in stream.feed(text) + stream.finish():
            message.add(event)
        return message
