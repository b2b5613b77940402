"""Infer over HTTP: every datatype as JSON and binary, and invalid requests."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from eventually import until
from kserve_backends import Wait

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve import http_infer
from neso.frontends.kserve.http_codec import read_infer_request
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server.tensor import DataType

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP32": [1.5, -3],
    "FP64": [0.1, 1e300],
    "BYTES": ["a", "", "ü\u0000z"],
}


def tensor(datatype: str, data: Any, shape: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": f"IN_{datatype}",
        "datatype": datatype,
        "shape": [len(data)] if shape is None else shape,
        "data": data,
        **more,
    }


@pytest.mark.parametrize("datatype", VALUES)
async def test_json_round_trip(client, datatype) -> None:
    body = {"id": "7", "inputs": [tensor(datatype, VALUES[datatype])]}
    reply = await client.post("/v2/models/identity/infer", body)
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert reply.json == {
        "id": "7",
        "model_name": "identity",
        "model_version": "1",
        "outputs": [
            {
                "name": f"OUT_{datatype}",
                "datatype": datatype,
                "shape": [len(VALUES[datatype])],
                "data": VALUES[datatype],
            }
        ],
    }


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", [t.value for t in DataType])
async def test_tritonclient_round_trip(client, datatype, binary) -> None:
    if datatype == "BYTES":
        array = np.array([b"a", b"", "ü".encode()], np.object_)
    else:
        array = np.array([1, 0], DataType(datatype).dtype)
    if datatype in ("FP16", "BF16") and not binary:
        return

    def infer() -> Any:
        client_ = triton.InferenceServerClient(f"127.0.0.1:{client.port}")
        given = triton.InferInput(f"IN_{datatype}", list(array.shape), datatype)
        given.set_data_from_numpy(array, binary_data=binary)
        expected = triton.InferRequestedOutput(f"OUT_{datatype}", binary_data=binary)
        result = client_.infer("identity", [given], outputs=[expected], request_id="r")
        assert result.get_response()["id"] == "r"
        output = result.as_numpy(f"OUT_{datatype}")
        client_.close()
        return output

    output = await asyncio.to_thread(infer)
    assert output.dtype == array.dtype
    if datatype == "BYTES" and not binary:
        assert [str(x) for x in output] == ["a", "", "ü"]
    else:
        assert output.tolist() == array.tolist()


async def test_binary_and_json_tensors_in_one_request(client) -> None:
    blobs = [np.array([1, 2], np.int32).tobytes(), np.array([1.0], ml_dtypes.bfloat16).tobytes()]
    head = (
        b'{"inputs":[{"name":"IN_INT32","datatype":"INT32","shape":[2],"parameters":{"binary_data_size":8}},'
        b'{"name":"IN_BOOL","datatype":"BOOL","shape":[1],"data":[true]},'
        b'{"name":"IN_BF16","datatype":"BF16","shape":[1],"parameters":{"binary_data_size":2}}],'
        b'"parameters":{"binary_data_output":true}}'
    )
    reply = await client.post(
        "/v2/models/identity/infer",
        head + b"".join(blobs),
        Inference_Header_Content_Length=str(len(head)),
    )
    assert reply.status == 200 and reply.headers["content-type"] == "application/octet-stream"
    size = int(reply.headers["inference-header-content-length"])
    assert reply.body[size:] == blobs[0] + b"\x01" + blobs[1]


async def test_requested_outputs_are_json_by_default(client) -> None:
    inputs = [tensor("INT8", [1]), tensor("INT16", [2])]
    outputs = [{"name": "OUT_INT16", "parameters": {"binary_data": False}}]
    body = {"inputs": inputs, "outputs": outputs, "parameters": {"binary_data_output": True}}
    reply = await client.post("/v2/models/identity/infer", body)
    assert [output["name"] for output in reply.json["outputs"]] == ["OUT_INT16"]
    assert reply.json["outputs"][0]["data"] == [2]


async def test_nested_data(client) -> None:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2, 2], "data": [[[1, 2], [3, 4.5]]]}]}
    reply = await client.post("/v2/models/batched/versions/1/infer", body)
    assert reply.json["outputs"][0] == {
        "name": "OUT",
        "datatype": "FP32",
        "shape": [1, 2, 2],
        "data": [1, 2, 3, 4.5],
    }


async def test_nan_and_infinity(client) -> None:
    body = b'{"inputs":[{"name":"IN_FP32","datatype":"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]}]}'
    reply = await client.post("/v2/models/identity/infer", body)
    assert b"NaN" in reply.body
    first, *rest = reply.json["outputs"][0]["data"]
    assert math.isnan(first) and rest == [math.inf, -math.inf]


async def test_empty_tensors(client) -> None:
    reply = await client.post("/v2/models/identity/infer", {"inputs": [tensor("INT32", [])]})
    assert reply.json["outputs"][0]["data"] == []
    body = {"inputs": [tensor("INT32", [])], "parameters": {"binary_data_output": True}}
    reply = await client.post("/v2/models/identity/infer", body)
    assert reply.json["outputs"][0]["parameters"] == {"binary_data_size": 0}


async def test_parameters(client) -> None:
    own = {"i": 1, "f": 1.5, "b": True, "s": "x"}
    fields = {"priority": 3, "timeout": 7, "sequence_id": "s", "sequence_start": True, "sequence_end": True}
    body = {"inputs": [tensor("BOOL", [True])], "parameters": own | fields}
    reply = await client.post("/v2/models/identity/infer", body)
    fields["timeout_us"] = fields.pop("timeout")
    assert reply.json["parameters"] == own | fields


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth + 1):
        value = [value]
    return value


def wrong(change: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    entry = tensor("INT32", [1, 2]) | (change or {})
    return {"inputs": [{k: v for k, v in entry.items() if v is not None}], **more}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "failed to parse the request JSON buffer"),
        (b"{", "failed to parse the request JSON buffer"),
        (b"[]", "expected a JSON object"),
        (b"[" * 100_000, "failed to parse the request JSON buffer"),
        (b'{"x": NaN' + b"[" * 100_000, "failed to parse the request JSON buffer"),
        (b'{"inputs": "\xff"}', "failed to parse the request JSON buffer"),
        ({}, "Unable to parse 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [1]}, "Unable to parse 'inputs'"),
        (wrong(id=7), "Unable to parse 'id'"),
        (wrong({"name": None}), "Unable to parse 'name'"),
        (wrong({"name": 7}), "Unable to parse 'name'"),
        (wrong({"datatype": None}), "Unable to parse 'datatype'"),
        (wrong({"datatype": "INT7"}), "unexpected datatype 'INT7'"),
        (wrong({"shape": None}), "Unable to parse 'shape'"),
        (wrong({"shape": [-1]}), "Unable to parse 'shape'"),
        (wrong({"shape": [True]}), "Unable to parse 'shape'"),
        (wrong({"shape": [3]}), "Shape does not match true shape of 'data' field"),
        (wrong({"shape": [10**18]}), "Shape does not match true shape of 'data' field"),
        (wrong({"data": None}), "But no field is set"),
        (wrong({"data": 1}), "Unable to parse 'data': attempt to access JSON non-array as array"),
        (wrong({"parameters": {"binary_data_size": 8}}), "But set 'data' 'binary_data_size'"),
        (wrong({"data": [1, 2.5]}), "non-signed-integer as signed-integer"),
        (wrong({"data": [1, True]}), "non-signed-integer as signed-integer"),
        (wrong({"data": [1, None]}), "non-signed-integer as signed-integer"),
        (wrong({"data": [1, "2"]}), "non-signed-integer as signed-integer"),
        (wrong({"data": [1, 2**31]}), "out of range for INT32"),
        (wrong({"shape": [1] * 33, "data": [1]}), "it has 33 dimensions, at most 32 are supported"),
        (
            wrong({"shape": [2**4, 2**60 + 2]}),
            "causes total element count to exceed maximum size of 9223372036854775807",
        ),
        (wrong({"shape": [2**2, 2**60 + 2]}), "byte size overflow for input 'IN_INT32'"),
        (wrong({"shape": [0, 2**62], "data": []}), "causes total element count to exceed maximum size"),
        ({"inputs": [tensor("BYTES", [], [0, 2**62])]}, "causes total element count to exceed maximum size"),
        ({"inputs": [tensor("BYTES", ["a", "b"], [3])]}, "Shape does not match true shape of 'data' field"),
        ({"inputs": [tensor("BYTES", ["a", "b"], [1] * 33)]}, "it has 33 dimensions"),
        (b'{"x": NaN, "y": ' + b"1" * 5000 + b"}", "failed to parse the request JSON buffer"),
        (
            wrong({"shape": [1], "data": nested(99, 1)}),
            "JSON nesting depth exceeds maximum allowed limit (100)",
        ),
        (wrong({"data": [[1], [1, 2]]}), "ragged"),
        (wrong({"data": [[1], 2]}), "ragged"),
        (wrong({"data": [1, [2]]}), "ragged"),
        ({"inputs": [tensor("UINT8", [-1])]}, "out of range for UINT8"),
        ({"inputs": [tensor("UINT64", ["1"])]}, "non-unsigned-integer as unsigned-integer"),
        ({"inputs": [tensor("BOOL", [1])]}, "non-boolean as boolean"),
        ({"inputs": [tensor("BYTES", [1])]}, "non-string as string"),
        ({"inputs": [tensor("FP32", ["1"])]}, "non-number as double"),
        ({"inputs": [tensor("FP32", [1e39])]}, "out of range for FP32"),
        ({"inputs": [tensor("FP16", [1.0])]}, "receiving FP16 data via JSON is not supported"),
        ({"inputs": [tensor("BF16", [1.0])]}, "receiving BF16 data via JSON is not supported"),
        (wrong({"name": "NO"}), "unexpected inference input 'NO' for model 'identity'"),
        (wrong({"datatype": "INT64"}), "data-type is 'INT64', but model '"),
        (wrong({"shape": [1, 2]}), "unexpected shape for input 'IN_INT32'"),
        ({"inputs": [tensor("BOOL", [True])] * 2}, "input 'IN_BOOL' already exists in request"),
        (wrong(outputs=[{"name": "NO"}]), "unexpected inference output 'NO' for model 'identity'"),
        (wrong(outputs=[{"name": "OUT_INT32"}] * 2), "output 'OUT_INT32' already exists in request"),
        (wrong(outputs=[{}]), "Unable to parse 'name'"),
        (
            wrong(outputs=[{"name": "OUT_INT32", "parameters": {"binary_data": 1}}]),
            "Unable to parse 'binary_data'",
        ),
        (wrong(parameters=[]), "Unable to parse 'parameters'"),
        (wrong(parameters={"x": {}}), "parameter 'x' has invalid type"),
        (wrong(parameters={"x": None}), "parameter 'x' has invalid type"),
        (wrong(parameters={"triton_x": 1}), "parameter keys starting with 'triton_' are reserved"),
        (wrong(parameters={"headers": "x"}), "reserved"),
        (wrong(parameters={"priority": -1}), "Unable to parse 'priority'"),
        (wrong(parameters={"timeout": "1"}), "Unable to parse 'timeout'"),
        (wrong(parameters={"sequence_id": 1.5}), "Unable to parse 'sequence_id'"),
        (wrong(parameters={"sequence_start": 1}), "Unable to parse 'sequence_start'"),
    ],
)
async def test_invalid_requests(client, body, message) -> None:
    reply = await client.post("/v2/models/identity/infer", body)
    assert (reply.status, message in reply.error) == (400, True), reply.body
    # Model and connection still work.
    assert (
        await client.post("/v2/models/identity/infer", {"inputs": [tensor("BOOL", [True])]})
    ).status == 200


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (b"{}", "3", "inference header size should be in range (0, 2), got: 3"),
        (b"{}", "-1", "inference header size should be in range"),
        (b"{}", "x", "Unable to parse Inference-Header-Content-Length"),
        (b'{"inputs":[]}more', "13", "unexpected additional input data for model 'identity'"),
        (
            b'{"inputs":[{"name":"IN_INT8","datatype":"INT8","shape":[2],"parameters":{"binary_data_size":2}}]}x',
            "97",
            "unexpected size for input 'IN_INT8', expecting 1 additional bytes",
        ),
        (
            b'{"inputs":[{"name":"IN_INT8","datatype":"INT8","shape":[2],"parameters":{"binary_data_size":1}}]}x',
            "97",
            "input byte size mismatch for input 'IN_INT8' for model 'identity'. Expected 2, got 1",
        ),
    ],
)
async def test_invalid_binary_requests(client, body, length, message) -> None:
    reply = await client.post("/v2/models/identity/infer", body, Inference_Header_Content_Length=length)
    assert (reply.status, message in reply.error) == (400, True), reply.body


async def test_unknown_model_and_version(client) -> None:
    body = {"inputs": [tensor("BOOL", [True])]}
    reply = await client.post("/v2/models/nobody/infer", body)
    assert (reply.status, reply.error) == (404, "Request for unknown model: 'nobody' is not found")
    reply = await client.post("/v2/models/identity/versions/7/infer", body)
    assert (reply.status, reply.error) == (
        404,
        "Request for unknown model: 'identity' version 7 is not found",
    )
    assert (await client.post("/v2/models/identity/versions/x/infer", body)).status == 404
    assert (await client.get("/v2/models/identity/infer")).error == "Method Not Allowed"
    reply = await client.post("/v2/models/decoupled/infer", body)
    assert reply.error == "HTTP end point doesn't support models with decoupled transaction policy"
    reply = await client.post("/v2/models/identity/infer", body, Content_Encoding="br")
    assert (reply.status, reply.error) == (501, "Unsupported compression type")
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 1}
    entry = {"name": "IN_BOOL", "datatype": "BOOL", "shape": [1], "parameters": shared}
    assert (await client.post("/v2/models/identity/infer", {"inputs": [entry]})).status == 501
    body["outputs"] = [{"name": "OUT_BOOL", "parameters": {"classification": 2}}]
    reply = await client.post("/v2/models/identity/infer", body)
    assert reply.status == 400 and "unsupported type 'BOOL'" in reply.error


async def test_outputs_not_representable_in_json(client) -> None:
    head = (
        b'{"inputs":[{"name":"IN_FP16","datatype":"FP16","shape":[1],"parameters":{"binary_data_size":2}}]}'
    )
    reply = await client.post(
        "/v2/models/identity/infer", head + b"\0\0", Inference_Header_Content_Length=str(len(head))
    )
    assert reply.status == 400 and "sending FP16 data via JSON is not supported" in reply.error
    head = (
        b'{"inputs":[{"name":"IN_BYTES","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":5}}]}'
    )
    reply = await client.post(
        "/v2/models/identity/infer",
        head + b"\1\0\0\0\xff",
        Inference_Header_Content_Length=str(len(head)),
    )
    assert reply.status == 400 and "not UTF-8" in reply.error


async def test_raw_binary_requests(client) -> None:
    async def post(model: str, body: bytes) -> Any:
        return await client.post(f"/v2/models/{model}/infer", body, Inference_Header_Content_Length="0")

    data = np.arange(6, dtype=np.float32).tobytes()
    reply = await post("batched", data)
    size = int(reply.headers["inference-header-content-length"])
    assert b'"shape":[1,2,3]' in reply.body[:size] and reply.body[size:] == data
    reply = await post("strings", b"hello")
    assert reply.body.endswith(b"\5\0\0\0hello")
    reply = await post("any_strings", b"hello")
    assert reply.status == 400
    assert reply.error == "For BYTE datatype raw input 'IN', the model must have input shape [1]"
    assert "Raw request must only have 1 input" in (await post("identity", data)).error
    assert "more than one variable-sized dimension" in (await post("grid", data)).error
    assert (await post("batched", data[:-1])).status == 400


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "request JSON size of 1048577 bytes exceeds the maximum allowed input size of 1048576 bytes."),
        (
            {"Inference_Header_Content_Length": "0"},
            "Raw input has a byte_size (1048577 bytes) that exceeds the maximum allowed value of 1048576 bytes.",
        ),
    ],
)
async def test_body_size_limit(client, headers, message) -> None:
    reply = await client.post("/v2/models/identity/infer", bytes((1 << 20) + 1), **headers)
    assert reply.status == 400
    assert reply.error == f"{message} Use --http-max-input-size to increase the limit."


async def test_large_json_is_parsed_in_a_thread(client, monkeypatch) -> None:
    threads = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return read_infer_request(*arguments)

    monkeypatch.setattr(http_infer, "read_infer_request", noted)
    monkeypatch.setattr(http_infer, "LARGE_JSON", 1000)
    for count in (10, 1000):
        reply = await client.post(
            "/v2/models/identity/infer", {"inputs": [tensor("INT32", [[1]] * count, [count])]}
        )
        assert reply.json["outputs"][0]["data"] == [1] * count
    assert threads[0] is threading.main_thread() is not threads[1]
    threads.clear()
    for count in (10, 1000):
        body = json.dumps({"inputs": [tensor("INT32", [[1]] * count, [count])]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(body))}
        await client.post("/v2/models/identity/infer", body + bytes(1000), **headers)
    assert threads[0] is threading.main_thread() is not threads[1]


async def test_number_of_members_is_limited(client) -> None:
    many = {f"p{number}": 1 for number in range(10_001)}
    body = {"inputs": [tensor("BOOL", [True])]}
    reply = await client.post("/v2/models/identity/infer", {**body, "parameters": many})
    assert (reply.status, reply.error) == (400, "'parameters' has 10001 members, at most 10000 are supported")


async def test_number_of_json_values_is_limited(core, connect) -> None:
    front = KServeHttp(core, HttpOptions("127.0.0.1", 0, max_json_values=40))
    await front.start()
    client = connect(front.port)
    try:
        for count, status in ((8, 200), (100, 400)):
            lists = {"inputs": [tensor("INT32", [[1]] * count, [count]), tensor("BYTES", ["[{,\\"])]}
            reply = await client.post("/v2/models/identity/infer", lists)
            assert reply.status == status, reply.body
        assert "more than 40 values" in reply.error
        numbers = {"inputs": [tensor("FP32", [float("nan")] * 100)]}  # without limit: read in native code
        assert (await client.post("/v2/models/identity/infer", json.dumps(numbers).encode())).status == 200
        numbers["outputs"] = [{"name": "OUT_FP32", "parameters": {"classification": 1}}]
        by_name = json.dumps(numbers, sort_keys=True).encode()  # the data comes before datatype and shape
        reply = await client.post("/v2/models/identity/infer", by_name)
        assert reply.status == 200 and len(reply.json["outputs"][0]["data"]) == 1, reply.body
    finally:
        await front.stop(1.0)


async def test_number_of_values_of_other_bodies_is_limited(client) -> None:
    body = b'{"x":[' + b"1," * 100_001 + b"1]}"
    for path in ("/v2/logging", "/v2/models/identity/generate", "/v2/repository/models/identity/load"):
        reply = await client.post(path, body)
        assert (reply.status, "more than 100000 values" in reply.error) == (400, True), path


async def test_lists_of_the_maximum_depth(client) -> None:
    body = {"inputs": [tensor("INT32", nested(98, 1), [1])]}
    assert (await client.post("/v2/models/identity/infer", body)).status == 200


async def test_large_empty_binary_tensor_is_rejected(client) -> None:
    head = (
        b'{"inputs":[{"name":"IN_INT8","datatype":"INT8","shape":[0,4611686018427387904],'
        b'"parameters":{"binary_data_size":0}}]}'
    )
    length = str(len(head))
    reply = await client.post("/v2/models/identity/infer", head, Inference_Header_Content_Length=length)
    assert reply.status == 400 and "input 'IN_INT8'" in reply.error


async def test_disconnect_cancels_the_request(front: KServeHttp) -> None:
    body = b'{"id":"gone","inputs":[{"name":"X","datatype":"INT32","shape":[1],"data":[1]}]}'
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(
        b"POST /v2/models/wait/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: Wait.waiting)
    writer.close()
    await until(lambda: Wait.cancelled)
    assert Wait.cancelled == ["gone"]


async def test_response_without_outputs(client) -> None:
    reply = await client.post("/v2/models/identity/infer", {"inputs": []})
    assert reply.status == 200 and reply.json["outputs"] == []


@pytest.mark.parametrize("value", ["\xb2", "9" * 5000, "--1", "1_0"])
async def test_invalid_header_lengths(client, value) -> None:
    headers = {"Inference-Header-Content-Length": value}
    reply = await client.request("POST", "/v2/models/identity/infer", b"{}", headers)
    assert reply.status == 400 and "Unable to parse Inference-Header-Content-Length" in reply.error


async def test_version_with_thousands_of_digits(client) -> None:
    reply = await client.post(f"/v2/models/identity/versions/{'9' * 5000}/infer", {"inputs": []})
    assert reply.status == 400 and "version should be an integral value" in reply.error
