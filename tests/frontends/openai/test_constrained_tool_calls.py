"""Constrained tool calls on a real engine: the parser finds valid calls in any output of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from neso.engine.client.llm import LLM
from neso.engine.guided.grammar import grammar_text
from neso.engine.guided.grammar_matcher import make_matcher
from neso.engine.guided.token_table import TokenTable
from neso.engine.text.tokenizer import Tokenizer
from neso.frontends.openai.chat.message_format import Message, MessageFormat, ModelParsers
from neso.frontends.openai.chat.prompt import ToolUse
from neso.frontends.openai.reasoning_parsers import ReasoningParser, find_reasoning_parser
from neso.frontends.openai.tool_parsers import find_tool_parser, registry
from neso.generation import GuidedDecoding, SamplingParams
from neso.models import SHIPPED_MODELS

TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "plan_trip", "parameters": TRIP, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(SHIPPED_MODELS["neso-pilot"], max_num_seqs=8)


def generate(
    llm: LLM, message_format: MessageFormat, prompt: str, **sampling: Any
) -> list[tuple[Message, Any]]:
    params = SamplingParams(
        n=4,
        seed=3,
        max_tokens=160,
        guided_decoding=message_format.guided_decoding,
        shown_special_tokens=message_format.shown_special_tokens,
        **sampling,
    )
    made = []
    for output in llm.generate(prompt, params)[0].outputs:
        message = Message()
        parser = message_format.parser(eager=False)
        message.add(parser.feed(output.text, len(output.token_ids)))
        message.add(parser.finish())
        made.append((message, output))
    return made


def format_of(
    tools: str, choice: Any, reasoning: ReasoningParser | None = None, **fields: Any
) -> MessageFormat:
    return MessageFormat(
        ModelParsers(find_tool_parser(tools), reasoning), ToolUse.of(TOOLS, choice), **fields
    )


@pytest.mark.parametrize("name", sorted(registry.BUILTIN))
def test_forced_calls_are_valid(llm: LLM, name: str) -> None:
    named = {"type": "function", "function": {"name": "plan_trip"}}
    ended = 0
    for choice in ("required", named):
        for message, output in generate(llm, format_of(name, choice), "Plan a trip."):
            if output.finish_reason.value == "length":
                continue  # long output may be truncated anywhere
            ended += 1
            assert message.calls and not message.content, output.text
            for function, arguments in message.calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[function])
            assert choice == "required" or [call[0] for call in message.calls] == ["plan_trip"]
    assert ended >= 4


@pytest.fixture(scope="module")
def tokens() -> tuple[Tokenizer, TokenTable, LLTokenizer]:
    tokenizer = Tokenizer.from_directory(SHIPPED_MODELS["neso-pilot"])
    table = TokenTable.of(tokenizer, tokenizer.vocab_size)
    return tokenizer, table, table.ll_tokenizer()


def fits(tokens: tuple[Tokenizer, TokenTable, LLTokenizer], guided: GuidedDecoding | None, text: str) -> bool:
    """Return whether the constraint accepts `text` as the whole output."""
    assert guided is not None
    tokenizer, table, ll_tokenizer = tokens
    matcher, error = make_matcher(ll_tokenizer, grammar_text(guided, table.special_tokens()))
    assert not error
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(
        matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
    )


# By parser: a call of the function "now" with a placeholder for arguments, or parameters for tag formats.
CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": @}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": @}]',
    "mistral_v11": "[TOOL_CALLS]now[ARGS]@",
    "granite": '<|tool_call|>[{"name": "now", "arguments": @}]',
    "jamba": '<tool_calls>[{"name": "now", "arguments": @}]</tool_calls>',
    "phi4_mini_json": 'functools[{"name": "now", "arguments": @}]',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>@"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("name", sorted(registry.BUILTIN))
def test_strict_functions_with_auto(tokens: Any, name: str) -> None:
    form = format_of(name, "auto").guided_decoding
    if name in ("llama3_json", "pythonic"):
        assert form is None
        return
    assert fits(tokens, form, "Just words, {and} [more].")
    if name in CALLS:
        assert fits(tokens, form, "Hm. " + CALLS[name].replace("@", "{}"))
        assert not fits(tokens, form, "Hm. " + CALLS[name].replace("now", "later").replace("@", "{}"))
        assert not fits(tokens, form, "Hm. " + CALLS[name].replace("@", "[]"))


THINK = find_reasoning_parser("qwen3")
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": TRIP}, '{"city": "Rome", "days": 2}', '{"city": "Oslo", "days": 2}'),
    ({"json_object": True}, '{"a": [1]}', "[1]"),
    ({"choice": ("yes", "no")}, "no", "maybe"),
    ({"regex": "[a-c]{3}"}, "abc", "abd"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS)
def test_output_format_after_reasoning(tokens: Any, fields: dict[str, Any], good: str, bad: str) -> None:
    def form(prompt: str) -> GuidedDecoding | None:
        parsers = ModelParsers(find_tool_parser("hermes"), THINK)
        return MessageFormat(parsers, prompt=prompt, guided=GuidedDecoding(**fields)).guided_decoding

    inside, before, closed = form("Hi <think>\n"), form("Hi"), form("Hi <think>\n\n</think>\n\n")
    for text in (good, bad):
        assert fits(tokens, inside, f"Let me see: {{}}.\n</think>\n\n{text}") == (text == good)
        assert fits(tokens, before, f"<think>\nHm.\n</think>\n\n{text}") == (text == good)
        assert fits(tokens, before, text) == (text == good)
        assert fits(tokens, closed, text) == (text == good)
    assert not fits(tokens, inside, good)
    assert not fits(tokens, closed, f"Hm.</think>{good}")


def test_forced_calls_after_reasoning(tokens: Any) -> None:
    call = CALLS["hermes"].replace("@", "{}")
    form = format_of("hermes", "required", THINK, prompt="<think>").guided_decoding
    assert fits(tokens, form, f"I call now.</think>\n\n{call}")
    assert not fits(tokens, form, "I call now.</think>\n\nNo.")


def test_grammar_excludes_reasoning() -> None:
    guided = GuidedDecoding(grammar='start: "a"')
    message_format = MessageFormat(
        ModelParsers(find_tool_parser("hermes"), THINK), prompt="<think>", guided=guided
    )
    assert message_format.guided_decoding is guided
    parser = message_format.parser(eager=True)
    assert [event.text for event in parser.feed("a")] == ["a"]


def test_output_format_or_calls(tokens: Any) -> None:
    """`response_format` allows calls, as with OpenAI; the format of an extension does not."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for field, may_call in (("response_format", True), ("guided_json", False)):
        guided = GuidedDecoding(json=schema, source_field=field)
        form = format_of("hermes", "auto", guided=guided).guided_decoding
        assert fits(tokens, form, '{"a": 1}') and not fits(tokens, form, "words")
        assert fits(tokens, form, CALLS["hermes"].replace("@", "{}")) == may_call
