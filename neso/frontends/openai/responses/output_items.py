"""The items of a response while they are generated, and the events that tell of them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import orjson

from neso.frontends.openai.responses.chat_conversion import Item, new_id


def json_text(value: Any) -> bytes:
    """The JSON text of `value`, also with integers of more than 64 bits, as the schemas of tools may have."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False).encode()


Event = dict[str, Any]
"""An event without its `sequence_number`."""


class ResponseOutput:
    """Takes what a model says, in its order, and makes items of it: thoughts, text, calls.

    One item is open at a time; what is of another kind closes it and opens the next.
    """

    def __init__(self) -> None:
        self._open: _OpenItem | None = None
        self._items: list[_OpenItem] = []

    @property
    def items(self) -> list[Item]:
        """All items, in the state that they are in."""
        return [item.as_dict() for item in self._items]

    def reasoning(self, text: str) -> list[Event]:
        """More thoughts."""
        events, item = self._current(_Reasoning)
        return events + item.add(text)

    def content(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """More text of the message."""
        events, item = self._current(_Message)
        return events + item.add(text, logprobs)

    def call(self, name: str) -> list[Event]:
        """A call begins."""
        return self._close("completed") + self._begin(_Call(len(self._items), name))

    def arguments(self, fragment: str) -> list[Event]:
        """More of the last call's arguments."""
        assert isinstance(self._open, _Call), "arguments follow the start of their call"
        return self._open.add(fragment)

    def finish(self, *, complete: bool) -> list[Event]:
        """Close what is open. A model that said nothing said a message without text."""
        events: list[Event] = []
        if not self._items:
            events, _ = self._current(_Message)
        return events + self._close("completed" if complete else "incomplete")

    def _current(self, kind: type[_Written]) -> tuple[list[Event], _Written]:
        """The open item if it is of that kind; else a new one, and the events of the change."""
        if isinstance(self._open, kind):
            return [], self._open
        item = kind(len(self._items))
        return self._close("completed") + self._begin(item), item

    def _begin(self, item: _OpenItem) -> list[Event]:
        self._open = item
        self._items.append(item)
        return item.opened()

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        return [] if item is None else item.closed(status)


class _OpenItem(ABC):
    def __init__(self, output_index: int, prefix: str) -> None:
        self.id = new_id(prefix)
        self.status = "in_progress"
        self._output_index = output_index

    @abstractmethod
    def as_dict(self) -> Item: ...

    @abstractmethod
    def opened(self) -> list[Event]: ...

    @abstractmethod
    def closed(self, status: str) -> list[Event]: ...

    def _event(self, kind: str, **fields: Any) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self.id,
            "output_index": self._output_index,
            **fields,
        }

    def _item_event(self, kind: str) -> Event:
        return {
            "type": f"response.output_item.{kind}",
            "output_index": self._output_index,
            "item": self.as_dict(),
        }


class _Written(_OpenItem):
    """An item with one part, which is text."""

    kind: str
    prefix: str

    def __init__(self, output_index: int) -> None:
        super().__init__(output_index, self.prefix)
        self._written: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._has_part = False

    @property
    def text(self) -> str:
        return "".join(self._written)

    @abstractmethod
    def part(self) -> dict[str, Any]: ...

    @abstractmethod
    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields of the text's events beside the text."""

    def opened(self) -> list[Event]:
        added = self._item_event("added")
        self._has_part = True
        return [added, self._event("content_part.added", content_index=0, part=self.part())]

    def add(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        logprobs = logprobs or []
        self._written.append(text)
        self._logprobs += logprobs
        return [self._event(f"{self.kind}.delta", content_index=0, delta=text, **self.extra(logprobs))]

    def closed(self, status: str) -> list[Event]:
        self.status = status
        return [
            self._event(f"{self.kind}.done", content_index=0, text=self.text, **self.extra(self._logprobs)),
            self._event("content_part.done", content_index=0, part=self.part()),
            self._item_event("done"),
        ]

    def _parts(self) -> list[dict[str, Any]]:
        return [self.part()] if self._has_part else []


class _Message(_Written):
    kind, prefix = "output_text", "msg"

    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs}

    def as_dict(self) -> Item:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": self._parts(),
        }


class _Reasoning(_Written):
    kind, prefix = "reasoning_text", "rs"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def as_dict(self) -> Item:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._parts(),
            "status": self.status,
        }


class _Call(_OpenItem):
    def __init__(self, output_index: int, name: str) -> None:
        super().__init__(output_index, "fc")
        self._call_id = new_id("call")
        self._name = name
        self._arguments: list[str] = []

    def as_dict(self) -> Item:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": self.status,
        }

    def opened(self) -> list[Event]:
        return [self._item_event("added")]

    def add(self, fragment: str) -> list[Event]:
        self._arguments.append(fragment)
        return [self._event("function_call_arguments.delta", delta=fragment)]

    def closed(self, status: str) -> list[Event]:
        self.status = status
        arguments = "".join(self._arguments)
        return [
            self._event("function_call_arguments.done", name=self._name, arguments=arguments),
            self._item_event("done"),
        ]
