"""The format of Hermes, Qwen 2.5 and 3, the pilot and many others.

Some content
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json

from neso.frontends.openai.tool_parsers.base import Function
from neso.frontends.openai.tool_parsers.forms import Form, json_form, tag
from neso.frontends.openai.tool_parsers.text_source import Reading
from neso.frontends.openai.tool_parsers.tool_call_tags import (
    CLOSE,
    OPEN,
    ToolCallTagsParser,
    ToolCallTagsStream,
)


class HermesStream(ToolCallTagsStream):
    """Some models forget the closing brace or tag: what stands before the next tag is dropped."""

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.source.space()
        yield from self.object_call()
        yield from self.read_broken()

    def rest_of_object(self) -> Reading[None]:
        yield from ()


class HermesParser(ToolCallTagsParser):
    """Reads `<tool_call>` blocks."""

    stream_class = HermesStream

    @classmethod
    def matches(cls, template: str) -> bool:
        return OPEN in template and "<function=" not in template and "<arg_key>" not in template

    def call_form(self, function: Function) -> Form:
        begin = f'{OPEN}\n{{"name": {json.dumps(function.name)}, "arguments": '
        return tag(begin, json_form(function.schema), f"}}\n{CLOSE}")
