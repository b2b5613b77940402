"""Tool calls with the `openai` client: the model calls, the function returns, the model answers; and helpers."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "neso-pilot"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the local time in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        yield client


def get_weather(city: str) -> str:
    assert city == "Paris"
    return '{"temperature": 21, "sky": "sunny"}'


def loop(send_request) -> tuple[list[str], str]:
    """Return the functions that were called, and the final text."""
    messages, called = [QUESTION], []
    for _ in range(3):
        message, reason = send_request(messages)
        if not message.get("tool_calls"):
            assert reason == "stop"
            return called, message["content"]
        assert reason == "tool_calls"
        messages.append(message)
        for call in message["tool_calls"]:
            assert call["id"].startswith("call_")
            called.append(call["function"]["name"])
            result = get_weather(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise AssertionError("the model does not come to an end")


@pytest.mark.parametrize("first", ["auto", "required"])
def test_tool_loop(api, first):
    def send_request(messages):
        reply = api.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[WEATHER, TIME],
            tool_choice=first if len(messages) == 1 else "auto",
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=80,
        )
        choice = reply.choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason

    called, response = loop(send_request)
    assert called == ["get_weather"]
    assert response == "It is 21 degrees and sunny in Paris."


def test_streamed_tool_loop(api):
    """With the client's accumulator of chunks, whose events report partial arguments."""
    fragments = []

    def send_request(messages):
        with api.chat.completions.stream(
            model=MODEL, messages=messages, tools=[WEATHER], temperature=0, max_completion_tokens=80
        ) as stream:
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    fragments.append(event.arguments_delta)
            choice = stream.get_final_completion().choices[0]
        return choice.message.model_dump(exclude_none=True, exclude={"parsed"}), choice.finish_reason

    called, response = loop(lambda messages: send_request(_plain(messages)))
    assert called == ["get_weather"]
    assert response == "It is 21 degrees and sunny in Paris."
    assert len(fragments) > 2 and json.loads("".join(fragments)) == {"city": "Paris"}


def _plain(messages):
    """Return messages without the fields that the client's helpers add to calls."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
    return messages


# -- structured output helpers of the client ------------------------------------------------------------------------


class Trip(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)
    stops: list[Literal["Oslo", "Bonn"]] = Field(max_length=2)


class PlanTrip(BaseModel):
    """Plan a trip."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def test_parse_into_a_pydantic_model(api):
    for seed in range(3):
        reply = api.chat.completions.parse(
            model=MODEL, messages=[QUESTION], response_format=Trip, max_completion_tokens=200, seed=seed
        )
        message = reply.choices[0].message
        assert isinstance(message.parsed, Trip)
        assert message.refusal is None and message.tool_calls is None


def test_parse_function_arguments(api):
    reply = api.chat.completions.parse(
        model=MODEL,
        messages=[QUESTION],
        tools=[openai.pydantic_function_tool(PlanTrip)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=200,
    )
    for call in reply.choices[0].message.tool_calls:
        assert call.function.name == "PlanTrip"
        assert isinstance(call.function.parsed_arguments, PlanTrip)


def test_stream_into_a_pydantic_model(api):
    with api.chat.completions.stream(
        model=MODEL, messages=[QUESTION], response_format=Trip, max_completion_tokens=200, seed=1
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Trip)


def test_strict_functions(api):
    """With `auto` a call is optional, but it matches its strict schema."""
    strict = json.loads(json.dumps(WEATHER))
    strict["function"] |= {"strict": True}
    strict["function"]["parameters"]["additionalProperties"] = False
    strict["function"]["parameters"]["properties"]["city"] = {"enum": ["Oslo", "Rome"]}
    reply = api.chat.completions.create(model=MODEL, messages=[QUESTION], tools=[strict], temperature=0)
    (call,) = reply.choices[0].message.tool_calls
    city = json.loads(call.function.arguments)["city"]
    assert city in ("Oslo", "Rome")  # not Paris, which the model would generate


def test_allowed_tools(api):
    for mode in ("auto", "required"):
        choice = {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": mode,
                "tools": [{"type": "function", "function": {"name": "get_time"}}],
            },
        }
        reply = api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What time is it in Rome?"}],
            tools=[WEATHER, TIME],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "get_time"


def test_response_format_with_tools(api):
    """With `response_format` and tools, the model calls a tool or answers in the format."""
    fields = {"model": MODEL, "messages": [QUESTION], "response_format": Trip, "temperature": 0}
    reply = api.chat.completions.parse(**fields, tools=[openai.pydantic_function_tool(PlanTrip)])
    message = reply.choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Trip)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_errors(api, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**{"model": MODEL, "messages": [QUESTION], "tools": [WEATHER], **fields})
    assert caught.value.body["param"] == param
