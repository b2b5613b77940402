"""Tool call formats: parsing, splits of the text, limits, selection of the parser."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.openai import parser_registry
from neso.frontends.openai.tool_parsers import (
    Content,
    Function,
    ParsedMessage,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
    detect_tool_parser,
    find_tool_parser,
    registry,
)

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hours": {"type": "array", "items": {"type": "integer"}},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
    },
)
NOW = Function("now", {"type": "object", "properties": {}})
FUNCTIONS = (WEATHER, NOW)

DS_BEGIN, DS_CALL, DS_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DS_CALL_END, DS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

# By parser: a message with two calls, in the format of its models.
MESSAGES = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bo\\"nn", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Bo\\"nn", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bo\\"nn", "days": 3}, "id": "a1"}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_v11": '[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{"city": "Bo\\"nn", "days": 3}[TOOL_CALLS]now[ARGS]{}',
    "pythonic": "[get_weather(city='Bo\"nn', days=3), now()]",
    "deepseek_v3": f"{DS_BEGIN}{DS_CALL}function{DS_SEP}get_weather\n```json\n"
    f'{{"city": "Bo\\"nn", "days": 3}}\n```{DS_CALL_END}\n'
    f"{DS_CALL}function{DS_SEP}now\n```json\n{{}}\n```{DS_CALL_END}{DS_END}",
    "deepseek_v31": f'{DS_BEGIN}{DS_CALL}get_weather{DS_SEP}{{"city": "Bo\\"nn", "days": 3}}{DS_CALL_END}'
    f"{DS_CALL}now{DS_SEP}{{}}{DS_CALL_END}{DS_END}",
    "kimi_k2": f"{KIMI_BEGIN}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Bo\\"nn", "days": 3}<|tool_call_end|>'
    f"<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI_END}",
    "qwen3_coder": '<tool_call>\n<function=get_weather>\n<parameter=city>\nBo"nn\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bo"nn</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Bo\\"nn", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "jamba": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Bo\\"nn", "days": 3}}, '
    '{"name": "now", "arguments": {}}]</tool_calls>',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "Bo\\"nn", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
}
EXPECTED = [("get_weather", {"city": 'Bo"nn', "days": 3}), ("now", {})]
ALONE = {"llama3_json", "pythonic"}  # no content before the call, since there is no marker
NAMES = sorted(MESSAGES)


def cut(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def read_stream(
    parser: ToolParser, pieces: list[str], *, eager: bool = True, limit: int = 10_000
) -> ParsedMessage:
    """Return the joined events of a stream."""
    stream = parser.stream(FUNCTIONS, eager=eager, max_call_chars=limit)
    message = ParsedMessage("")
    for event in [event for piece in pieces for event in stream.feed(piece)] + stream.finish():
        if isinstance(event, Content):
            assert event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(message.calls)
        else:
            assert event.index == len(message.calls) - 1
        message.add(event)
    return message


def loaded(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in message.calls]


def test_all_parsers_are_tested() -> None:
    assert sorted(registry.BUILTIN) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lead", ["", "Let me see.\n", "\n"])
def test_two_calls(name: str, lead: str) -> None:
    if name in ALONE and lead.strip():
        pytest.skip("its calls stand alone")
    parser = find_tool_parser(name)
    text = lead + MESSAGES[name] + "\n"
    whole = parser.parse(text, FUNCTIONS)
    assert (whole.content, loaded(whole)) == (lead.strip(), EXPECTED)
    assert read_stream(parser, [text]) == read_stream(parser, list(text)) == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["just words", "", " \n", "{", "[", "[1, 2]", '{"name": 3}', "a < b [c] {d}", "[x(1)]"]
)
def test_no_calls(name: str, text: str) -> None:
    parser = find_tool_parser(name)
    assert parser.parse(text, FUNCTIONS) == read_stream(parser, list(text)) == ParsedMessage(text)


@pytest.mark.parametrize("name", NAMES)
def test_cut_off_call_is_content(name: str) -> None:
    parser = find_tool_parser(name)
    first = MESSAGES[name][: MESSAGES[name].index("days") + 4]
    assert parser.parse(first, FUNCTIONS) == ParsedMessage(first)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_reported_before_arguments_are_complete(name: str) -> None:
    stream = find_tool_parser(name).stream(FUNCTIONS)
    text = MESSAGES[name]
    events = stream.feed(text[: text.index("days")])
    assert events[0] == ToolCallStart(0, "get_weather")
    if "deepseek" in name or "mistral" in name:
        assert events[1:] == [ToolCallArguments(0, '{"city": "Bo\\"nn", "')]


@pytest.mark.parametrize("name", NAMES)
def test_forced_format_is_parsed(name: str) -> None:
    """A text in the forced format, with JSON that matches its schemas."""
    parser = find_tool_parser(name)
    text = _write(parser.forced_form(FUNCTIONS, many_calls=True))
    assert loaded(parser.parse(text, FUNCTIONS)) == [("get_weather", {"city": "Oslo"}), ("now", {})]
    free = parser.free_form(FUNCTIONS, many_calls=True)
    assert free is None or loaded(parser.parse("Hm. " + _write(free), FUNCTIONS))[0][0] == "get_weather"


def _write(form: dict[str, Any]) -> str:
    """Return a shortest text in a format; with both functions if the format allows several."""
    kind = form["type"]
    if kind == "const_string":
        return form["value"]
    if kind == "any_text":
        return "Oslo"
    if kind == "json_schema":
        schema = form["json_schema"]
        if schema == WEATHER.schema:
            return '{"city": "Oslo"}'
        return '"Oslo"' if schema.get("type") == "string" else "{}"
    if kind == "tag":
        return form["begin"] + _write(form["content"]) + form["end"]
    if kind == "sequence":
        return "".join(map(_write, form["elements"]))
    if kind == "or":
        return min(map(_write, form["elements"]), key=len)
    if kind == "triggered_tags":
        return _write(form["tags"][0])
    assert kind == "tags_with_separator"
    return form["separator"].join(map(_write, form["tags"]))


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", '{"name": "f", "arguments": '],
    "llama3_json": ["<|python_tag|>", '{"name": "now", "parameters": ', "; "],
    "mistral": ["[TOOL_CALLS]", "[TOOL", '[{"name": "f", "arguments": ', ", "],
    "mistral_v11": ["[TOOL_CALLS]", "[ARGS]", "now", "[CALL_ID]", "[TOOL_CALLS]now[ARGS]{"],
    "pythonic": ["<|python_start|>", "now(", "[now(", "a=", "'", ")", ", ", "<|python_end|>"],
    "deepseek_v3": [DS_BEGIN, DS_CALL, "function", DS_SEP, "now\n```json\n", DS_CALL_END, DS_END, "<｜tool"],
    "deepseek_v31": [DS_BEGIN, DS_CALL, "now", DS_SEP, DS_CALL_END, DS_END, "<｜tool"],
    "kimi_k2": [
        KIMI_BEGIN,
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        KIMI_END,
    ],
    "qwen3_coder": [
        "<tool_call>",
        "<function=now>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "</tool_call>",
        "<",
    ],
    "glm45": ["<tool_call>", "now", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "granite": ["<|tool_call|>", '[{"name": "f", "arguments": ', "<|tool", ", "],
    "jamba": ["<tool_calls>", "</tool_calls>", '[{"name": "f", "arguments": ', ", "],
    "phi4_mini_json": ["functools", "func", '[{"name": "f", "arguments": ', ", "],
}
COMMON = ['{"a": ["', '{"a": 1}', "{", "}", "]", "[", '"', "\\", " ", "\n", "x", "1"]


def texts(name: str) -> st.SearchStrategy[str]:
    pieces = st.sampled_from([*FRAGMENTS[name], *FRAGMENTS[name], *COMMON, MESSAGES[name]])
    return st.lists(pieces, max_size=14).map("".join)


PLACES = st.lists(st.integers(0, 10_000), max_size=14)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(st.data(), PLACES, st.sampled_from([10_000, 10_000, 40, 7]))
def test_result_does_not_depend_on_the_split(name: str, data: Any, places: list[int], limit: int) -> None:
    text = data.draw(texts(name))
    parser = find_tool_parser(name)
    for eager in (True, False):
        once = read_stream(parser, [text], eager=eager, limit=limit)
        assert read_stream(parser, cut(text, places), eager=eager, limit=limit) == once
        assert read_stream(parser, list(text), eager=eager, limit=limit) == once


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whole_messages_have_only_valid_calls(name: str, data: Any) -> None:
    text = data.draw(texts(name))
    message = find_tool_parser(name).parse(text, FUNCTIONS)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in message.calls)
    if not message.calls:
        assert message.content == text


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_too_long_call(name: str) -> None:
    parser = find_tool_parser(name)
    text = MESSAGES[name].replace("Bo", "Bo" + "n" * 500)
    assert parser.parse(text, FUNCTIONS, max_call_chars=300).content == text
    stream = parser.stream(FUNCTIONS, max_call_chars=300)
    message = ParsedMessage("")
    for event in stream.feed(text) + stream.finish():
        message.add(event)
    if stream.cut_off:
        assert len(message.calls) == 1 and len(message.calls[0][1]) <= 300 and not message.content
    else:
        assert message.content == text


@pytest.mark.parametrize("name", NAMES)
def test_repeated_markers_take_linear_time(name: str) -> None:
    parser = find_tool_parser(name)
    beginning = MESSAGES[name][: MESSAGES[name].index("Bo")]
    text = beginning * 4000
    began = time.process_time()
    assert not parser.parse(text, FUNCTIONS).calls
    read_stream(parser, cut(text, list(range(0, len(text), 97))))
    assert time.process_time() - began < 20  # with quadratic time, this would take minutes


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[now(a=True, b=None, c=-1.5)]", {"a": True, "b": None, "c": -1.5}),
        ("[now(a=true, b=null)]", {"a": True, "b": None}),
        ("[now(a=['x', {'k': (1, 2)}])]", {"a": ["x", {"k": [1, 2]}]}),
        ("[now(a='it\\'s, (fine)', )]", {"a": "it's, (fine)"}),
        ("<|python_start|>[now( a = 1 )]<|python_end|>", {"a": 1}),
        ("[now(a=f())]", None),
        ("[now(1)]", None),
        ("[now(a=1e999)]", None),
        ("[now(a=b'x')]", None),
        ("[now(a={[]: 1})]", None),
        ("[unknown(a=1)]", None),
        ("[now(a=1", None),
    ],
)
def test_python_literals(text: str, arguments: Any) -> None:
    message = find_tool_parser("pythonic").parse(text, FUNCTIONS)
    assert loaded(message) == ([] if arguments is None else [("now", arguments)])
    assert message.content == (text if arguments is None else "")


def test_tagged_values_have_schema_types() -> None:
    text = (
        "<tool_call><function=get_weather><parameter=city>\n42\n</parameter><parameter=days>seven</parameter>"
        "<parameter=hours>[1, 2]<parameter=unit>C</parameter><parameter=other>1</parameter></function></tool_call>"
    )
    (call,) = loaded(find_tool_parser("qwen3_coder").parse(text, FUNCTIONS))
    expected = {"city": "42", "days": "seven", "hours": [1, 2], "unit": "C", "other": "1"}
    assert call == ("get_weather", expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama4_json", '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>'),
        ("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'),
        ("mistral", "[TOOL_CALLS]now{}"),
        ("mistral_v11", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'),
        ("deepseek_v31", f"{DS_CALL}function{DS_SEP}now\n```json\n{{}}\n```{DS_CALL_END}{DS_END}"),
        ("qwen3_coder", "<function=now>\n</function>"),
        ("pythonic", "<|python_start|>[now()]<|python_end|>"),
        ("granite", '<|tool_call|>{"name": "now", "arguments": {}}'),
    ],
)
def test_format_variants(name: str, text: str) -> None:
    parser = find_tool_parser(name)
    expected = ParsedMessage("", [("now", "{}")])
    assert parser.parse(text, FUNCTIONS) == read_stream(parser, list(text)) == expected


def test_llama_without_a_tag_requires_a_known_function() -> None:
    parser = find_tool_parser("llama3")
    text = '{"name": "Bob", "parameters": {}}'
    assert parser.parse(text, FUNCTIONS).content == text
    assert parser.parse("<|python_tag|>" + text, FUNCTIONS).calls == [("Bob", "{}")]


# -- parser selection --------------------------------------------------------------------------------------------------

TEMPLATES = {
    "hermes": "within <tool_call></tool_call> tags",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name',
    "mistral": "{{- '[TOOL_CALLS][' }}",
    "mistral_v11": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "deepseek_v3": f"{DS_BEGIN} + '\\n' + '```json'",
    "deepseek_v31": f"{DS_BEGIN}",
    "kimi_k2": KIMI_BEGIN,
    "qwen3_coder": "<tool_call>\n<function=example_function_name>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "granite": "<|tool_call|>",
    "jamba": "<tool_calls>",
    "phi4_mini_json": "<|tool|>' + message['tools'] + '<|/tool|>",
}


@pytest.mark.parametrize("name", NAMES)
def test_detection_by_chat_template(name: str) -> None:
    assert type(detect_tool_parser(TEMPLATES[name])) is registry.BUILTIN[name]


def test_registry() -> None:
    assert type(detect_tool_parser("{{ messages }}")) is registry.BUILTIN["hermes"]
    assert type(find_tool_parser("llama4_pythonic")) is registry.BUILTIN["pythonic"]
    with pytest.raises(ValueError, match="known are auto, deepseek_v3, "):
        find_tool_parser("elvish")


class ForeignParser(registry.HermesParser):
    @classmethod
    def matches(cls, template: str) -> bool:
        return "<elvish>" in template


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "elvish"

        def load(self) -> type[ToolParser]:
            return ForeignParser

    parser_registry.entry_point_parsers.cache_clear()
    monkeypatch.setattr(
        parser_registry, "entry_points", lambda group: [Point()] if group == registry.GROUP else []
    )
    assert isinstance(find_tool_parser("elvish"), ForeignParser)
    assert isinstance(detect_tool_parser("<elvish><tool_call>"), ForeignParser)
    parser_registry.entry_point_parsers.cache_clear()


PAGE = Path(__file__).parents[3] / "docs" / "guides" / "tool-calling.md"


def test_docs_list_all_parsers() -> None:
    text = PAGE.read_text()
    for name in (*registry.BUILTIN, *registry.ALIASES):
        assert f"`{name}`" in text, name


def test_docs_example_parser() -> None:
    found = re.search(r"`bracket_parser.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    parser = names["BracketParser"]()
    assert parser.matches("[[name {}]]")
    text = 'Hm.\n[[now {"a": 1}]]\n[[now {}]]'
    assert parser.parse(text) == ParsedMessage("Hm.", [("now", '{"a": 1}'), ("now", "{}")])
    assert read_stream(parser, list(text)) == parser.parse(text)
    assert loaded(parser.parse(_write(parser.forced_form(FUNCTIONS, many_calls=True)))) == [
        ("get_weather", {"city": "Oslo"}),
        ("now", {}),
    ]
