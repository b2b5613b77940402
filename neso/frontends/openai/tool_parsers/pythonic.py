"""Calls in Python syntax: Llama 4 and small Llama 3.2, `[get_weather(city="Paris"), get_time()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

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
)
from neso.frontends.openai.tool_parsers.text_reader import NoCall, Reading, literal_json

START, END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_SIGNATURE = re.compile(r"\[\w+\(\w+=")
_OUTSIDE = re.compile(r"""["'()\[\]{},]""")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonicStream(CallStream):
    """Forwards each argument when its value is complete. Values are Python or JSON literals."""

    markers = (START,)
    opening = "["

    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        yield from source.space()
        yield from source.expect("[")
        while True:
            yield from source.space()
            yield from self._read_call()
            yield from source.space()
            if (yield from source.expect(",", "]")) == "]":
                break
        yield from source.space()
        yield from source.take(END)

    def _read_call(self) -> Reading[None]:
        source = self.source
        name = yield from source.matching(_NAME)
        yield from source.expect("(")
        key = yield from self._read_key()
        self.begin(name)
        separator = "{"
        while key is not None:
            value = literal_json((yield from self._read_value()))
            if value is None:
                raise NoCall
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "
            key = yield from self._read_key()
        self.arguments("{}" if separator == "{" else "}")
        self.end_call()

    def _read_key(self) -> Reading[str | None]:
        """Consume the next argument's name and `=`; None after consuming the closing bracket."""
        source = self.source
        yield from source.space()
        if (yield from source.take(",")):
            yield from source.space()
        if (yield from source.take(")")):
            return None
        key = yield from source.matching(_NAME)
        yield from source.space()
        yield from source.expect("=")
        if not key:
            raise NoCall
        return key

    def _read_value(self) -> Reading[str]:
        """Consume text up to the comma or bracket that ends an argument."""
        source = self.source
        at = source.position
        closing: list[str] = []
        quote = ""
        while True:
            pattern = re.compile(rf"[\\{quote}]") if quote else _OUTSIDE
            found = pattern.search(source.text, at)
            if found is None or (found[0] == "\\" and found.end() == len(source.text)):
                at = len(source.text) if found is None else found.start()
                if not (yield from source.more()):
                    source.position = len(source.text)
                    raise NoCall
                continue
            at = found.end()
            character = found[0]
            if character == "\\":
                at += 1
            elif character in "\"'":
                quote = "" if quote else character
            elif character in _PAIRS:
                closing.append(_PAIRS[character])
            elif not closing and character in ",)":
                value = source.text[source.position : at - 1]
                source.position = at - 1
                source.check()
                return value
            elif character != "," and (not closing or closing.pop() != character):
                source.position = at
                raise NoCall


class PythonicParser(CallParser):
    """Without `<|python_start|>`, a message has calls only if it begins with a call of a known function."""

    stream_class = PythonicStream
    special_tokens = (START, END)

    @classmethod
    def matches(cls, template: str) -> bool:
        return _SIGNATURE.search(template) is not None

    def forced_form(self, functions: Sequence[Function], *, many_calls: bool) -> Form:
        tags = [tag(f"{f.name}(", _arguments_form(f.schema), ")") for f in functions]
        return sequence(const("["), repeated(tags, separator=", ", many=many_calls), const("]"))


def _arguments_form(schema: dict[str, Any]) -> Form:
    """Return the form of `a=…, b=…`: the required parameters, then any optional parameters, in order."""
    parameters = properties(schema)
    required = [(name, value) for name, value, needed in parameters if needed]
    optional = [(name, value) for name, value, needed in parameters if not needed]
    elements: list[Form] = []
    for number, (name, value) in enumerate(required):
        elements += [const(f"{', ' if number else ''}{name}="), json_form(value)]
    elements.append(_optional_form(optional, first=not required))
    return sequence(*elements)


def _optional_form(parameters: Sequence[tuple[str, dict[str, Any]]], *, first: bool) -> Form:
    """Return the form of any of `parameters`, in order; `first`: no comma before the first parameter."""
    choices = [
        sequence(
            const(f"{'' if first else ', '}{name}="),
            json_form(value),
            _optional_form(parameters[number + 1 :], first=False),
        )
        for number, (name, value) in enumerate(parameters)
    ]
    return either(*choices, const(""))
