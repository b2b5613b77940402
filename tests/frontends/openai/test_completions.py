"""`POST /v1/completions`: prompts, choices, echo, log probabilities, usage."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_client import AsgiClient
from scripted_model import ScriptedModel

from neso.generation import FinishReason

PATH = "/v1/completions"


async def complete(client: AsgiClient, **fields: Any) -> Any:
    response = await client.post(PATH, {"model": "scripted", "prompt": "the fox", **fields})
    assert response.status == 200, response.body
    return response.json()


async def test_response_format(client: AsgiClient, script: ScriptedModel) -> None:
    response = await client.post(PATH, {"model": "scripted", "prompt": "the fox"})
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "scripted",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "text": "hello there",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    (request,) = script.requests
    assert request.sampling.max_tokens == 16
    assert request.add_special_tokens
    assert script.ended == [request.request_id]


async def test_length_limit(client: AsgiClient) -> None:
    body = await complete(client, max_tokens=1)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"] == "hello"


async def test_stop_string(client: AsgiClient) -> None:
    choice = (await complete(client, stop=" th"))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", " th")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([70, 71], [[70, 71]]),
        ([[70], [71, 72]], [[70], [71, 72]]),
    ],
)
async def test_prompt_types(
    client: AsgiClient, script: ScriptedModel, prompt: Any, expected: list[Any]
) -> None:
    body = await complete(client, prompt=prompt)
    assert [request.prompt for request in script.requests] == expected
    assert len(body["choices"]) == len(expected)


async def test_choices_of_several_prompts(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: f"{request.prompt}{choice}"
    body = await complete(client, prompt=["a", "b", "c"], n=2)
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 3 * 2
    assert body["usage"]["completion_tokens"] == 6 * 3
    assert len({request.request_id for request in script.requests}) == 3


async def test_logprobs(client: AsgiClient) -> None:
    logprobs = (await complete(client, logprobs=1))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["hello", " there", "</s>"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"`": -0.25, token: -0.5} for token in ("hello", " there", "</s>")],
        "text_offset": [0, 5, 11],
    }


async def test_minus_infinity_is_reported_as_a_number(client: AsgiClient) -> None:
    top = (await complete(client, logprobs=3))["choices"][0]["logprobs"]["top_logprobs"]
    assert top[0]["z"] == -9999.0


async def test_echo(client: AsgiClient) -> None:
    assert (await complete(client, echo=True))["choices"][0]["text"] == "the foxhello there"
    assert (await complete(client, echo=True, prompt=[70, 71]))["choices"][0]["text"] == "efhello there"


async def test_echo_with_prompt_logprobs(client: AsgiClient) -> None:
    for choice in (await complete(client, echo=True, logprobs=0, n=2))["choices"]:
        assert choice["logprobs"] == {
            "tokens": ["<s>", "the", " fox", "hello", " there", "</s>"],
            "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5, -0.5],
            "top_logprobs": [None, {"the": -0.5}, {" fox": -0.5}]
            + [{token: -0.5} for token in ("hello", " there", "</s>")],
            "text_offset": [0, 0, 3, 7, 12, 18],
        }


async def test_echo_with_max_tokens_0(client: AsgiClient) -> None:
    body = await complete(client, echo=True, logprobs=0, max_tokens=0)
    (choice,) = body["choices"]
    assert choice["text"] == "the fox"
    assert choice["logprobs"]["tokens"] == ["<s>", "the", " fox"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "parameters", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"stop": ["ere"]}]
)
async def test_stream_equals_whole_response(client: AsgiClient, parameters: dict[str, Any]) -> None:
    fields = {"prompt": ["a", "the fox"], "n": 2, **parameters}
    whole = await complete(client, **fields)
    response = await client.post(PATH, {"model": "scripted", "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = response.events()
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for c in mine for value in c["logprobs"][name]] == values


async def test_usage_at_the_end_of_a_stream(client: AsgiClient) -> None:
    fields = {"model": "scripted", "prompt": ["a", "b"], "stream": True}
    response = await client.post(PATH, {**fields, "stream_options": {"include_usage": True}})
    *chunks, last, _ = response.events()
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 2 * (2 + 3)


async def test_usage_in_every_chunk(client: AsgiClient) -> None:
    response = await client.post(
        PATH,
        {
            "model": "scripted",
            "prompt": "a",
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        },
    )
    chunks = response.events()[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_characters_are_not_split(client: AsgiClient, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: "héé☃"
    response = await client.post(PATH, {"model": "scripted", "prompt": "a", "stream": True})
    texts = [chunk["choices"][0]["text"] for chunk in response.events()[:-1]]
    assert [text for text in texts if text] == ["h", "é", "é", "☃"]


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
async def test_failed_sequence(
    client: AsgiClient, script: ScriptedModel, reason: FinishReason, status: int
) -> None:
    script.final_reason = reason
    response = await client.post(PATH, {"model": "scripted", "prompt": "a"})
    assert response.status == status
    streamed = await client.post(PATH, {"model": "scripted", "prompt": "a", "stream": True})
    assert streamed.status == 200
    assert streamed.complete
    assert streamed.events()[-1]["error"] == response.json()["error"]


async def test_stream_has_a_chunk_for_each_step(client: AsgiClient, script: ScriptedModel) -> None:
    """Also for steps whose text is held back, here because it is a part of a character."""
    script.reply = lambda request, choice: "hello 🦊 there"
    fields = {"model": "scripted", "prompt": "the fox", "stream": True}
    response = await client.post(PATH, {**fields, "stream_options": {"include_usage": True}})
    *chunks, last, done = response.events()
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == last["usage"]["completion_tokens"] and texts.count("") > 2
    assert "".join(texts) == "hello 🦊 there" and done == "[DONE]"
