"""Formats with calls as JSON objects of name and arguments: Llama 3, Mistral, Granite 3, Phi 4, Jamba."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from neso.frontends.openai.tool_parsers.base import MAX_CALL_CHARS, Function, ToolParser, ToolStream
from neso.frontends.openai.tool_parsers.call_stream import CallParser, CallStream
from neso.frontends.openai.tool_parsers.pythonic import PythonicParser
from neso.frontends.openai.tool_parsers.structural_tags import (
    Form,
    const,
    json_form,
    repeated,
    sequence,
    tag,
    triggered,
)
from neso.frontends.openai.tool_parsers.text_reader import NoCall, Reading

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]+")


class Llama3Stream(CallStream):
    markers = (PYTHON_TAG, PYTHON_START)
    opening = "{"

    def read_calls(self, marker: str) -> Reading[None]:
        while True:
            yield from self.source.space()
            yield from self.object_call()
            yield from self.source.space()
            if (yield from self.source.take(";")) is None:
                yield from self.source.take(PYTHON_END)
                return


class Llama3Parser(CallParser):
    """Llama 3.1 to 3.3: `{"name": "f", "parameters": {…}}`, with or without `<|python_tag|>`, separated by `;`.

    Llama 4 encloses calls in `<|python_start|>` and `<|python_end|>`. Without a tag, a message has calls only if it
    begins with a call of a known function.
    """

    stream_class = Llama3Stream
    special_tokens = (PYTHON_TAG, PYTHON_START, PYTHON_END)

    @classmethod
    def matches(cls, template: str) -> bool:
        signs = (PYTHON_TAG, PYTHON_START, '"parameters": dictionary of argument')
        return any(sign in template for sign in signs) and not PythonicParser.matches(template)

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return repeated(_object_tags(functions, "parameters"), separator="; ", many=many_calls)


class ListParser(ToolParser):
    """A marker and a JSON list of calls, `[{"name": "f", "arguments": {…}}, …]`."""

    marker: ClassVar[str]
    other_markers: ClassVar[tuple[str, ...]] = ()
    end: ClassVar[str] = ""

    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        markers = (self.marker, *self.other_markers)
        return ListStream(markers, self.end, functions, eager=eager, max_call_chars=max_call_chars)

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return sequence(const(self.marker), self._list(functions, many_calls))

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        calls = tag(self.marker, self._list(functions, many_calls), "")
        return triggered([calls], trigger=self.marker, many=False)

    def _list(self, functions: Sequence[Function], many_calls: bool) -> Form:
        calls = repeated(_object_tags(functions, "arguments"), separator=", ", many=many_calls)
        return sequence(const("["), calls, const(f"]{'' if self.other_markers else self.end}"))


class ListStream(CallStream):
    """Parses a list of calls after a marker, or a single call without brackets."""

    def __init__(
        self,
        markers: tuple[str, ...],
        end: str,
        functions: Sequence[Function],
        *,
        eager: bool,
        max_call_chars: int,
    ) -> None:
        self.markers = markers
        self._end = end
        super().__init__(functions, eager=eager, max_call_chars=max_call_chars)

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.source.space()
        yield from self.read_list()
        if self._end:
            yield from self.source.space()
            yield from self.source.take(self._end)

    def read_list(self) -> Reading[None]:
        """Parse a list of calls, or a single call. Raises `NoCall`."""
        source = self.source
        if (yield from source.take("[")) is None:
            yield from self.object_call()
            return
        while True:
            yield from source.space()
            yield from self.object_call()
            yield from source.space()
            if (yield from source.expect(",", "]")) == "]":
                return


class GraniteParser(ListParser):
    """Granite 3: `<|tool_call|>[…]`."""

    marker = "<|tool_call|>"
    special_tokens = (marker,)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.marker in template and not Phi4MiniParser.matches(template)


class Phi4MiniParser(ListParser):
    """Phi-4-mini: `functools[…]`, or `<|tool_call|>[…]<|/tool_call|>`."""

    marker = "functools"
    other_markers = ("<|tool_call|>",)
    end = "<|/tool_call|>"
    special_tokens = (*other_markers, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "functools" in template or "<|/tool|>" in template


class JambaParser(ListParser):
    """Jamba: `<tool_calls>[…]</tool_calls>`."""

    marker, end = "<tool_calls>", "</tool_calls>"
    special_tokens = (marker, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.marker in template


class MistralParser(ListParser):
    """Mistral tokenizers before v11: `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`. Also parses v11."""

    marker = TOOL_CALLS
    special_tokens = (TOOL_CALLS, CALL_ID, ARGS)

    @classmethod
    def matches(cls, template: str) -> bool:
        return TOOL_CALLS in template and ARGS not in template

    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        return MistralStream((TOOL_CALLS,), "", functions, eager=eager, max_call_chars=max_call_chars)


class MistralV11Parser(MistralParser):
    """Version 11 and later: `[TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}`. Also parses the older format."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return TOOL_CALLS in template and ARGS in template

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return repeated(_named_tags(functions), separator="", many=many_calls)

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return triggered(_named_tags(functions), trigger=TOOL_CALLS, many=many_calls)


class MistralStream(ListStream):
    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        yield from source.space()
        name = yield from source.matching(_NAME)
        if not name:
            yield from self.read_list()
            return
        if (yield from source.take(CALL_ID)) is not None:
            yield from source.matching(_NAME)
        yield from source.take(ARGS)
        yield from source.space()
        if (yield from source.peek()) != "{":
            raise NoCall
        self.begin(name)
        yield from self.json_arguments()
        self.end_call()


def _object_tags(functions: Sequence[Function], key: str) -> list[Form]:
    return [tag(f'{{"name": {json.dumps(f.name)}, "{key}": ', json_form(f.schema), "}") for f in functions]


def _named_tags(functions: Sequence[Function]) -> list[Form]:
    return [tag(f"{TOOL_CALLS}{f.name}{ARGS}", json_form(f.schema), "") for f in functions]
