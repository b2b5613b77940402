"""`POST /v1/responses` on a scripted model: prompts, events, storage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_client import AsgiClient, AsgiResponse
from scripted_model import ScriptedModel
from starlette.applications import Starlette

from neso.frontends.openai import OpenAIOptions, create_app
from neso.frontends.openai.access import AccessOptions, ApiKeys
from neso.generation import FinishReason, SamplingDefaults
from neso.server.core import Core
from neso.server.errors import Unavailable

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "hi", **fields}


def sent_events(response: AsgiResponse) -> list[dict[str, Any]]:
    """Return the events of a stream; check that each event's name is its type."""
    events = []
    for block in response.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


async def test_text_around_calls_becomes_items(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: f"Let me see.\n{CALL}\n{CALL}"
    response = (await client.post(PATH, body(tools=[WEATHER]))).json()
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert response["output"][0]["content"][0]["text"] == "Let me see."
    first, second = response["output"][1:]
    assert (first["name"], first["arguments"]) == ("weather", '{"city": "Paris"}')
    assert first["call_id"] != second["call_id"]


async def test_parallel_tool_calls_false_keeps_the_first_call(
    client: AsgiClient, script: ScriptedModel
) -> None:
    script.reply = lambda request, choice: f"{CALL}\n{CALL}"
    response = (await client.post(PATH, body(tools=[WEATHER], parallel_tool_calls=False))).json()
    assert [item["type"] for item in response["output"]] == ["function_call"]


async def test_generation_stops_after_a_cut_off_call(core: Core, script: ScriptedModel) -> None:
    client = AsgiClient(create_app(core, OpenAIOptions(max_tool_call_parse_bytes=200)))
    endless = CALL.replace("Paris", "Paris" * 300)
    script.reply = lambda request, choice: endless
    events = sent_events(await client.post(PATH, body(tools=[WEATHER], stream=True)))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] < len(endless) / 5
    assert len(script.aborted) == 1


async def test_function_call_events(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: "So:\n" + CALL
    events = sent_events(await client.post(PATH, body(tools=[WEATHER], stream=True)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    begin = kinds.index("output_text.done")
    assert kinds[begin : begin + 4] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["type"]) for event in added] == [
        (0, "message"),
        (1, "function_call"),
    ]
    assert added[1]["item"]["arguments"] == ""
    assert {event["item_id"] for event in events if "arguments" in event["type"]} == {added[1]["item"]["id"]}


async def test_items_are_converted_to_chat_messages(client: AsgiClient, script: ScriptedModel) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
    ]
    await client.post(PATH, body(input=items, instructions="You know the weather."))
    prompt = script.requests[0].prompt
    assert isinstance(prompt, str)
    lines = prompt.split("\n")
    assert '"You know the weather."' in lines[0] and '"system"' in lines[0]
    assert '"Be brief."' in lines[1] and '"system"' in lines[1]
    assert len(lines) == 7  # one assistant turn, and the start of the next
    for part in ('"Hm."', '"I look."', '"c1"', '"c2"'):
        assert part in lines[3]
    assert '"sunny"' in lines[4] and '"tool"' in lines[4]
    assert '"wet"' in lines[5]


async def test_assistant_turns_stay_separate_messages(client: AsgiClient, script: ScriptedModel) -> None:
    messages = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    await client.post(PATH, body(input=[{"role": "user", "content": "Hi"}, *messages]))
    assert str(script.requests[0].prompt).count('"assistant"') == 2


async def test_instructions_are_not_inherited(client: AsgiClient, script: ScriptedModel) -> None:
    first = (await client.post(PATH, body(instructions="Sing."))).json()
    await client.post(PATH, body(previous_response_id=first["id"]))
    assert "Sing." in str(script.requests[0].prompt)
    assert "Sing." not in str(script.requests[1].prompt)


async def test_response_repeats_request_fields(client: AsgiClient) -> None:
    response = (
        await client.post(
            PATH,
            body(
                tools=[WEATHER],
                tool_choice={
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "weather"}],
                },
                text={"format": {"type": "text"}, "verbosity": "low"},
                reasoning={"effort": "low"},
                metadata={"a": "b"},
                temperature=0.5,
                max_output_tokens=50,
            ),
        )
    ).json()
    assert response["tools"] == [{**WEATHER, "strict": None}]
    assert response["tool_choice"]["mode"] == "auto"
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.5, 1.0, 50)
    assert response["metadata"] == {"a": "b"}


async def test_error_in_a_stream_is_a_failed_event(client: AsgiClient, script: ScriptedModel) -> None:
    script.error, script.fail_after = Unavailable("it died"), 1
    events = sent_events(await client.post(PATH, body(stream=True)))
    failed = events[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "it died"}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert (await client.get(f"{PATH}/{failed['response']['id']}")).json()["status"] == "failed"


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
async def test_error_of_a_whole_response_is_a_status(
    client: AsgiClient, script: ScriptedModel, reason: FinishReason, status: int
) -> None:
    script.final_reason = reason
    assert (await client.post(PATH, body())).status == status


async def test_error_before_the_first_event_is_a_status(client: AsgiClient, script: ScriptedModel) -> None:
    script.error = Unavailable("it died")
    assert (await client.post(PATH, body(stream=True))).status == 503


async def test_error_in_the_background_is_stored(client: AsgiClient, script: ScriptedModel) -> None:
    script.error = Unavailable("it died")
    made = (await client.post(PATH, body(background=True))).json()
    for _ in range(20):
        await asyncio.sleep(0)
    kept = (await client.get(f"{PATH}/{made['id']}")).json()
    assert (kept["status"], kept["error"]["message"]) == ("failed", "it died")


async def test_disconnect_aborts_generation(client: AsgiClient, script: ScriptedModel) -> None:
    script.hold = True
    await client.post(PATH, body(stream=True), disconnect_after=1)
    assert len(script.aborted) == 1


async def test_disconnect_does_not_cancel_background_responses(
    client: AsgiClient, script: ScriptedModel
) -> None:
    response = await client.post(PATH, body(background=True, stream=True), disconnect_after=1)
    for _ in range(40):
        await asyncio.sleep(0)
    assert script.aborted == []
    made = sent_events(response)[0]["response"]["id"]
    assert (await client.get(f"{PATH}/{made}")).json()["status"] == "completed"


async def test_delete_cancels_a_response_in_progress(client: AsgiClient, script: ScriptedModel) -> None:
    script.hold = True
    made = (await client.post(PATH, body(background=True))).json()["id"]
    await asyncio.sleep(0.01)
    assert (await client.request("DELETE", f"{PATH}/{made}")).json()["deleted"] is True
    assert len(script.aborted) == 1
    assert (await client.get(f"{PATH}/{made}")).status == 404


async def test_response_in_progress_cannot_be_continued(client: AsgiClient, script: ScriptedModel) -> None:
    script.hold = True
    made = (await client.post(PATH, body(background=True))).json()["id"]
    response = await client.post(PATH, body(previous_response_id=made))
    assert (response.status, response.json()["error"]["param"]) == (400, "previous_response_id")
    await client.post(f"{PATH}/{made}/cancel", {})


async def test_cancel_before_the_task_starts(
    client: AsgiClient, app: Starlette, script: ScriptedModel
) -> None:
    """The stream ends too, although the task never started."""
    requested = asyncio.ensure_future(client.post(PATH, body(background=True, stream=True)))
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)
    response = await asyncio.wait_for(requested, 60)
    assert response.status == 200
    assert response.complete


async def test_background_requires_a_store(core: Core) -> None:
    client = AsgiClient(create_app(core, OpenAIOptions(max_stored_responses=0)))
    response = await client.post(PATH, body(background=True))
    assert (response.status, response.json()["error"]["param"]) == (400, "background")
    made = (await client.post(PATH, body())).json()["id"]
    assert (await client.get(f"{PATH}/{made}")).status == 404


async def test_least_recently_used_response_is_evicted(core: Core) -> None:
    app: Starlette = create_app(core, OpenAIOptions(max_stored_responses=2))
    client = AsgiClient(app)
    made = [(await client.post(PATH, body())).json()["id"] for _ in range(2)]
    await client.get(f"{PATH}/{made[0]}")  # marks it as the most recently used
    made.append((await client.post(PATH, body())).json()["id"])
    assert [(await client.get(f"{PATH}/{name}")).status for name in made] == [200, 404, 200]


async def test_store_size_is_limited(core: Core) -> None:
    client = AsgiClient(create_app(core, OpenAIOptions(max_stored_response_bytes=4000)))
    made = [(await client.post(PATH, body(input="x" * 500))).json()["id"] for _ in range(3)]
    statuses = [(await client.get(f"{PATH}/{name}")).status for name in made]
    assert statuses[0] == 404 and statuses[-1] == 200


async def test_response_is_accessible_only_with_its_key(core: Core) -> None:
    access = AccessOptions(keys=ApiKeys(["mine", "yours"]))
    client = AsgiClient(create_app(core, OpenAIOptions(access=access)))
    mine, yours = (((b"authorization", f"Bearer {key}".encode()),) for key in ("mine", "yours"))
    made = (await client.post(PATH, body(), headers=mine)).json()["id"]
    for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        response = await client.request(method, f"{PATH}/{made}{path}", b"", headers=yours)
        assert response.status == 404
    assert (await client.post(PATH, body(previous_response_id=made), headers=yours)).status == 400
    assert (await client.post(PATH, body(previous_response_id=made), headers=mine)).status == 200
    assert (await client.request("GET", f"{PATH}/{made}", b"", headers=mine)).status == 200


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
async def test_large_integers_are_returned(client: AsgiClient, how: dict[str, Any]) -> None:
    large = 10**30
    tool = {**WEATHER, "parameters": {"type": "object", "properties": {"n": {"maximum": large}}}}
    response = await client.post(
        PATH, body(input=[{"role": "user", "content": "hi", "n": large}], tools=[tool], **how)
    )
    assert response.status == 200
    made = sent_events(response)[-1]["response"] if "stream" in how else json.loads(response.body)
    assert made["tools"][0]["parameters"]["properties"]["n"]["maximum"] == large
    items = json.loads((await client.get(f"{PATH}/{made['id']}/input_items")).body)["data"]
    assert items[0]["n"] == large


async def test_images_are_passed_to_the_model(client: AsgiClient, script: ScriptedModel) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": pixel}]
    await client.post(PATH, body(input=[{"role": "user", "content": content}]))
    assert script.requests[0].images == (pixel,)


async def test_logprobs_exclude_reasoning_and_calls(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: "hello"
    response = (
        await client.post(PATH, body(include=["message.output_text.logprobs"], top_logprobs=1))
    ).json()
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert logprobs[0]["token"] == "hello"
    assert logprobs[0]["bytes"] == list(b"hello")
    assert len(logprobs[0]["top_logprobs"]) == 1


async def test_empty_output_is_an_empty_message(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: ""
    response = (await client.post(PATH, body())).json()
    assert response["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("defaults", "requested", "room"),
    [
        ({}, None, 250),
        ({}, 100, 100),
        ({}, 900, 500),
        ({"max_new_tokens": 400}, None, 400),
        ({"max_new_tokens": 400}, 100, 100),
        ({"max_new_tokens": 30, "limits_tokens": True}, None, 30),
        ({"max_new_tokens": 30, "limits_tokens": True}, 900, 30),
    ],
)
async def test_truncation_leaves_room_for_max_output_tokens(
    client: AsgiClient, script: ScriptedModel, defaults: dict[str, Any], requested: int | None, room: int
) -> None:
    script.default_sampling = SamplingDefaults(**defaults)
    turns = [{"role": "user", "content": "hello"}] * 60
    turn = len(script.text.encode(json.dumps(turns[0]) + "\n"))
    request = body(input=turns, truncation="auto", max_output_tokens=requested)
    assert (await client.post(PATH, request)).status == 200
    kept = len(script.text.encode(str(script.requests[-1].prompt), add_special_tokens=False))
    assert script.max_model_len - room - turn < kept <= script.max_model_len - room
