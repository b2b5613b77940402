"""Trace activities of requests over HTTP."""

from __future__ import annotations

import pytest
from trace_reader import check_order

FRONTEND = (
    "HTTP_RECV_START",
    "HTTP_RECV_END",
    "INFER_RESPONSE_COMPLETE",
    "HTTP_SEND_START",
    "HTTP_SEND_END",
)


INFER = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2, 1], "data": [1, 2]}]}


async def test_infer(written, client):
    for headers in ({}, {"Accept-Encoding": "gzip"}):
        assert (await client.post("/v2/models/batched/infer", INFER | {"id": "i"}, **headers)).status == 200
    traces = await written()
    assert [(trace.model, trace.request_id) for trace in traces] == [("batched", "i")] * 2
    for trace in traces:
        assert set(FRONTEND) <= trace.timestamps.keys()
        check_order(trace.timestamps)


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
async def test_generate(written, client, endpoint):
    reply = await client.post(
        f"/v2/models/decoupled/{endpoint}", {"PROMPT": "p", "STREAM": True, "REPEAT": 1}
    )
    assert reply.status == 200
    (trace,) = await written()
    assert trace.model == "decoupled" and set(FRONTEND) <= trace.timestamps.keys()


async def test_requests_to_unknown_models_are_not_traced(written, client):
    assert (await client.post("/v2/models/batched/infer", {"inputs": []})).status == 400
    assert (await client.post("/v2/models/batched/infer", b"{")).status == 400
    assert (await client.post("/v2/models/decoupled/infer", INFER)).status == 501
    assert (await client.post("/v2/models/nobody/infer", INFER)).status == 404
    assert (await client.post("/v2/models/batched/infer", INFER)).status == 200
    assert [trace.model for trace in await written()] == ["batched"]


async def test_other_requests_are_not_traced(written, client, core):
    assert (await client.get("/v2/models/batched/stats")).status == 200
    core.tracing.update({"trace_level": ["OFF"]})
    assert (await client.post("/v2/models/batched/infer", INFER)).status == 200
    assert await written() == []
