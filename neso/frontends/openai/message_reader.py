"""From the text that a model writes to a message: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from neso.frontends.openai.reasoning_parsers import ReasoningStream, Split
from neso.frontends.openai.tool_parsers import Content, ToolCallStart, ToolEvent, ToolStream


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


MessageEvent = Reasoning | ToolEvent


@dataclass(slots=True)
class Message:
    """Events, joined. `calls`: name and JSON text of the arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, events: Iterable[MessageEvent]) -> None:
        """Take events in."""
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, ToolCallStart):
                self.calls.append((event.name, ""))
            else:
                name, arguments = self.calls[event.index]
                self.calls[event.index] = (name, arguments + event.fragment)


class MessageReader:
    """Reads one message while it is generated. The events, joined, do not depend on how the text was cut.

    Without `reasoning` or `tools` there is none of it. Unless `many_calls`, only the first call is told of.
    """

    def __init__(
        self,
        reasoning: ReasoningStream | None = None,
        tools: ToolStream | None = None,
        *,
        many_calls: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._many_calls = many_calls
        self.num_reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int = 0) -> list[MessageEvent]:
        """What more text makes known; it was made of `num_tokens`, which are counted while the model reasons."""
        if self._reasoning is None:
            return self._answer(text)
        reasoned = self._reasoning.reasoning
        split = self._reasoning.feed(text)
        if reasoned or self._reasoning.reasoning or split.reasoning:
            self.num_reasoning_tokens += num_tokens
        return self._events(split)

    def finish(self) -> list[MessageEvent]:
        """What is known once there is no more text."""
        events = [] if self._reasoning is None else self._events(self._reasoning.finish())
        return events if self._tools is None else [*events, *self._kept(self._tools.finish())]

    @property
    def cut_off(self) -> bool:
        """Whether a call that was told of has been cut off because it was too long."""
        return self._tools is not None and self._tools.cut_off

    def _events(self, split: Split) -> list[MessageEvent]:
        events: list[MessageEvent] = [Reasoning(split.reasoning)] if split.reasoning else []
        return [*events, *self._answer(split.content)]

    def _answer(self, text: str) -> list[MessageEvent]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._kept(self._tools.feed(text))

    def _kept(self, events: list[ToolEvent]) -> list[MessageEvent]:
        return [
            event for event in events if self._many_calls or isinstance(event, Content) or event.index == 0
        ]
