"""Trace settings that change at runtime, and the sampled requests."""

from __future__ import annotations

import pytest

from neso.server.errors import ErrorCode, ServerError
from neso.server.tracing import TraceConfig, Tracing


@pytest.fixture
async def tracing(tmp_path):
    tracing = Tracing(TraceConfig.parse([f"triton,file={tmp_path}/trace.json", "level=TIMESTAMPS", "rate=3"]))
    yield tracing
    await tracing.close()


def sampled(tracing: Tracing, model: str, count: int) -> list[int]:
    """Return which of this many requests are traced."""
    return [i for i in range(count) if (trace := tracing.sample(model)) is not None and trace.end() is None]


async def test_reported_settings(tracing, tmp_path):
    assert tracing.settings() == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "3",
        "trace_count": "-1",
        "trace_mode": "triton",
        "log_frequency": "0",
        "trace_file": f"{tmp_path}/trace.json",
    }
    tracing.update({"trace_level": ["TENSORS", "TIMESTAMPS"], "trace_mode": ["triton"]})
    assert tracing.settings("any")["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    tracing.update({"trace_level": ["OFF"]})
    assert tracing.settings()["trace_level"] == ["OFF"]
    assert not tracing.enabled


async def test_rate_and_count(tracing):
    assert sampled(tracing, "m", 10) == [2, 5, 8]
    tracing.update({"trace_rate": ["1"], "trace_count": ["2"]})
    assert sampled(tracing, "m", 10) == [0, 1]
    assert tracing.settings()["trace_count"] == "0"
    assert not tracing.enabled
    tracing.update({"trace_rate": ["2"]})  # the remaining count is kept
    assert tracing.settings()["trace_count"] == "0"
    tracing.update({"trace_count": []})
    assert tracing.enabled and sampled(tracing, "m", 4) == [1, 3]


async def test_models_inherit_global_settings(tracing):
    tracing.update({"trace_rate": ["1"]}, "own")
    assert sampled(tracing, "own", 3) == [0, 1, 2]
    assert sampled(tracing, "other", 3) == [2]
    tracing.update({"trace_level": ["TENSORS"], "trace_rate": ["7"]})
    assert (tracing.settings("own")["trace_level"], tracing.settings("own")["trace_rate"]) == (
        ["TENSORS"],
        "1",
    )
    tracing.update({"trace_rate": []}, "own")
    assert tracing.settings("own") == tracing.settings()
    tracing.update({"trace_level": ["OFF"]})
    tracing.update({"trace_level": ["TIMESTAMPS"], "trace_rate": ["1"]}, "own")
    assert tracing.enabled
    assert (sampled(tracing, "own", 2), sampled(tracing, "other", 20)) == ([0, 1], [])
    tracing.update({"trace_level": [], "trace_rate": []})
    assert tracing.settings()["trace_rate"] == "3"  # as at start


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        (
            {"trace_file": ["x"]},
            ErrorCode.UNSUPPORTED,
            "trace file location can not be updated through network protocol",
        ),
        (
            {"trace_mode": ["opentelemetry"]},
            ErrorCode.UNSUPPORTED,
            "trace mode can not be updated through network protocol",
        ),
        (
            {"trace_level": ["OFF", "TIMESTAMPS"]},
            ErrorCode.INVALID_ARG,
            "Expect only one trace level 'OFF' is specified",
        ),
        (
            {"trace_level": ["SOME"]},
            ErrorCode.INVALID_ARG,
            "unknown trace level 'SOME', expected one of OFF, TIMESTAMPS, TENSORS",
        ),
        ({"trace_rate": ["x"]}, ErrorCode.INVALID_ARG, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": ["1", "2"]}, ErrorCode.INVALID_ARG, "expect only 1 value for 'trace_rate'"),
        (
            {"trace_rate": ["99999999999"]},
            ErrorCode.INVALID_ARG,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
        (
            {"trace_count": ["-2"]},
            ErrorCode.INVALID_ARG,
            "Unable to parse 'trace_count'. Expecting value >= -1, got: -2",
        ),
        (
            {"trace_count": ["2147483648"]},
            ErrorCode.INVALID_ARG,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 2147483648",
        ),
        ({"log_frequency": [""]}, ErrorCode.INVALID_ARG, "Unable to parse 'log_frequency', got: "),
        (
            {"trace_rate": ["0"]},
            ErrorCode.INVALID_ARG,
            "Attempting to set invalid trace setting :sample rate must be non-zero",
        ),
        (
            {"rate": ["1"]},
            ErrorCode.INVALID_ARG,
            "unknown trace setting 'rate', expected one of trace_level, trace_rate, trace_count, log_frequency",
        ),
    ],
)
async def test_rejected_updates_change_nothing(tracing, values, code, message):
    before = tracing.settings()
    with pytest.raises(ServerError) as caught:
        tracing.update({"trace_level": ["TENSORS"]} | values)
    assert (caught.value.code, caught.value.message) == (code, message)
    assert tracing.settings() == before


async def test_a_global_change_invalid_for_a_model_is_rejected(tracing):
    tracing.update({"trace_level": ["OFF"]})
    tracing.update({"trace_rate": ["0"]})  # valid, since nothing is traced
    with pytest.raises(ServerError, match="sample rate must be non-zero"):
        tracing.update({"trace_level": ["TIMESTAMPS"]}, "m")
    tracing.update({"trace_rate": ["1"], "trace_level": ["TIMESTAMPS"]}, "m")
    with pytest.raises(ServerError, match="sample rate must be non-zero"):
        tracing.update({"trace_rate": []}, "m")


async def test_tracing_requires_a_file(caplog):
    tracing = Tracing(TraceConfig.parse(["level=TIMESTAMPS", "rate=1"]))
    assert not tracing.enabled and "nothing is traced: trace file name is not given" in caplog.text
    tracing.update({"trace_level": ["OFF"]})
    with pytest.raises(
        ServerError, match="Attempting to set invalid trace setting :trace file name is not given"
    ):
        tracing.update({"trace_level": ["TIMESTAMPS"]})
    await tracing.close()
