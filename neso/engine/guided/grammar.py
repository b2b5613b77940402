"""Translates guided-decoding options into a grammar for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from neso.generation import GuidedDecoding

_TEXT = r"/(.|\n)*/"
_MAX_DEPTH = 32


def structural_tag_lark(tag: Mapping[str, Any], special_tokens: Mapping[str, int]) -> str:
    """Convert a structural tag to a Lark grammar. Raises `ValueError` if the tag is invalid.

    A trigger that is the name of a special token matches that token, not its text.
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
    """Writes each format as a rule, with one method per format type."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        self._rules: list[str] = []
        self._depth = 0

    def write(self, format: Mapping[str, Any]) -> str:
        start = self._expression(format)
        # Free text is a terminal, so it is a single lexeme however often it is used.
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
        """Write a rule for any text up to and including the first `end`."""
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


class GrammarError(ValueError):
    """A grammar is invalid or not supported. The message is for the client."""


class MatcherError(RuntimeError):
    """A sequence cannot continue in its grammar. The message is for the client."""


def quoted(text: str) -> str:
    """Return a string literal."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return `text` as part of a rule: string literals and the special tokens in it. Empty for empty text."""
    if not text:
        return ""
    names = [
        re.escape(name) for name in sorted(special_tokens, key=len, reverse=True) if name and name in text
    ]
    if not names:
        return quoted(text)
    parts = re.split(f"({'|'.join(names)})", text)
    return " ".join(f"<[{special_tokens[p]}]>" if p in special_tokens else quoted(p) for p in parts if p)


WHITESPACE = r"\n[ \t]{0,32}| "
"""Default white space between JSON tokens. With unlimited newlines, some models would generate only newlines."""


def with_white_space(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the schema with llguidance's white-space `options`, which override its own; `WHITESPACE` by default."""
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, dict) else {}), **options}
    if options.get("whitespace_flexible", True):
        options.setdefault("whitespace_pattern", WHITESPACE)
    return {**schema, "x-guidance": options}


MAX_GRAMMAR_SIZE = 1 << 20
"""Maximum number of characters of a schema, expression or grammar."""
MAX_GBNF_SIZE = 1 << 16
"""Maximum number of characters of a GBNF grammar, which is converted in Python."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Disables forced tokens: the model chooses the tokenization of text that a grammar forces. Otherwise the library would
expand all forced text at once, which takes seconds for `a{1000000}`.
"""


def grammar_text(guided: GuidedDecoding, special_tokens: Mapping[str, int]) -> str:
    """Convert guided-decoding options to grammar text for llguidance. `special_tokens`: ids by name.

    Raises `GrammarError` for an invalid grammar; further errors are found by compilation.
    """
    source = getattr(guided, guided.kind)
    if isinstance(source, str) and len(source) > MAX_GRAMMAR_SIZE:
        raise GrammarError(f"is {len(source)} characters long, at most {MAX_GRAMMAR_SIZE} are taken")
    try:
        match guided.kind:
            case "json" | "json_object":
                lark = f"start: %json {json.dumps(_schema(guided))}"
            case "regex":
                lark = f"start: /{regex_to_lark(source, use_ascii='')}/"
            case "choice":
                lark = "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, source))
            case "grammar":
                lark = _lark(source)
            case _:
                lark = structural_tag_lark(json.loads(source), special_tokens)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error) or type(error).__name__) from None
    # The last directive applies. It is appended after the grammar, so that errors have the client's line numbers.
    return LLMatcher.grammar_from_lark(f"{lark}\n{NO_FORCING}\n")


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_POSITION = re.compile(r"^at \d+\(\d+\): ")
_CONTEXT = re.compile(r"\n +\d+ \| .*", re.DOTALL)


def clean_message(kind: str, message: str) -> str:
    """Return the compiler's message without positions in generated text."""
    if kind == "grammar":
        return "\n".join(line for line in message.split("\n") if NO_FORCING not in line)
    return _CONTEXT.sub("", _POSITION.sub("", message)).removeprefix("failed to compile JSON schema: ")


def _schema(guided: GuidedDecoding) -> dict[str, Any]:
    """Return the schema with the request's white-space options."""
    schema: Any = json.loads(guided.json) if isinstance(guided.json, str) else True
    if schema is True:
        schema = {"type": "object"}
    options: dict[str, Any] = {}
    if guided.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if guided.whitespace_pattern is not None:
        options["whitespace_pattern"] = guided.whitespace_pattern
    return with_white_space(schema, **options)


def _lark(source: str) -> str:
    """Convert GBNF to Lark; Lark is returned unchanged."""
    if not _GBNF_RULE.search(source):
        return source
    if len(source) > MAX_GBNF_SIZE:
        raise GrammarError(f"is {len(source)} characters long, at most {MAX_GBNF_SIZE} of GBNF are taken")
    try:
        lark: str = gbnf_to_lark(source)
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"cannot be read as GBNF: {error}") from None
    return lark
