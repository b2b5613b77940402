"""One choice of a chat: its content and its tool calls."""

from __future__ import annotations

import uuid
from typing import Any

from neso.frontends.openai.answer import Choice, finish_name
from neso.frontends.openai.logprobs import chat_logprobs
from neso.frontends.openai.tool_parsers import Content, ToolCallStart, ToolEvent, ToolParser
from neso.generation import CompletionDelta, GenerationOutput


class ChatChoice(Choice):
    """With a `parser`, tool calls are taken out of the content; unless `many_calls`, the first only."""

    def __init__(
        self, index: int, parser: ToolParser | None, *, with_logprobs: bool, many_calls: bool
    ) -> None:
        self._index = index
        self._parser = parser
        self._tools = parser.stream() if parser is not None else None
        self._many_calls = many_calls
        self._logprobs: list[dict[str, Any]] | None = [] if with_logprobs else None
        self._begun = False
        self._called = False
        self._text: list[str] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def stream(self, output: GenerationOutput, delta: CompletionDelta) -> list[dict[str, Any]]:
        self._note(delta)
        pieces = self._pieces(delta)
        if not pieces and (self._logprobs or self._finish_reason is not None):
            pieces = [{}] if self._finish_reason is not None else [{"content": ""}]
        if not self._begun:
            self._begun = True
            pieces.insert(0, {"role": "assistant", "content": ""})
        chunks = [self._chunk(piece) for piece in pieces]
        if chunks and self._finish_reason is not None:
            chunks[-1]["finish_reason"] = self._final_reason(self._called)
            chunks[-1]["stop_reason"] = self._stop_reason
        if self._logprobs:
            chunks[-1]["logprobs"] = {"content": self._logprobs}
            self._logprobs = []
        return chunks

    def gather(self, output: GenerationOutput, delta: CompletionDelta) -> None:
        self._note(delta)
        self._text.append(delta.text)

    def gathered(self) -> dict[str, Any]:
        message = self._message("".join(self._text))
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
            "finish_reason": self._final_reason("tool_calls" in message),
            "stop_reason": self._stop_reason,
        }

    def _note(self, delta: CompletionDelta) -> None:
        if delta.finish_reason is not None:
            self._finish_reason = finish_name(delta.finish_reason)
            self._stop_reason = delta.stop_reason
        if self._logprobs is not None and delta.logprobs:
            self._logprobs += chat_logprobs(delta.logprobs)

    def _final_reason(self, called: bool) -> str | None:
        return "tool_calls" if called and self._finish_reason == "stop" else self._finish_reason

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _pieces(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The `delta` objects that a delta's text makes."""
        if self._tools is None:
            return [{"content": delta.text}] if delta.text else []
        events = self._tools.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._tools.finish()
        return [piece for event in events if (piece := self._piece(event)) is not None]

    def _piece(self, event: ToolEvent) -> dict[str, Any] | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if event.index > 0 and not self._many_calls:
            return None
        call: dict[str, Any] = {"index": event.index}
        if isinstance(event, ToolCallStart):
            self._called = True
            call |= {"id": _call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": event.fragment}
        return {"tool_calls": [call]}

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._parser is None:
            return message
        parsed = self._parser.parse(text)
        calls = parsed.calls if self._many_calls else parsed.calls[:1]
        message["content"] = parsed.content or (None if calls else "")
        if calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ]
        return message


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
