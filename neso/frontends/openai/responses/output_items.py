"""Output items of a response during generation, and their events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import orjson

from neso.frontends.openai.responses.chat_conversion import Item, new_id

Event = dict[str, Any]
"""An event without its `sequence_number`."""


class OutputItems:
    """Collects reasoning, text and calls into items. At most one item is open; an item of another kind closes it."""

    def __init__(self) -> None:
        self._open: _OutputItem | None = None
        self._items: list[_OutputItem] = []

    def as_list(self) -> list[Item]:
        """Return all items in their current state."""
        return [item.as_dict() for item in self._items]

    def add_reasoning(self, text: str) -> list[Event]:
        """Append reasoning text."""
        events, item = self._current(_ReasoningItem)
        return events + item.add(text)

    def add_content(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Append text of the message."""
        events, item = self._current(_MessageItem)
        return events + item.add(text, logprobs)

    def start_call(self, name: str) -> list[Event]:
        """Start a function call."""
        return self._close("completed") + self._start(_FunctionCallItem(len(self._items), name))

    def add_arguments(self, fragment: str) -> list[Event]:
        """Append to the arguments of the last call."""
        assert isinstance(self._open, _FunctionCallItem), "arguments follow the start of their call"
        return self._open.add(fragment)

    def finish(self, *, complete: bool) -> list[Event]:
        """Close the open item. If no item was added, the output is an empty message."""
        events: list[Event] = []
        if not self._items:
            events, _ = self._current(_MessageItem)
        return events + self._close("completed" if complete else "incomplete")

    def _current(self, kind: type[_TextItem]) -> tuple[list[Event], _TextItem]:
        """Return the open item if it is of this kind, else a new item; also return the events of the change."""
        if isinstance(self._open, kind):
            return [], self._open
        item = kind(len(self._items))
        return self._close("completed") + self._start(item), item

    def _start(self, item: _OutputItem) -> list[Event]:
        self._open = item
        self._items.append(item)
        return item.opened()

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        return [] if item is None else item.closed(status)


class _OutputItem(ABC):
    def __init__(self, output_index: int, id_prefix: str) -> None:
        self.id = new_id(id_prefix)
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


class _TextItem(_OutputItem):
    """An item with one text part."""

    kind: str
    id_prefix: str

    def __init__(self, output_index: int) -> None:
        super().__init__(output_index, self.id_prefix)
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._has_part = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def part(self) -> dict[str, Any]: ...

    @abstractmethod
    def extra_fields(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Additional fields of text events."""

    def opened(self) -> list[Event]:
        added = self._item_event("added")
        self._has_part = True
        return [added, self._event("content_part.added", content_index=0, part=self.part())]

    def add(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        logprobs = logprobs or []
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._event(f"{self.kind}.delta", content_index=0, delta=text, **self.extra_fields(logprobs))]

    def closed(self, status: str) -> list[Event]:
        self.status = status
        extra = self.extra_fields(self._logprobs)
        return [
            self._event(f"{self.kind}.done", content_index=0, text=self.text, **extra),
            self._event("content_part.done", content_index=0, part=self.part()),
            self._item_event("done"),
        ]

    def _parts(self) -> list[dict[str, Any]]:
        return [self.part()] if self._has_part else []


class _MessageItem(_TextItem):
    kind, id_prefix = "output_text", "msg"

    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def extra_fields(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs}

    def as_dict(self) -> Item:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": self._parts(),
        }


class _ReasoningItem(_TextItem):
    kind, id_prefix = "reasoning_text", "rs"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def extra_fields(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def as_dict(self) -> Item:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._parts(),
            "status": self.status,
        }


class _FunctionCallItem(_OutputItem):
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


def dump_json(value: Any) -> bytes:
    """Serialize to JSON. Unlike orjson, supports integers of more than 64 bits, which tool schemas may contain."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False).encode()
