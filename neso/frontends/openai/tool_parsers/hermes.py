"""The format of Hermes, Qwen 2.5 and 3, the pilot and many others.

Some content
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from neso.frontends.openai.tool_parsers.base import MAX_CALL_CHARS, Function, ToolParser, ToolStream
from neso.frontends.openai.tool_parsers.call_stream import CallStream
from neso.frontends.openai.tool_parsers.forms import json_form, repeated, tag, triggered
from neso.frontends.openai.tool_parsers.text_source import Reading

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(ToolParser):
    """Reads `<tool_call>` blocks."""

    special_tokens = (OPEN, CLOSE)

    @classmethod
    def matches(cls, template: str) -> bool:
        return OPEN in template and "<function=" not in template and "<arg_key>" not in template

    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        return HermesStream(functions, eager=eager, max_call_chars=max_call_chars)

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> dict[str, Any]:
        return repeated(_tags(functions), separator="\n", many=many_calls)

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> dict[str, Any]:
        return triggered(_tags(functions), trigger=OPEN, many=many_calls)


class HermesStream(CallStream):
    """Some models forget the closing brace or tag: what stands before the next tag is dropped."""

    markers = (OPEN,)

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.source.space()
        yield from self.object_call()
        yield from self.read_broken()

    def rest_of_object(self) -> Reading[None]:
        yield from ()

    def read_broken(self) -> Reading[None]:
        if (yield from self.source.skip_to(CLOSE, OPEN)) == CLOSE:
            self.source.position += len(CLOSE)


def _tags(functions: Sequence[Function]) -> list[dict[str, Any]]:
    return [
        tag(f'{OPEN}\n{{"name": {json.dumps(f.name)}, "arguments": ', json_form(f.schema), f"}}\n{CLOSE}")
        for f in functions
    ]
