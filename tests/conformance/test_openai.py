"""The OpenAI API with the `openai` client, synchronous, asyncio and streaming, on both ports."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from eventually import wait_until

from neso.generation import SamplingParams

MODEL = "neso-pilot"
QUESTION = "What is in-flight batching?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=["openai", "http"])
def api(server, request):
    with openai.OpenAI(base_url=server.url("/v1", request.param), api_key="none", max_retries=0) as client:
        yield client


def chat_answer(llm, **params):
    return llm.chat(MESSAGES, SamplingParams(**{"temperature": 0, **params}))


def test_models(api):
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).object == "model"


def test_completion(api, llm):
    (expected,) = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=300), progress=False)
    reply = api.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=300)
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert reply.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_completion_length_logprobs_and_n(api):
    reply = api.completions.create(
        model=MODEL, prompt=[QUESTION, "Hello"], n=2, max_tokens=4, temperature=0.8, seed=3, logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in reply.choices} <= {"length", "stop"}
    first = reply.choices[0].logprobs
    assert len(first.tokens) == len(first.token_logprobs) == len(first.top_logprobs)


def test_chat(api, llm):
    expected = chat_answer(llm)
    reply = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"


def test_chat_stream_with_usage(api, llm):
    expected = chat_answer(llm)
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(
        expected.outputs[0].token_ids
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_stream_stops_at_max_tokens(api):
    chunks = list(
        api.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=5, stream=True)
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) <= 5


def test_raw_stream_ends_with_done(server):
    import urllib.request

    import orjson

    body = orjson.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True})
    request = urllib.request.Request(
        server.url("/v1/completions", "openai"), body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_chat_logprobs(api):
    reply = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 4
    assert all(
        entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3 for entry in content
    )


def test_concurrent_requests_of_the_asyncio_client(server, llm):
    expected = chat_answer(llm).text

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, temperature=0, stream=True
                )
                return "".join(
                    [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
                )

            return await asyncio.gather(*(one() for _ in range(8)))

    assert asyncio.run(run()) == [expected] * 8


def test_disconnect_cancels_stream(slow_server):
    server = slow_server
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none") as client:
        stream = client.completions.create(
            model=MODEL, prompt=QUESTION, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        wait_until(lambda: server.gauge("vllm:num_requests_running"))
        stream.close()
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)


def test_disconnect_cancels_unary_request(slow_server):
    server = slow_server
    with (
        openai.OpenAI(
            base_url=server.url("/v1", "openai"), api_key="none", max_retries=0, timeout=0.3
        ) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.completions.create(
            model=MODEL, prompt=QUESTION, max_tokens=1900, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": -4}, 400, "max_tokens"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
        ({"n": 0}, 400, "n"),
        ({"top_p": 7}, 400, "top_p"),
    ],
)
def test_errors_have_openai_format(api, change, status, param):
    with pytest.raises(openai.APIStatusError) as caught:
        api.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **change})
    assert caught.value.status_code == status
    assert caught.value.body["param"] == param
    assert caught.value.body["message"] and caught.value.body["type"]


def test_tool_call(api):
    tools = [
        {
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
    ]
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    reply = api.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=0)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, call.function.arguments.replace(" ", "")) == (
        "get_weather",
        '{"city":"Paris"}',
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_response_format(api):
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    reply = api.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, n=3)
    for choice in reply.choices:
        trip = json.loads(choice.message.content)
        assert trip["city"] in ("Paris", "Rome") and 1 <= trip["days"] <= 9
        assert choice.finish_reason == "stop"
    reply = api.completions.create(
        model=MODEL, prompt="Yes or no?", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert reply.choices[0].text in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "plan_trip"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_call(api, choice, stream):
    tools = [
        {"type": "function", "function": {"name": "plan_trip", "parameters": SCHEMA}},
        {
            "type": "function",
            "function": {"name": "say", "parameters": {"type": "object", "maxProperties": 0}},
        },
    ]
    reply = api.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=tools[:1] if choice == "required" else tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        stream=stream,
    )
    if stream:
        deltas = [chunk.choices[0] for chunk in reply if chunk.choices]
        calls = [call.function for delta in deltas for call in delta.delta.tool_calls or ()]
        name, reason = calls[0].name, deltas[-1].finish_reason
        arguments = "".join(call.arguments or "" for call in calls)
    else:
        (call,) = reply.choices[0].message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, reply.choices[0].finish_reason
    assert (name, reason) == ("plan_trip", "tool_calls" if choice == "required" else "stop")
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_invalid_schema_has_status_400(api):
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "strin"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, stream=stream)
        assert caught.value.body["param"] == "response_format"
        assert "strin" in caught.value.body["message"]
