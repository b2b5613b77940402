"""Formats that frame names and arguments with special tokens: DeepSeek V3, R1 and V3.1, Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from neso.frontends.openai.tool_parsers.base import MAX_CALL_CHARS, Function, ToolParser, ToolStream
from neso.frontends.openai.tool_parsers.call_stream import CallStream
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


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens around all calls, around each call, and before the arguments."""

    begin_all: str
    begin: str
    separator: str
    end: str
    end_all: str


DEEPSEEK = Frame(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = Frame(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


class FramedParser(ToolParser):
    """Calls within frames. `separator`: between two calls in `forced_form`."""

    frame: ClassVar[Frame]
    separator: ClassVar[str] = ""

    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        return FramedStream(self.frame, functions, eager=eager, max_call_chars=max_call_chars)

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return sequence(const(self.frame.begin_all), self._calls(functions, many_calls))

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        calls = tag(self.frame.begin_all, self._calls(functions, many_calls), "")
        return triggered([calls], trigger=self.frame.begin_all, many=False)

    def begin_call(self, name: str) -> str:
        """Text before a call's arguments."""
        return f"{self.frame.begin}{name}{self.frame.separator}"

    def end_call(self) -> str:
        """Text after a call's arguments."""
        return self.frame.end

    def _calls(self, functions: Sequence[Function], many_calls: bool) -> Form:
        tags = [tag(self.begin_call(f.name), json_form(f.schema), self.end_call()) for f in functions]
        calls = repeated(tags, separator=self.separator, many=many_calls)
        return sequence(calls, const(self.frame.end_all))


class DeepSeekV3Parser(FramedParser):
    """DeepSeek V3 and R1: type, name and a JSON code block."""

    frame = DEEPSEEK
    special_tokens = (DEEPSEEK.begin_all, DEEPSEEK.begin, DEEPSEEK.separator, DEEPSEEK.end, DEEPSEEK.end_all)
    separator = "\n"

    @classmethod
    def matches(cls, template: str) -> bool:
        return DEEPSEEK.begin_all in template and "```json" in template

    def begin_call(self, name: str) -> str:
        return f"{DEEPSEEK.begin}function{DEEPSEEK.separator}{name}\n```json\n"

    def end_call(self) -> str:
        return f"\n```{DEEPSEEK.end}"


class DeepSeekV31Parser(FramedParser):
    """DeepSeek V3.1: name and arguments."""

    frame = DEEPSEEK
    special_tokens = DeepSeekV3Parser.special_tokens

    @classmethod
    def matches(cls, template: str) -> bool:
        return DEEPSEEK.begin_all in template and "```json" not in template


class KimiK2Parser(FramedParser):
    """Kimi K2: `functions.name:number` and arguments."""

    frame = KIMI
    special_tokens = (KIMI.begin_all, KIMI.begin, KIMI.separator, KIMI.end, KIMI.end_all)

    @classmethod
    def matches(cls, template: str) -> bool:
        return KIMI.begin_all in template

    def begin_call(self, name: str) -> str:
        return f"{KIMI.begin}functions.{name}:0{KIMI.separator}"


_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class FramedStream(CallStream):
    """Parses frames of both models and of both DeepSeek versions, which differ in the text between the tokens."""

    def __init__(
        self, frame: Frame, functions: Sequence[Function], *, eager: bool, max_call_chars: int
    ) -> None:
        self.markers = (frame.begin_all, frame.begin)
        self._frame = frame
        super().__init__(functions, eager=eager, max_call_chars=max_call_chars)

    def read_calls(self, marker: str) -> Reading[None]:
        source, frame = self.source, self._frame
        if marker == frame.begin_all:
            yield from source.space()
            yield from source.expect(frame.begin)
        while True:
            yield from self._read_call()
            yield from source.space()
            if (yield from source.take(frame.begin, frame.end_all)) != frame.begin:
                return

    def _read_call(self) -> Reading[None]:
        source, frame = self.source, self._frame
        head, _ = yield from source.up_to(frame.separator)
        yield from source.space()
        if (yield from source.peek()) != "{":
            head, _ = yield from source.up_to("\n")
            yield from source.take("```json")
            yield from source.space()
            if (yield from source.peek()) != "{":
                raise NoCall
        self.begin(self._name(head.strip()))
        yield from self.json_arguments()
        self.end_call()
        yield from source.space()
        yield from source.take("```")
        yield from source.space()
        yield from source.take(frame.end)

    def _name(self, head: str) -> str:
        if self._frame is not KIMI:
            return head
        found = _KIMI_NAME.fullmatch(head)
        return found[1] if found else ""

    def read_broken(self) -> Reading[None]:
        if (yield from self.source.skip_to(self._frame.end, self._frame.end_all)):
            yield from self.source.take(self._frame.end)
            yield from self.source.space()
            yield from self.source.take(self._frame.end_all)
