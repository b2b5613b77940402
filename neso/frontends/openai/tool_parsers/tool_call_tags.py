"""What formats have in common whose calls stand between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from neso.frontends.openai.tool_parsers.base import Function
from neso.frontends.openai.tool_parsers.call_stream import CallParser, CallStream
from neso.frontends.openai.tool_parsers.forms import Form, repeated, triggered
from neso.frontends.openai.tool_parsers.text_source import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallTagsParser(CallParser):
    """A call in tags of its own, several on lines that follow each other."""

    special_tokens: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    @abstractmethod
    def call_form(self, function: Function) -> Form:
        """A call of `function`, from tag to tag."""

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return repeated([self.call_form(f) for f in functions], separator="\n", many=many_calls)

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return triggered([self.call_form(f) for f in functions], trigger=OPEN, many=many_calls)


class ToolCallTagsStream(CallStream):
    """Behind a broken call, what stands before the next tag is dropped."""

    markers: tuple[str, ...] = (OPEN,)

    def read_broken(self) -> Reading[None]:
        if (yield from self.source.skip_to(CLOSE, OPEN)) == CLOSE:
            self.source.position += len(CLOSE)
