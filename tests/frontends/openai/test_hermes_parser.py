"""The Hermes format: valid and invalid calls, and splits of the text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.openai.tool_parsers import (
    Content,
    HermesParser,
    ParsedMessage,
    ToolCallArguments,
    ToolCallStart,
)

PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def read_stream(pieces: list[str]) -> ParsedMessage:
    """Return the joined events of a stream."""
    stream = HermesParser().stream()
    events = [event for piece in pieces for event in stream.feed(piece)] + stream.finish()
    message = ParsedMessage("")
    for event in events:
        if isinstance(event, Content):
            assert event.text
            message.content += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(message.calls)
            message.calls.append((event.name, ""))
        else:
            assert event.index == len(message.calls) - 1
            name, arguments = message.calls[-1]
            message.calls[-1] = (name, arguments + event.fragment)
    return message


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just words", "just words", []),
        ("ends with space \n", "ends with space \n", []),
        (PARIS, "", [("weather", '{"city": "Paris"}')]),
        ("Let me see.\n" + PARIS + "\n", "Let me see.", [("weather", '{"city": "Paris"}')]),
        (PARIS + "\n" + PARIS, "", [("weather", '{"city": "Paris"}')] * 2),
        (PARIS + " and then", " and then", [("weather", '{"city": "Paris"}')]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":{}}', "", [("f", "{}")]),  # stopped before the closing tag
        ('<tool_call>{"name":"f","arguments":{}</tool_call>', "", [("f", "{}")]),  # missing brace
        ('<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
        (
            '<tool_call>{"name":"f","arguments":{"a":"}</tool_call>\\""}}</tool_call>',
            "",
            [("f", '{"a":"}</tool_call>\\""}')],
        ),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        (
            '<tool_call>{"name":"f","arguments":3}</tool_call>',
            '<tool_call>{"name":"f","arguments":3}</tool_call>',
            [],
        ),
        ("a <tool_call>", "a <tool_call>", []),
        ("a <tool_ca", "a <tool_ca", []),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ("<tool_call>oops " + PARIS, "<tool_call>oops", [("weather", '{"city": "Paris"}')]),
    ],
)
def test_whole_and_streamed_results_agree(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = ParsedMessage(content, calls)
    assert HermesParser().parse(text) == expected
    assert read_stream([text]) == expected
    assert read_stream(list(text)) == expected


def test_invalid_json_arguments() -> None:
    """Content in a whole message; in a stream, the call is already reported."""
    text = '<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>'
    assert HermesParser().parse(text) == ParsedMessage(text)
    assert read_stream(list(text)).calls == [("f", '{"a": b}')]
    text = '<tool_call>{"name": "f", "arguments": {"a": <'
    assert HermesParser().parse(text) == ParsedMessage(text)
    assert read_stream(list(text)).calls == [("f", '{"a": ')]


def test_invalid_call_between_valid_ones() -> None:
    cut_off = '<tool_call>{"name": "f", "arguments": {"a": "'
    assert HermesParser().parse(PARIS + cut_off) == ParsedMessage(cut_off, [("weather", '{"city": "Paris"}')])


def test_arguments_are_streamed() -> None:
    stream = HermesParser().stream()
    assert stream.feed('Hm. <tool_call>\n{"name": "f", ') == [Content("Hm.")]
    assert stream.feed('"arguments": {"x') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"x')]
    assert stream.feed('": 1') == [ToolCallArguments(0, '": 1')]
    assert stream.feed("}}\n</tool") == [ToolCallArguments(0, "}")]
    assert stream.feed("_call>\n") == []
    assert stream.finish() == []


def test_partial_tag_is_released_early() -> None:
    stream = HermesParser().stream()
    assert stream.feed("1 <") == [Content("1")]
    assert stream.feed(" 2") == [Content(" < 2")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3))
FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "f", "arguments": ',
        '{"a": ["',
        "{",
        "}",
        "]",
        '"',
        "\\",
        " ",
        "\n",
        "x",
        "<",
        PARIS,
    ]
)


def cut(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(CALLS, min_size=1, max_size=3),
    st.text(max_size=20).filter(lambda text: "<" not in text),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_valid_calls_with_any_split(
    calls: list[tuple[str, dict[str, Any]]], content: str, name_first: bool, places: list[int]
) -> None:
    blocks = []
    for name, arguments in calls:
        members = {"name": name, "arguments": arguments}
        ordered = members if name_first else dict(reversed(members.items()))
        blocks.append(f"<tool_call>\n{json.dumps(ordered)}\n</tool_call>")
    text = content + "\n".join(blocks)
    whole = HermesParser().parse(text)
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    assert whole.content == content.rstrip()
    assert read_stream(cut(text, places)) == whole


@settings(max_examples=500, deadline=None)
@given(st.lists(FRAGMENTS, max_size=12).map("".join), st.lists(st.integers(0, 10_000), max_size=12))
def test_result_does_not_depend_on_the_split(text: str, places: list[int]) -> None:
    assert read_stream(cut(text, places)) == read_stream([text])


@settings(max_examples=500, deadline=None)
@given(st.lists(FRAGMENTS, max_size=12).map("".join))
def test_whole_messages_have_only_valid_calls(text: str) -> None:
    message = HermesParser().parse(text)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in message.calls)
    if not message.calls:
        assert message.content == text
