"""From the text that a model writes to a message: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neso.frontends.openai.reasoning_parsers import ReasoningStream, Split
from neso.frontends.openai.tool_parsers import Content, ToolCallStart, ToolEvent, ToolStream


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


MessageEvent = Reasoning | ToolEvent


class Message:
    """Events, joined."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, events: Iterable[MessageEvent]) -> None:
        """Take events in."""
        for event in events:
            if isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, ToolCallStart):
                self._calls.append((event.name, []))
            else:
                self._calls[event.index][1].append(event.fragment)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and JSON text of the arguments of each."""
        return [(name, "".join(arguments)) for name, arguments in self._calls]


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
