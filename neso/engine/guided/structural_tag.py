"""Structural tags: text in which tags, such as tool calls, have a form. vLLM's and SGLang's two formats as Lark.

The older format names triggers, after which one of the structures must follow:

    {"type": "structural_tag", "triggers": ["<call="], "structures": [
        {"begin": "<call=add>", "schema": {…}, "end": "</call>"}]}

The newer one is a tree of formats: {"type": "structural_tag", "format": {"type": "triggered_tags", …}}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark

from neso.engine.guided.lark import literal
from neso.engine.guided.white_space import with_white_space

_TEXT = r"/(.|\n)*/"
_MAX_DEPTH = 32


def structural_tag_lark(tag: Mapping[str, Any], special_tokens: Mapping[str, int]) -> str:
    """The grammar of a structural tag. Raises `ValueError` that says what is wrong with it.

    A trigger that is the name of a special token is that token, not its text.
    """
    return _Writer(special_tokens).write(_read_format(tag))


def _read_format(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    if tag.get("type") != "structural_tag":
        raise ValueError("type must be structural_tag")
    if "format" in tag:
        return _mapping(tag, "format")
    tags = [
        {
            "begin": _string(entry, "begin"),
            "content": {"type": "json_schema", "json_schema": entry.get("schema", True)},
            "end": _string(entry, "end"),
        }
        for entry in _mappings(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes each format as a rule; what a format of one type looks like is in the method of that name."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        self._rules: list[str] = []
        self._depth = 0

    def write(self, format: Mapping[str, Any]) -> str:
        start = self._expression(format)
        # The bare text is a terminal, so that it is one lexeme however often it is used.
        return "\n".join([f"start: {start}", *self._rules, f"TEXT: {_TEXT}"])

    def _expression(self, format: Mapping[str, Any]) -> str:
        kind = _string(format, "type")
        writers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda f: self._literal(_string(f, "value")),
            "json_schema": lambda f: _json(f.get("json_schema")),
            "regex": lambda f: _regex(_string(f, "pattern")),
            "any_text": lambda f: "TEXT",
            "sequence": lambda f: " ".join(map(self._expression, _mappings(f, "elements"))),
            "or": lambda f: self._rule(" | ".join(map(self._expression, _mappings(f, "elements")))),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "structural_tag": lambda f: self._expression(_read_format(f)),
        }
        if kind not in writers:
            raise ValueError(f"format of type {kind!r} is not one of {', '.join(writers)}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"formats are nested more than {_MAX_DEPTH} deep")
        expression = writers[kind](format)
        self._depth -= 1
        return expression

    def _literal(self, text: str) -> str:
        return literal(text, self._special) or '""'

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _tag(self, tag: Mapping[str, Any]) -> str:
        return self._rule(f"{self._literal(_string(tag, 'begin'))} {self._content_and_end(tag)}")

    def _content_and_end(self, tag: Mapping[str, Any]) -> str:
        content, end = _mapping(tag, "content"), _string(tag, "end")
        if content.get("type") == "any_text" and end:
            return self._text_up_to(end)
        return f"{self._expression(content)} {self._literal(end)}"

    def _text_up_to(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        if end in self._special:
            return self._rule(f"TEXT {self._literal(end)}")
        return self._rule(f"TEXT {self._literal(end)}", "[lazy]")

    def _triggered_tags(self, format: Mapping[str, Any]) -> str:
        triggers = format.get("triggers")
        if (
            not isinstance(triggers, list)
            or not triggers
            or not all(t and isinstance(t, str) for t in triggers)
        ):
            raise ValueError("triggers must be strings, at least one")
        tags = _mappings(format, "tags")
        if not tags:
            raise ValueError("there must be at least one tag")
        after: dict[str, list[str]] = {}
        for tag in tags:
            begin = _string(tag, "begin")
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                found = "none of" if not matching else "more than one of"
                raise ValueError(f"begin {begin!r} starts with {found} the triggers")
            rest = literal(begin[len(matching[0]) :], self._special)
            after.setdefault(matching[0], []).append(f"{rest} {self._content_and_end(tag)}")
        calls = [
            self._rule(f"{self._text_up_to(trigger)} {self._rule(' | '.join(bodies))}")
            for trigger, bodies in after.items()
        ]
        call = self._rule(" | ".join(calls))
        least = bool(format.get("at_least_one"))
        if format.get("stop_after_first"):
            return call if least else self._rule(f"{call} | TEXT")
        return self._rule(f"{call}{'+' if least else '*'} TEXT")

    def _tags_with_separator(self, format: Mapping[str, Any]) -> str:
        tag = self._rule(" | ".join(map(self._tag, _mappings(format, "tags"))))
        separator = self._literal(_string(format, "separator"))
        some = tag if format.get("stop_after_first") else self._rule(f"{tag} ({separator} {tag})*")
        return some if format.get("at_least_one") else self._rule(f"{some}?")


def _json(schema: Any) -> str:
    if schema is True or schema == {}:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, got {type(schema).__name__}")
    return f"%json {json.dumps(with_white_space(schema))}"


def _regex(pattern: str) -> str:
    return f"/{regex_to_lark(pattern, use_ascii='')}/"


def _string(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be a string, got {value!r}"[:200])
    return value


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name!r} must be an object, got {value!r}"[:200])
    return value


def _mappings(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = values.get(name)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{name!r} must be a list of objects")
    return value
