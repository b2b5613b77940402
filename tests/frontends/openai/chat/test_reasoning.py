"""Reasoning: the parsers, and chats with reasoning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from asgi_client import AsgiClient
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_model import ScriptedModel

from neso.frontends.openai import reasoning_parsers as registry
from neso.frontends.openai.reasoning_parsers import (
    ReasoningParser,
    Split,
    detect_reasoning_parser,
    find_reasoning_parser,
)

PATH = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def parser(name: str) -> ReasoningParser:
    found = find_reasoning_parser(name)
    assert found is not None
    return found


def read(name: str, pieces: list[str], prompt: str = "") -> Split:
    stream = parser(name).stream(prompt)
    splits = [*map(stream.feed, pieces), stream.finish()]
    return Split("".join(s.reasoning for s in splits), "".join(s.content for s in splits))


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nHm.\n\nYes. \n</think>\n\nIt is.\n", "Hm.\n\nYes.", "It is.\n"),
        ("qwen3", "…<think>\n", "Hm.</think>Yes", "Hm.", "Yes"),
        ("qwen3", "…<think>\n", "<think>Hm.</think>Yes", "Hm.", "Yes"),
        ("qwen3", "…<think>\n\n</think>\n\n", "Yes <think> no", "", "Yes <think> no"),
        ("qwen3", "say <think> now", "Yes", "", "Yes"),
        ("qwen3", "", "Yes </think> no", "", "Yes </think> no"),
        ("qwen3", "", "a < b", "", "a < b"),
        ("qwen3", "", " \n", "", " \n"),
        ("qwen3", "", "<think>Hm. a </thin", "Hm. a </thin", ""),
        ("qwen3", "", "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("qwen3", "", "<thin", "", "<thin"),
        ("deepseek_r1", "", "Hm.\n</think>\n\nYes", "Hm.", "Yes"),
        ("deepseek_r1", "", "<think>Hm.</think>Yes", "Hm.", "Yes"),
        ("deepseek_r1", "…</think>", "Yes", "", "Yes"),
        ("mistral", "", "[THINK]Hm.[/THINK]Yes", "Hm.", "Yes"),
        ("granite", "", "Here is my thought process:\n Hm.\nHere is my response:\nYes", "Hm.", "Yes"),
        ("granite", "", "Here's my thought process: Hm. Here's my response: Yes", "Hm.", "Yes"),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes", "Hm.", "Yes"),
    ],
)
def test_split(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert read(name, [text], prompt) == Split(reasoning, content)
    assert read(name, list(text), prompt) == Split(reasoning, content)


PIECES = st.sampled_from(["<think>", "</think>", "<thi", "</", "x", " ", "\n", "<", "think>"])


@settings(max_examples=500, deadline=None)
@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from(["", "<think>", "</think>"]),
    st.sampled_from(["qwen3", "deepseek_r1"]),
)
def test_result_does_not_depend_on_the_split(text: str, places: list[int], prompt: str, name: str) -> None:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(marks)]
    assert read(name, pieces, prompt) == read(name, [text], prompt)


def test_parser_selection() -> None:
    assert type(detect_reasoning_parser("{% if enable_thinking %}<think>")) is registry.BUILTIN["qwen3"]
    assert type(detect_reasoning_parser("[THINK]x[/THINK]")) is registry.BUILTIN["mistral"]
    assert detect_reasoning_parser("{{ messages }}") is None
    assert find_reasoning_parser("none") is None
    with pytest.raises(ValueError, match="known are auto, none, deepseek_r1"):
        find_reasoning_parser("elvish")


# -- chats ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def thinker(script: ScriptedModel) -> ScriptedModel:
    script.text.chat_template_source = "<think>"
    script.reply = lambda request, choice: "<think>\nHm, hm.\n</think>\n\nhello there"
    return script


async def chat(client: AsgiClient, **fields: Any) -> Any:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **fields}
    response = await client.post(PATH, body)
    assert response.status == 200, response.body
    return response.events() if fields.get("stream") else response.json()


def deltas(events: list[Any], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for event in events[:-1] for choice in event["choices"])


async def test_whole_response(client: AsgiClient, thinker: ScriptedModel) -> None:
    body = await chat(client)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hello there",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "Hm, hm.",
        "reasoning": "Hm, hm.",
    }
    reasoned = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 3 < reasoned < body["usage"]["completion_tokens"]


async def test_stream(client: AsgiClient, thinker: ScriptedModel) -> None:
    events = await chat(client, stream=True, stream_options={"include_usage": True})
    assert deltas(events, "reasoning_content") == deltas(events, "reasoning") == "Hm, hm."
    assert deltas(events, "content") == "hello there"
    whole = await chat(client)
    assert events[-2]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]


@pytest.mark.parametrize("stream", [False, True])
async def test_include_reasoning_false(client: AsgiClient, thinker: ScriptedModel, stream: bool) -> None:
    response = await chat(client, include_reasoning=False, stream=stream)
    if stream:
        assert deltas(response, "reasoning_content") == ""
        assert deltas(response, "content") == "hello there"
    else:
        message = response["choices"][0]["message"]
        assert message["content"] == "hello there" and "reasoning_content" not in message
        assert response["usage"]["completion_tokens_details"]["reasoning_tokens"]


async def test_truncated_reasoning_has_no_content(client: AsgiClient, thinker: ScriptedModel) -> None:
    thinker.reply = lambda request, choice: "<think>Hm, hm, hm"
    message = (await chat(client, max_tokens=12))["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"].startswith("Hm")


async def test_calls_after_reasoning(client: AsgiClient, thinker: ScriptedModel) -> None:
    thinker.reply = lambda request, choice: f"<think>I call {CALL}?</think>{CALL}"
    (choice,) = (await chat(client, tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["reasoning_content"] == f"I call {CALL}?"
    events = await chat(client, tools=TOOLS, stream=True)
    assert deltas(events, "reasoning") == f"I call {CALL}?"
    calls = [c for e in events[:-1] for ch in e["choices"] for c in ch["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "weather"


async def test_logprobs_include_reasoning(client: AsgiClient, thinker: ScriptedModel) -> None:
    (choice,) = (await chat(client, logprobs=True))["choices"]
    text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert text.removesuffix("</s>") == "<think>\nHm, hm.\n</think>\n\nhello there"
    events = await chat(client, logprobs=True, stream=True)
    entries = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert entries == choice["logprobs"]["content"]


async def test_template_variables(client: AsgiClient, thinker: ScriptedModel) -> None:
    await chat(client, reasoning_effort="low", chat_template_kwargs={"enable_thinking": True})
    assert '{"enable_thinking": true, "reasoning_effort": "low"}' in str(thinker.requests[-1].prompt)
    await chat(client, reasoning_effort="none")
    assert '"enable_thinking": false' in str(thinker.requests[-1].prompt)
    assert thinker.requests[-1].sampling.shown_special_tokens == ("<think>", "</think>")
