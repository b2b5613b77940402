"""The trace and logging extensions over gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from neso.server.tracing import TraceConfig, Tracing


@pytest.fixture
async def traced(core, tmp_path):
    """Tracing to a file."""
    core.tracing = Tracing(TraceConfig.parse([f"triton,file={tmp_path}/trace.json", "rate=6"]))
    return core


def plain(reply) -> dict[str, list[str]]:
    return {name: list(setting.value) for name, setting in reply.settings.items()}


async def test_trace_settings(traced, stub, tmp_path):
    settings = {
        "trace_level": ["OFF"],
        "trace_rate": ["6"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_file": [f"{tmp_path}/trace.json"],
        "trace_mode": ["triton"],
    }

    async def call(model: str = "", **changes: list[str]) -> dict[str, list[str]]:
        request = service_pb2.TraceSettingRequest(model_name=model)
        for name, values in changes.items():
            request.settings[name].value.extend(values)
        return plain(await stub.TraceSetting(request))

    assert await call() == settings
    changed = await call("wait", trace_level=["TIMESTAMPS", "TENSORS"], trace_count=["3"])
    assert changed == settings | {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_count": ["3"]}
    assert await call("wait") == changed
    assert await call() == settings
    assert await call("wait", trace_level=[], trace_count=[]) == settings


@pytest.mark.parametrize(
    ("model", "name", "values", "status", "message"),
    [
        ("nobody", "", [], grpc.StatusCode.INVALID_ARGUMENT, "Request for unknown model : nobody"),
        (
            "",
            "trace_file",
            ["x"],
            grpc.StatusCode.UNIMPLEMENTED,
            "trace file location can not be updated through network protocol",
        ),
        (
            "",
            "trace_rate",
            ["1", "2"],
            grpc.StatusCode.INVALID_ARGUMENT,
            "expect only 1 value for 'trace_rate'",
        ),
        ("", "trace_rate", ["x"], grpc.StatusCode.INVALID_ARGUMENT, "Unable to parse 'trace_rate', got: x"),
    ],
)
async def test_invalid_trace_settings(traced, stub, model, name, values, status, message):
    request = service_pb2.TraceSettingRequest(model_name=model)
    if name:
        request.settings[name].value.extend(values)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.TraceSetting(request)
    assert (caught.value.code(), caught.value.details()) == (status, message)


@pytest.mark.parametrize(
    ("name", "choice", "value", "status", "message"),
    [
        (
            "log_file",
            "string_param",
            "x",
            grpc.StatusCode.UNIMPLEMENTED,
            "log file location can not be updated through network protocol",
        ),
        ("log_info", "string_param", "x", grpc.StatusCode.INVALID_ARGUMENT, "expect boolean for 'log_info'"),
        (
            "log_verbose_level",
            "bool_param",
            True,
            grpc.StatusCode.INVALID_ARGUMENT,
            "expect int32 for 'log_verbose_level'",
        ),
        ("log_format", "uint32_param", 1, grpc.StatusCode.INVALID_ARGUMENT, "expect string for 'log_format'"),
        (
            "log_format",
            "string_param",
            "xml",
            grpc.StatusCode.INVALID_ARGUMENT,
            "invalid argument for log_format, got: xml, expected default, ISO8601, JSON",
        ),
        ("other", "bool_param", True, grpc.StatusCode.INVALID_ARGUMENT, None),
    ],
)
async def test_invalid_log_settings(stub, name, choice, value, status, message):
    request = service_pb2.LogSettingsRequest()
    setattr(request.settings[name], choice, value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.LogSettings(request)
    assert caught.value.code() is status
    assert caught.value.details() == message or (
        message is None and "unknown log setting" in caught.value.details()
    )


async def test_tritonclient(traced, server):
    def exchange() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            settings = client.get_trace_settings("wait", as_json=True)["settings"]
            assert settings["trace_rate"] == {"value": ["6"]}
            reply = client.update_trace_settings(
                "wait", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, as_json=True
            )
            assert reply["settings"]["trace_level"] == {"value": ["TIMESTAMPS"]}
            assert reply["settings"]["trace_rate"] == {"value": ["1"]}
            cleared = client.update_trace_settings("wait", {"trace_level": None, "trace_rate": None})
            assert plain(cleared) == plain(client.get_trace_settings())
            with pytest.raises(InferenceServerException, match="can not be updated"):
                client.update_trace_settings(settings={"trace_file": "x"})
            log = client.update_log_settings(
                {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}, as_json=True
            )["settings"]
            assert log == client.get_log_settings(as_json=True)["settings"]
            assert log["log_info"] == {"bool_param": False}
            assert log["log_verbose_level"] == {"uint32_param": 1}
            assert log["log_format"] == {"string_param": "ISO8601"}

    await asyncio.to_thread(exchange)


async def test_async_tritonclient(traced, client):
    reply = await client.update_trace_settings(settings={"trace_rate": "9"})
    assert plain(reply)["trace_rate"] == ["9"] == plain(await client.get_trace_settings())["trace_rate"]
    reply = await client.update_log_settings({"log_error": False})
    assert reply.settings["log_error"].bool_param is False
    assert (await client.get_log_settings()).settings["log_error"].bool_param is False
