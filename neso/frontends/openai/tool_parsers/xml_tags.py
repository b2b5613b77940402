"""Formats with calls between `<tool_call>` and `</tool_call>`: Hermes, Qwen3-Coder, GLM 4.5."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from neso.frontends.openai.tool_parsers.base import Function
from neso.frontends.openai.tool_parsers.call_stream import CallParser, CallStream
from neso.frontends.openai.tool_parsers.structural_tags import (
    Form,
    const,
    either,
    json_form,
    properties,
    repeated,
    sequence,
    tag,
    text_before,
    triggered,
)
from neso.frontends.openai.tool_parsers.text_reader import NoCall, Reading, literal_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallTagsParser(CallParser):
    """A format with one call per pair of tags, on consecutive lines."""

    special_tokens: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    @abstractmethod
    def call_form(self, function: Function) -> Form:
        """Return the structural-tag format of a call of `function`, including the tags."""

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return repeated([self.call_form(f) for f in functions], separator="\n", many=many_calls)

    def free_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        return triggered([self.call_form(f) for f in functions], trigger=OPEN, many=many_calls)


class ToolCallTagsStream(CallStream):
    """Parses calls between tags. After an invalid call, text up to the next tag is dropped."""

    markers: tuple[str, ...] = (OPEN,)

    def read_broken(self) -> Reading[None]:
        if (yield from self.source.skip_to(CLOSE, OPEN)) == CLOSE:
            self.source.position += len(CLOSE)


class HermesStream(ToolCallTagsStream):
    """Parses Hermes calls. Some models omit the closing brace or tag; text up to the next tag is dropped."""

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.source.space()
        yield from self.object_call()
        yield from self.read_broken()

    def rest_of_object(self) -> Reading[None]:
        yield from ()


class HermesParser(ToolCallTagsParser):
    """Hermes, Qwen 2.5 and 3, neso-pilot and others: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`."""

    stream_class = HermesStream

    @classmethod
    def matches(cls, template: str) -> bool:
        return OPEN in template and "<function=" not in template and "<arg_key>" not in template

    def call_form(self, function: Function) -> Form:
        begin = f'{OPEN}\n{{"name": {json.dumps(function.name)}, "arguments": '
        return tag(begin, json_form(function.schema), f"}}\n{CLOSE}")


FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class TaggedStream(ToolCallTagsStream):
    """Forwards each argument when its tag is closed. String values are plain text, other values are JSON."""

    @abstractmethod
    def read_argument(self) -> Reading[tuple[str, str] | None]:
        """Consume the next argument. Returns its name and text; None after consuming the end of the call."""

    def read_arguments(self, name: str) -> Reading[None]:
        """Parse the arguments of a call of `name`, and its end."""
        self.begin(name)
        function = self.functions.get(name)
        types = {} if function is None else {key: value for key, value, _ in properties(function.schema)}
        separator = "{"
        while (argument := (yield from self.read_argument())) is not None:
            key, text = argument
            value = _json_value(types.get(key, {}), text)
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "
        self.arguments("{}" if separator == "{" else "}")
        self.end_call()


class Qwen3CoderStream(TaggedStream):
    """Parses Qwen3-Coder calls. Some models omit the outer tag and the closing tags of parameters."""

    markers = (OPEN, FUNCTION)

    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        if marker == OPEN:
            yield from source.space()
            yield from source.expect(FUNCTION)
        name, _ = yield from source.up_to(">")
        if "\n" in name or "<" in name:
            raise NoCall
        yield from self.read_arguments(name.strip())
        yield from source.space()
        yield from source.take(CLOSE)

    def read_argument(self) -> Reading[tuple[str, str] | None]:
        source = self.source
        yield from source.space()
        if (yield from source.expect(PARAMETER, END_FUNCTION)) == END_FUNCTION:
            return None
        key, _ = yield from source.up_to(">")
        text, end = yield from source.up_to(END_PARAMETER, PARAMETER, END_FUNCTION)
        if end != END_PARAMETER:
            source.position -= len(end)
        return key.strip(), text.removeprefix("\n").removesuffix("\n")


class Qwen3CoderParser(ToolCallTagsParser):
    """Qwen3-Coder: `<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>`, on lines."""

    stream_class = Qwen3CoderStream

    @classmethod
    def matches(cls, template: str) -> bool:
        return FUNCTION in template

    def call_form(self, function: Function) -> Form:
        return tag(
            f"{OPEN}\n{FUNCTION}{function.name}>\n",
            _parameters_form(function.schema, f"{PARAMETER}{{}}>\n", f"\n{END_PARAMETER}\n"),
            f"{END_FUNCTION}\n{CLOSE}",
        )


class Glm45Stream(TaggedStream):
    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        name, end = yield from source.up_to("\n", KEY, CLOSE)
        if not name.strip() and end == "\n":
            name, end = yield from source.up_to("\n", KEY, CLOSE)
        if "{" in name or "<" in name:
            raise NoCall
        if end != "\n":
            source.position -= len(end)
        yield from self.read_arguments(name.strip())

    def read_argument(self) -> Reading[tuple[str, str] | None]:
        source = self.source
        yield from source.space()
        if (yield from source.expect(KEY, CLOSE)) == CLOSE:
            return None
        key, _ = yield from source.up_to(END_KEY)
        yield from source.space()
        yield from source.expect(VALUE)
        text, _ = yield from source.up_to(END_VALUE)
        return key.strip(), text


class Glm45Parser(ToolCallTagsParser):
    """GLM 4.5: `<tool_call>name`, then alternating `<arg_key>…</arg_key>` and `<arg_value>…</arg_value>`."""

    stream_class = Glm45Stream
    special_tokens = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)

    @classmethod
    def matches(cls, template: str) -> bool:
        return KEY in template

    def call_form(self, function: Function) -> Form:
        return tag(
            f"{OPEN}{function.name}\n",
            _parameters_form(function.schema, f"{KEY}{{}}{END_KEY}\n{VALUE}", f"{END_VALUE}\n"),
            CLOSE,
        )


def _json_value(schema: dict[str, Any], text: str) -> str:
    """Return the JSON text of a value between tags."""
    kinds = _kinds(schema)
    if text.strip() == "null" and "null" in kinds:
        return "null"
    if kinds and "string" not in kinds:
        value = literal_json(text)
        if value is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types allowed by a schema; empty if the schema does not restrict them."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {entry for entry in kind if isinstance(entry, str)}
    for name in ("enum", "const"):
        if name in schema:
            values = schema[name] if name == "enum" and isinstance(schema[name], list) else [schema[name]]
            return {"string" if isinstance(value, str) else "other" for value in values}
    branches = [
        branch for name in ("anyOf", "oneOf") for branch in schema.get(name) or () if isinstance(branch, dict)
    ]
    return set().union(*map(_kinds, branches)) if branches else {"other"} & schema.keys()


def _parameters_form(schema: dict[str, Any], begin: str, end: str) -> Form:
    """Return the form of the parameters in order; optional ones may be omitted. `begin` has a name placeholder."""
    elements: list[Form] = []
    for name, value, required in properties(schema):
        argument = sequence(const(begin.format(name)), _value_form(value, end))
        elements.append(argument if required else either(argument, const("")))
    return sequence(*elements) if elements else const("")


def _value_form(schema: dict[str, Any], end: str) -> Form:
    """Return the form of a value and `end`: plain text for an unrestricted string, else JSON."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return sequence(either(*map(const, values)), const(end))
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return text_before(end)
    return sequence(json_form(schema), const(end))
