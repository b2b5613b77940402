"""The Responses API with the `openai` client: whole, streamed, parsed, chained, and in the background."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest
from eventually import wait_until
from pydantic import BaseModel

from neso.generation import SamplingParams

MODEL = "neso-pilot"
QUESTION = "What is in-flight batching?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(params=["openai", "http"])
def api(server, request):
    with openai.OpenAI(base_url=server.url("/v1", request.param), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def one_api(server):
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def slow_api(slow_server):
    with openai.OpenAI(base_url=slow_server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        yield client


def expected(llm, *messages, **params):
    return llm.chat(list(messages), SamplingParams(temperature=0, **params))


def user(text):
    return {"role": "user", "content": text}


def test_text_and_usage(api, llm):
    reply = expected(llm, user(QUESTION))
    response = api.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert response.output_text == reply.text
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.usage.input_tokens == len(reply.prompt_token_ids)
    assert response.usage.output_tokens == len(reply.outputs[0].token_ids)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_client_stream_helper(api, llm):
    response = expected(llm, user(QUESTION))
    with api.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == response.text
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *["created", "in_progress", "output_item.added", "content_part.added"],
        *["output_text.delta"] * deltas,
        *["output_text.done", "content_part.done", "output_item.done", "completed"],
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == response.text


def test_asyncio_client(server, llm):
    async def send_request():
        async with openai.AsyncOpenAI(base_url=server.url("/v1"), api_key="none") as client:
            whole = await client.responses.create(model=MODEL, input=QUESTION, temperature=0)
            async with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
                return whole.output_text, (await stream.get_final_response()).output_text

    response = expected(llm, user(QUESTION)).text
    assert asyncio.run(send_request()) == (response, response)


def test_instructions_become_the_system_message(one_api, llm):
    system = {"role": "system", "content": "Answer in one sentence."}
    reply = expected(llm, system, user("What is TTFT?"))
    response = one_api.responses.create(
        model=MODEL, input="What is TTFT?", instructions=system["content"], temperature=0
    )
    assert response.output_text == reply.text
    assert response.instructions == system["content"]


def test_chained_responses_share_one_conversation(one_api, llm):
    first = one_api.responses.create(model=MODEL, input="What is TTFT?", temperature=0)
    second = one_api.responses.create(
        model=MODEL, input=QUESTION, previous_response_id=first.id, temperature=0, metadata={"turn": "2"}
    )
    assistant = {"role": "assistant", "content": first.output_text}
    assert second.output_text == expected(llm, user("What is TTFT?"), assistant, user(QUESTION)).text
    assert second.previous_response_id == first.id
    assert one_api.responses.retrieve(second.id).metadata == {"turn": "2"}
    items = list(one_api.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    one_api.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        one_api.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


def test_explicit_items_equal_a_chain(one_api, llm):
    first = one_api.responses.create(model=MODEL, input="What is TTFT?", temperature=0, store=False)
    with pytest.raises(openai.NotFoundError):
        one_api.responses.retrieve(first.id)
    items = [user("What is TTFT?"), *first.output, user(QUESTION)]
    second = one_api.responses.create(model=MODEL, input=items, temperature=0)
    assistant = {"role": "assistant", "content": first.output_text}
    assert second.output_text == expected(llm, user("What is TTFT?"), assistant, user(QUESTION)).text


def test_tool_loop(one_api, llm):
    response = one_api.responses.create(
        model=MODEL,
        input="What is the weather in Paris?",
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
    )
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    result = json.dumps({"city": "Paris", "temperature": 21, "condition": "sunny"})
    final = one_api.responses.create(
        model=MODEL,
        previous_response_id=response.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": result}],
        tools=[TOOL],
        temperature=0,
    )
    assert final.output[0].type == "message"
    assert "Paris" in final.output_text


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ],
)
def test_streamed_forced_calls(one_api, choice):
    other = {**TOOL, "name": "get_time"}
    with one_api.responses.stream(
        model=MODEL,
        input="What is the weather in Paris?",
        tools=[other, TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert call.name == "get_weather"
    fragments = [event.delta for event in events if event.type.endswith("arguments.delta")]
    assert "".join(fragments) == call.arguments
    (done,) = (event for event in events if event.type.endswith("arguments.done"))
    assert done.arguments == call.arguments


class Person(BaseModel):
    name: str
    age: int


def test_parsed_into_a_pydantic_model(one_api):
    response = one_api.responses.parse(
        model=MODEL, input="Give me a person.", text_format=Person, temperature=0, max_output_tokens=300
    )
    assert isinstance(response.output_parsed, Person)
    assert response.text.format.type == "json_schema"


def test_json_object_and_extensions(one_api):
    response = one_api.responses.create(
        model=MODEL,
        input="JSON",
        text={"format": {"type": "json_object"}},
        max_output_tokens=300,
        temperature=0,
    )
    if response.status == "completed":
        json.loads(response.output_text)
    response = one_api.responses.create(
        model=MODEL, input="Yes or no?", extra_body={"guided_choice": ["yes", "no"], "top_k": 5, "seed": 1}
    )
    assert response.output_text in ("yes", "no")


def test_incomplete_response(one_api):
    response = one_api.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 4
    events = list(one_api.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs(one_api):
    events = list(
        one_api.responses.create(
            model=MODEL,
            input=QUESTION,
            temperature=0,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
            max_output_tokens=6,
            stream=True,
        )
    )
    reported = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
    part = events[-1].response.output[0].content[0]
    assert [entry.token for entry in reported] == [entry.token for entry in part.logprobs]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_background(one_api, llm):
    queued = one_api.responses.create(model=MODEL, input=QUESTION, temperature=0, background=True)
    assert queued.status == "queued"
    wait_until(lambda: one_api.responses.retrieve(queued.id).status == "completed")
    assert one_api.responses.retrieve(queued.id).output_text == expected(llm, user(QUESTION)).text


def test_background_stream_can_be_resumed(one_api):
    stream = one_api.responses.create(
        model=MODEL, input=QUESTION, temperature=0, background=True, stream=True
    )
    begin = []
    for event in stream:
        begin.append(event)
        if len(begin) == 6:
            break
    stream.close()
    rest = list(one_api.responses.retrieve(begin[0].response.id, stream=True, starting_after=5))
    assert [event.sequence_number for event in rest] == list(range(6, 6 + len(rest)))
    assert rest[-1].type == "response.completed"
    deltas = [event.delta for event in begin + rest if event.type.endswith("text.delta")]
    assert "".join(deltas) == rest[-1].response.output_text


def test_cancel(slow_api, slow_server):
    made = slow_api.responses.create(
        model=MODEL, input=QUESTION, background=True, extra_body={"ignore_eos": True}
    )
    wait_until(lambda: slow_api.responses.retrieve(made.id).status == "in_progress")
    assert slow_api.responses.cancel(made.id).status == "cancelled"
    assert slow_api.responses.retrieve(made.id).status == "cancelled"
    wait_until(lambda: slow_server.gauge("vllm:num_requests_running") == 0)
    done = slow_api.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError):
        slow_api.responses.cancel(done.id)


def test_truncation(one_api):
    long = [user("word " * 900), {"role": "assistant", "content": "I see."}] * 3
    with pytest.raises(openai.BadRequestError) as caught:
        one_api.responses.create(model=MODEL, input=[*long, user(QUESTION)])
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    response = one_api.responses.create(
        model=MODEL, input=[*long, user(QUESTION)], truncation="auto", max_output_tokens=8
    )
    assert 900 < response.usage.input_tokens < 2048


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "friend", "content": "Hi"}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"temperature": 900}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}}, "text.format"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"messages": [user("Hi")]}, "messages"),
        ({"top_k": -5}, "top_k"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "maybe"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_invalid_input(server, fields, param):
    status, body = server.post("/v1/responses", {"model": MODEL, "input": "Hi", **fields}, "openai")
    assert (status, body["error"]["param"]) == (400, param), body
    assert body["error"]["type"] == "invalid_request_error"


def test_unknown_responses_and_models(server):
    for path in ("/v1/responses/resp_no", "/v1/responses/resp_no/input_items"):
        assert server.get(path, "openai")[0] == 404
    assert server.post("/v1/responses/resp_no/cancel", {}, "openai")[0] == 404
    status, body = server.post("/v1/responses", {"model": "nobody", "input": "Hi"}, "openai")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_disconnect_aborts_response(slow_api, slow_server):
    stream = slow_api.responses.create(
        model=MODEL, input=QUESTION, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: slow_server.gauge("vllm:num_requests_running") == 0)


def test_input_tokens(one_api):
    counted = one_api.responses.input_tokens.count(model=MODEL, input=QUESTION)
    made = one_api.responses.create(model=MODEL, input=QUESTION, max_output_tokens=1)
    assert counted.input_tokens == made.usage.input_tokens


def test_pagination_of_input_items(one_api, server):
    made = one_api.responses.create(
        model=MODEL, input=[user(str(number)) for number in range(5)], max_output_tokens=1
    )
    page = one_api.responses.input_items.list(made.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["4", "3"]
    assert page.has_more
    assert [item.content[0].text for item in page] == ["4", "3", "2", "1", "0"]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=msg_no", "after")):
        status, body = server.get(f"/v1/responses/{made.id}/input_items?{query}", "openai")
        assert (status, json.loads(body)["error"]["param"]) == (400, param)


def test_created_and_completed_at(one_api):
    made = one_api.responses.create(model=MODEL, input="Hi", max_output_tokens=100, temperature=0)
    assert time.time() - 60 < made.created_at <= made.completed_at <= time.time()
