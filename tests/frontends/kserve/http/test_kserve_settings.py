"""The trace and logging extensions over HTTP."""

from __future__ import annotations

import asyncio

import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio

from neso.server.tracing import TraceConfig, Tracing


@pytest.fixture
async def traced(core, tmp_path):
    """Tracing to a file."""
    core.tracing = Tracing(TraceConfig.parse([f"triton,file={tmp_path}/trace.json", "rate=6"]))
    return core


async def test_trace_settings(traced, client, tmp_path):
    settings = {
        "trace_level": ["OFF"],
        "trace_rate": "6",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": f"{tmp_path}/trace.json",
        "trace_mode": "triton",
    }
    for path in ("/v2", "/v2/models/text", "/v2/models/text/versions/1"):
        assert (await client.get(f"{path}/trace/setting")).json == settings
    reply = await client.post(
        "/v2/models/text/trace/setting", {"trace_level": ["TIMESTAMPS"], "log_frequency": "2"}
    )
    assert reply.json == settings | {"trace_level": ["TIMESTAMPS"], "log_frequency": "2"}
    assert (await client.get("/v2/trace/setting")).json == settings
    assert (await client.post("/v2/trace/setting", {"trace_rate": "2"})).json["trace_rate"] == "2"
    assert (await client.get("/v2/models/text/trace/setting")).json["trace_rate"] == "2"
    cleared = await client.post("/v2/models/text/trace/setting", {"trace_level": None, "log_frequency": None})
    assert cleared.json == settings | {"trace_rate": "2"}
    assert (await client.post("/v2/trace/setting", {"trace_rate": None})).json == settings
    assert (await client.post("/v2/trace/setting", {})).json == settings


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2", {"trace_file": "x"}, 501, "trace file location can not be updated through network protocol"),
        ("/v2", {"trace_file": None}, 501, "trace file location can not be updated through network protocol"),
        ("/v2/models/nobody", {}, 400, "Request for unknown model : nobody"),
        (
            "/v2",
            {"trace_rate": 1},
            400,
            "Unable to parse 'trace_rate': attempt to access JSON non-string as string",
        ),
        ("/v2", {"trace_level": "OFF"}, 400, "attempt to access JSON non-array as array"),
        ("/v2", {"trace_level": ["OFF", "TENSORS"]}, 400, "Expect only one trace level 'OFF' is specified"),
        ("/v2", {"trace_count": "-5"}, 400, "Unable to parse 'trace_count'. Expecting value >= -1, got: -5"),
        ("/v2", [], 400, "expected a JSON object"),
        ("/v2", b"{", 400, "failed to parse the request JSON buffer"),
    ],
)
async def test_invalid_trace_settings(traced, client, path, body, status, message):
    reply = await client.post(f"{path}/trace/setting", body)
    assert reply.status == status and message in reply.error
    if path.endswith("nobody"):
        assert (await client.get(f"{path}/trace/setting")).error == message


async def test_log_settings(client):
    defaults = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert (await client.get("/v2/logging")).json == defaults
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601", "log_warning": None}
    reply = await client.post("/v2/logging", changes)
    assert reply.json == defaults | changes | {"log_warning": True}
    assert (await client.get("/v2/logging")).json == reply.json


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, 400, "attempt to access JSON non-boolean as boolean"),
        ({"log_verbose_level": -1}, 400, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_format": "xml"}, 400, "invalid argument for log_format, got: xml"),
        ({"log_colour": True}, 400, "unknown log setting 'log_colour', expected one of log_info"),
    ],
)
async def test_invalid_log_settings(client, body, status, message):
    reply = await client.post("/v2/logging", {"log_error": False} | body)
    assert reply.status == status and message in reply.error
    assert (await client.get("/v2/logging")).json["log_error"] is True


async def test_tritonclient(traced, client, tmp_path):
    def exchange() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{client.port}") as server:
            settings = server.get_trace_settings("text")
            assert settings["trace_file"] == f"{tmp_path}/trace.json"
            changed = server.update_trace_settings("text", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
            assert changed == settings | {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
            assert server.update_trace_settings("text", {"trace_level": None, "trace_rate": None}) == settings
            log = server.update_log_settings({"log_verbose_level": 1})
            assert log == server.get_log_settings() and log["log_verbose_level"] == 1

    await asyncio.to_thread(exchange)


async def test_async_tritonclient(traced, client):
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{client.port}") as server:
        assert (await server.update_trace_settings(settings={"trace_rate": "9"}))["trace_rate"] == "9"
        assert (await server.get_trace_settings())["trace_rate"] == "9"
        assert (await server.update_log_settings({"log_format": "ISO8601"}))["log_format"] == "ISO8601"
        assert (await server.get_log_settings())["log_format"] == "ISO8601"
