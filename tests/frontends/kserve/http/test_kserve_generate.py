"""Generate extension: mapping between JSON and tensors, errors and streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from eventually import until
from kserve_backends import Wait

from neso.frontends.kserve.generate import NOT_ONE_RESPONSE, read_generate_request
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import Tensor

GENERATE = "/v2/models/text/generate"
STREAM = "/v2/models/text/generate_stream"


def events(body: bytes) -> list[Any]:
    *parts, rest = body.split(b"\n\n")
    assert rest == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"PROMPT": "hi"}, {"TEXT": "hi"}),
        ({"PROMPT": ["hi"], "STREAM": False}, {"TEXT": "hi"}),
        ({"PROMPT": "hi", "id": "7"}, {"TEXT": "hi", "id": "7"}),
        ({"parameters": {"PROMPT": "nested"}}, {"TEXT": "nested"}),
        (
            {"PROMPT": "hi", "temperature": 0.5, "parameters": {"top_k": 3, "greedy": True, "lora": "x"}},
            {"TEXT": "hi", "temperature": 0.5, "top_k": 3, "greedy": True, "lora": "x"},
        ),
        ({"PROMPT": "hi", "parameters": {}}, {"TEXT": "hi"}),
        ({"PROMPT": 'say "PROMPT": "PROMPT"'}, {"TEXT": 'say "PROMPT": "PROMPT"'}),
        ({"PROMPT": "x", "bytes": 1}, {"TEXT": "\ufffda", "bytes": 1}),
        ({"PROMPT": "x", "flag_only": True}, {"TEXT": "x", "flag_only": True}),
    ],
)
async def test_mapping(client, body, expected) -> None:
    reply = await client.post(GENERATE, body)
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert reply.json == {"model_name": "text", "model_version": "2"} | expected


@pytest.mark.parametrize(
    ("data", "shape"), [([1, 2, 3], [1, 3, 1]), ([1, 2, 3, 4, 5, 6], [1, 3, 2]), ([], [1, 3, 0])]
)
async def test_shapes(core, data, shape) -> None:
    body = json.dumps({"IN": data}).encode()
    tensor = read_generate_request(body, core.model("grid"), "").inputs["IN"]
    assert list(tensor.shape) == shape and tensor.array.ravel().tolist() == data


@pytest.mark.parametrize("data", [7, [1, 2], [1, 2, 3, 4]])
async def test_data_does_not_fit_the_shape(client, data) -> None:
    reply = await client.post("/v2/models/grid/generate", {"IN": data})
    assert reply.error == "The schema can not convert input 'IN' to tensor with proper shape"


async def test_arrays_with_a_variable_batch_dimension(client) -> None:
    reply = await client.post("/v2/models/grid/generate", {"IN": [1, 2, 3]})
    assert reply.json["OUT"] == [1, 2, 3]
    reply = await client.post("/v2/models/strings/generate", {"IN": ["a", "b"]})
    assert reply.json["OUT"] == ["a", "b"]
    reply = await client.post("/v2/models/grid/generate", {"IN": []})
    assert reply.json["OUT"] == []


async def test_reserved_parameters_set_request_fields(client) -> None:
    reply = await client.post("/v2/models/strings/generate", {"IN": "a", "parameters": {"priority": 2}})
    assert reply.json["priority"] == 2
    reply = await client.post("/v2/models/strings/generate", {"IN": "a", "parameters": {"triton_x": 2}})
    assert reply.status == 400 and "reserved" in reply.error


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "failed to parse the request JSON buffer"),
        (b"", "failed to parse the request JSON buffer"),
        ([], "expected a JSON object"),
        ({}, "expected number of inputs between 1 and 3 but got 0"),
        ({"PROMPT": 1}, "attempt to access JSON non-string as string"),
        ({"PROMPT": None}, "attempt to access JSON non-string as string"),
        ({"PROMPT": [["a"]]}, "The schema can not convert input 'PROMPT' to tensor with proper shape"),
        ({"PROMPT": "a", "STREAM": "true"}, "attempt to access JSON non-boolean as boolean"),
        ({"PROMPT": "a", "REPEAT": 1.5}, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"PROMPT": "a", "REPEAT": 2**40}, "out of range for INT32"),
        ({"PROMPT": ["a", "b"]}, "The schema can not convert input 'PROMPT' to tensor with proper shape"),
        ({"PROMPT": []}, "The schema can not convert input 'PROMPT' to tensor with proper shape"),
        ({"PROMPT": "a", "x": {}}, "parameter 'x' has invalid type"),
        ({"PROMPT": "a", "x": [1]}, "parameter 'x' has invalid type"),
        ({"PROMPT": "a", "parameters": 1}, "Expected JSON object for keyword: 'parameters'"),
        (
            {"PROMPT": "a", "parameters": {"nested": {}}},
            "Converting keyword: 'parameters': parameter 'nested' has invalid type.",
        ),
        ({"PROMPT": "a", "id": 1}, "Unable to parse 'id'"),
        (b'{"PROMPT":"a","PROMPT":"b"}', "input 'PROMPT' already exists in request"),
        ({"PROMPT": "a", "parameters": {"PROMPT": "b"}}, "input 'PROMPT' already exists in request"),
    ],
)
async def test_invalid_requests(client, path, body, message) -> None:
    reply = await client.post(path, body)
    assert reply.status == 400 and message in reply.error, reply.body
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [GENERATE, STREAM])
async def test_unknown_model_and_version(client, path) -> None:
    reply = await client.post(path.replace("text", "nobody"), {"PROMPT": "a"})
    assert (reply.status, reply.error) == (404, "Request for unknown model: 'nobody' is not found")
    assert (await client.get(path)).status == 405
    reply = await client.post(path, {"PROMPT": "a"}, Content_Encoding="gzip")
    assert (reply.status, reply.error) == (
        400,
        "Unsupported content-encoding, only 'identity' is supported.",
    )


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"REPEAT": 0}, 200, NOT_ONE_RESPONSE),
        ({"REPEAT": 2}, 200, NOT_ONE_RESPONSE),
        ({"REPEAT": 3, "flag_only": True}, 200, NOT_ONE_RESPONSE),
        ({"fail_at": 0}, 503, "broke at 0"),
        ({"REPEAT": 1, "flag_only": True, "fail_at": 1}, 200, NOT_ONE_RESPONSE),
    ],
)
@pytest.mark.parametrize("model", ["text", "decoupled"])
async def test_generate_requires_exactly_one_response(client, model, body, status, error) -> None:
    reply = await client.post(f"/v2/models/{model}/generate", {"PROMPT": "a"} | body)
    assert (reply.status, reply.error) == (status, error)


async def test_stream(client) -> None:
    reply = await client.post(STREAM, {"PROMPT": "a", "REPEAT": 3, "flag_only": True})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["transfer-encoding"] == "chunked"
    assert (
        events(reply.body)
        == [{"model_name": "text", "model_version": "2", "TEXT": "a", "flag_only": True}] * 3
    )


async def test_stream_errors(client) -> None:
    reply = await client.post(STREAM, {"PROMPT": "a", "REPEAT": 2, "fail_at": 1})
    assert reply.status == 200
    assert [list(event)[-1] for event in events(reply.body)] == ["fail_at", "error"] or events(reply.body)[
        1
    ] == {"error": "broke at 1"}
    reply = await client.post(STREAM, {"PROMPT": "a", "fail_at": 0})
    assert reply.status == 503 and events(reply.body) == [{"error": "broke at 0"}]
    reply = await client.post(STREAM, {"PROMPT": "a", "REPEAT": 0})
    assert reply.status == 200 and reply.body == b""


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
async def test_disconnect_cancels_the_request(front: KServeHttp, endpoint) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    body = b'{"id":"gone","X":1}'
    writer.write(
        b"POST /v2/models/wait/%b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b"
        % (endpoint.encode(), len(body), body)
    )
    await until(lambda: Wait.waiting)
    if endpoint == "generate_stream":  # the first event is sent before the second exists
        five = Tensor.from_numpy("X", np.array([5], np.int32))
        Wait.waiting[0].send(InferenceResponse("wait", "1", outputs=[five]))
        assert b"200" in await reader.readline()
        await asyncio.wait_for(reader.readuntil(b'"X":5}\n\n'), 60)
    writer.close()
    await until(lambda: Wait.cancelled)
    assert Wait.cancelled == ["gone"]
