"""`POST /v1/chat/completions`: prompt, response, tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi_client import AsgiClient
from scripted_model import ScriptedModel

from neso.frontends.openai import OpenAIOptions, create_app
from neso.server.core import Core

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def chat(client: AsgiClient, **fields: Any) -> Any:
    response = await client.post(PATH, {"model": "scripted", "messages": HI, **fields})
    assert response.status == 200, response.body
    return response.json()


async def stream(client: AsgiClient, **fields: Any) -> list[Any]:
    """The chunks of a stream; checks that it ends with `[DONE]`."""
    response = await client.post(PATH, {"model": "scripted", "messages": HI, "stream": True, **fields})
    assert response.status == 200, response.body
    *chunks, done = response.events()
    assert done == "[DONE]"
    return chunks


def join(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a client joins from the chunks of one choice."""
    message: dict[str, Any] = {"role": None, "content": "", "calls": [], "finish_reason": None}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        assert message["finish_reason"] is None, "a chunk after the last one"
        delta = choice["delta"]
        assert (message["role"] is None) == ("role" in delta)
        message["role"] = message["role"] or delta["role"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def test_response_format(client: AsgiClient, script: ScriptedModel) -> None:
    body = await chat(client)
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    usage = body.pop("usage")
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert body == {
        "object": "chat.completion",
        "model": "scripted",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "hello there",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }
    (request,) = script.requests
    assert request.prompt == '{"role": "user", "content": "hi"}\nassistant:'
    assert not request.add_special_tokens


async def test_template_inputs(client: AsgiClient, script: ScriptedModel) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    await chat(client, messages=messages, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    lines = str(script.requests[0].prompt).split("\n")
    assert lines[0] == "tools: " + json.dumps(TOOLS)
    assert [json.loads(line) for line in lines[1:5]] == [{**messages[0], "role": "system"}, *messages[1:]]
    assert lines[5:] == ['variables: {"enable_thinking": false}', "assistant:"]


async def test_continue_final_message(client: AsgiClient, script: ScriptedModel) -> None:
    await chat(client, continue_final_message=True)
    assert str(script.requests[0].prompt).endswith('variables: {"continue_final_message": true}')
    await chat(client, add_generation_prompt=False)
    assert script.requests[1].prompt == '{"role": "user", "content": "hi"}'


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 1}, {"stop": " there"}])
async def test_stream_equals_whole_response(client: AsgiClient, fields: dict[str, Any]) -> None:
    whole = await chat(client, **fields)
    chunks = await stream(client, **fields)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        assert join(chunks, choice["index"]) == {
            "role": "assistant",
            "content": choice["message"]["content"],
            "calls": [],
            "finish_reason": choice["finish_reason"],
        }


@pytest.mark.parametrize(
    ("reply", "fields", "empty"),
    [("hello 🦊 there", {}, {"content": ""}), (CALL, {"tools": TOOLS}, {})],
    ids=["part of a character", "part of a tool call"],
)
async def test_stream_has_a_chunk_for_each_step(
    client: AsgiClient,
    script: ScriptedModel,
    reply: str,
    fields: dict[str, Any],
    empty: dict[str, Any],
) -> None:
    """Also for steps whose text is held back."""
    script.reply = lambda request, choice: reply
    *chunks, last = await stream(client, stream_options={"include_usage": True}, **fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len(deltas) > last["usage"]["completion_tokens"]
    assert deltas[1:-1].count(empty) > 2
    message = join(chunks)
    assert (message["content"], len(message["calls"])) == (("", 1) if fields else (reply, 0))


async def test_usage_of_a_stream(client: AsgiClient) -> None:
    *chunks, last = await stream(client, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


async def test_logprobs(client: AsgiClient) -> None:
    content = (await chat(client, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["hello", " there", "</s>"]
    assert content[0] == {
        "token": "hello",
        "logprob": -0.5,
        "bytes": list(b"hello"),
        "top_logprobs": [{"token": "`", "logprob": -0.25, "bytes": [96]}],
    }
    chunks = await stream(client, logprobs=True, top_logprobs=1)
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for entries in streamed for entry in entries] == content


async def test_bytes_of_a_partial_character_are_unknown(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: "☃"
    content = (await chat(client, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:3]] == [None] * 3


async def test_tool_call(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: "Let me see.\n" + CALL
    choice = (await chat(client, tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert join(await stream(client, tools=TOOLS)) == {
        "role": "assistant",
        "content": "Let me see.",
        "calls": [["weather", '{"city": "Paris"}']],
        "finish_reason": "tool_calls",
    }


async def test_arguments_are_streamed(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: CALL
    chunks = await stream(client, tools=TOOLS, logprobs=True)
    calls = [
        c["delta"]["tool_calls"] for chunk in chunks for c in chunk["choices"] if "tool_calls" in c["delta"]
    ]
    assert len(calls) > 5
    tokens = [
        e for chunk in chunks for c in chunk["choices"] for e in (c["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(entry["token"] for entry in tokens) == CALL + "</s>"


async def test_parallel_tool_calls(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: CALL + "\n" + CALL
    whole = (await chat(client, tools=TOOLS))["choices"][0]["message"]
    assert whole["content"] is None
    assert len(whole["tool_calls"]) == 2
    assert len(join(await stream(client, tools=TOOLS))["calls"]) == 2
    first = (await chat(client, tools=TOOLS, parallel_tool_calls=False))["choices"][0]["message"]
    assert len(first["tool_calls"]) == 1
    assert len(join(await stream(client, tools=TOOLS, parallel_tool_calls=False))["calls"]) == 1


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
    ],
)
async def test_finish_reason_of_calls(
    client: AsgiClient, script: ScriptedModel, choice: Any, reason: str
) -> None:
    """As in the OpenAI API, "stop" if the request names the function."""
    script.reply = lambda request, choice: CALL
    whole = (await chat(client, tools=TOOLS, tool_choice=choice))["choices"][0]
    assert len(whole["message"]["tool_calls"]) == 1 and whole["finish_reason"] == reason
    assert join(await stream(client, tools=TOOLS, tool_choice=choice))["finish_reason"] == reason


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_text_is_not_parsed_without_tools(
    client: AsgiClient, script: ScriptedModel, fields: dict[str, Any]
) -> None:
    script.reply = lambda request, choice: CALL
    message = (await chat(client, **fields))["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message
    assert join(await stream(client, **fields))["content"] == CALL
    assert "tools:" not in str(script.requests[0].prompt)


async def test_cut_off_call(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: CALL
    choice = (await chat(client, tools=TOOLS, max_tokens=20))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert CALL.startswith(choice["message"]["content"])


async def test_too_long_call_is_cut_off(core: Core, script: ScriptedModel) -> None:
    """In a stream, arguments end at the limit; in a whole response, the text is content."""
    client = AsgiClient(create_app(core, OpenAIOptions(max_tool_call_parse_bytes=200)))
    text = CALL.replace("Paris", "Paris" * 60)
    script.reply = lambda request, choice: text
    message = join(await stream(client, tools=TOOLS))
    assert message["finish_reason"] == "length"
    assert 100 < len(message["calls"][0][1]) <= 200
    choice = (await chat(client, tools=TOOLS))["choices"][0]
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]


async def test_generation_stops_after_a_cut_off_call(core: Core, script: ScriptedModel) -> None:
    """Only after all choices have ended."""
    client = AsgiClient(create_app(core, OpenAIOptions(max_tool_call_parse_bytes=200)))
    endless = CALL.replace("Paris", "Paris" * 300)
    script.reply = lambda request, choice: endless if choice == 0 else "hello"
    chunks = await stream(client, tools=TOOLS, n=2, stream_options={"include_usage": True}, logprobs=True)
    assert [join(chunks, index)["finish_reason"] for index in (0, 1)] == ["length", "stop"]
    assert chunks[-1]["usage"]["completion_tokens"] < len(endless) / 5
    assert len(script.aborted) == 1 and script.ended == []


@pytest.mark.parametrize("name", ["self", "text", "variables", "a b"])
async def test_template_variables_of_any_name(client: AsgiClient, script: ScriptedModel, name: str) -> None:
    await chat(client, chat_template_kwargs={name: 1})
    assert json.dumps({name: 1}) in str(script.requests[0].prompt)


async def test_allowed_tools(client: AsgiClient, script: ScriptedModel) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "time"}}]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    await chat(client, tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert '"time"' in str(script.requests[-1].prompt) and '"weather"' not in str(script.requests[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [*HI, {"role": "user", "content": [{"type": "file"}]}]}, "messages[1].content[0]"),
    ],
)
async def test_unsupported_content(client: AsgiClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post(PATH, {"model": "scripted", "messages": HI, **fields})
    assert response.status == 400 and response.json()["error"]["param"] == param


async def test_fields_without_effect(client: AsgiClient) -> None:
    fields = {
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "hello"},
        "service_tier": "auto",
        "store": True,
        "metadata": {"a": "b"},
        "user": "me",
        "verbosity": "low",
    }
    assert (await chat(client, **fields))["choices"][0]["message"]["content"] == "hello there"
