"""Trace activities of requests over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "server" / "tracing"))

from trace_reader import ReadTrace, check_order, read_traces

from neso.server.tracing import TraceConfig, Tracing

FRONTEND = (
    "HTTP_RECV_START",
    "HTTP_RECV_END",
    "INFER_RESPONSE_COMPLETE",
    "HTTP_SEND_START",
    "HTTP_SEND_END",
)


@pytest.fixture
async def written(core, tmp_path):
    """Trace every request. `await written()` stops tracing and returns the traces."""
    settings = [f"triton,file={tmp_path}/trace.json", "rate=1", "level=TIMESTAMPS"]
    tracing = core.tracing = Tracing(TraceConfig.parse(settings))

    async def written() -> list[ReadTrace]:
        await tracing.close()
        path = tmp_path / "trace.json"
        return read_traces(path) if path.exists() else []

    return written


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
