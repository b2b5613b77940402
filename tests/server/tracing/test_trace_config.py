"""--trace-config and the flags that it replaces."""

from __future__ import annotations

import pytest

from neso.server.errors import InvalidArgument
from neso.server.tracing import OtelConfig, TraceConfig, TraceLevel, TraceMode, TraceSetting


def test_defaults():
    config = TraceConfig.parse()
    assert config == TraceConfig()
    assert config.setting == TraceSetting(TraceLevel.OFF, 1000, -1, 0)
    assert (config.mode, config.file) == (TraceMode.TRITON, "")


def test_triton_mode():
    config = TraceConfig.parse(
        [
            "triton,file=/x/a,b=c.json",
            "triton,log-frequency=50",
            "rate=100",
            "level=TIMESTAMPS",
            "level=tensors",
            "count=7",
        ]
    )
    both = TraceLevel.TIMESTAMPS | TraceLevel.TENSORS
    assert config == TraceConfig(TraceSetting(both, 100, 7, 50), TraceMode.TRITON, "/x/a,b=c.json")


def test_opentelemetry_mode():
    config = TraceConfig.parse(
        [
            "mode=opentelemetry",
            "opentelemetry,url=http://collector:4318/v1/traces",
            "opentelemetry,resource=service.name=mine",
            "opentelemetry,resource=a.b=c=d",
            "opentelemetry,bsp_max_queue_size=100",
            "opentelemetry,bsp_max_export_batch_size=10",
            "opentelemetry,bsp_schedule_delay=20",
            "rate=0",
            "level=min",
        ]
    )
    assert config.mode is TraceMode.OPENTELEMETRY
    assert (config.setting.rate, config.setting.level) == (0, TraceLevel.TIMESTAMPS)
    resource = (("service.name", "mine"), ("a.b", "c=d"))
    assert config.otel == OtelConfig("http://collector:4318/v1/traces", resource, 100, 20, 10)


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector", "https://collector/v1/traces"),
        ("http://collector:1/other", "http://collector:1/other"),
    ],
)
def test_urls(given, endpoint):
    config = TraceConfig.parse([f"opentelemetry,url={given}"])
    assert config.otel.endpoint == endpoint
    assert config.otel.describe()["url"] == given


def test_environment(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "77")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there:1/")
    assert (OtelConfig().bsp_schedule_delay, OtelConfig().url) == (77, "http://there:1/v1/traces")
    assert TraceConfig.parse(["opentelemetry,bsp_schedule_delay=1"]).otel.bsp_schedule_delay == 1
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "-1")
    with pytest.raises(InvalidArgument, match="bsp_schedule_delay must be at least 0, got -1"):
        OtelConfig()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "soon")
    with pytest.raises(InvalidArgument, match="OTEL_BSP_SCHEDULE_DELAY: expected a number, got 'soon'"):
        OtelConfig()


def test_deprecated_flags():
    config = TraceConfig.parse(file="f", level=["MAX"], rate="2", count=3, log_frequency="4")
    assert config == TraceConfig(TraceSetting(TraceLevel.TIMESTAMPS, 2, 3, 4), file="f")
    overridden = TraceConfig.parse(
        ["rate=9", "level=TENSORS", "triton,file=g"], file="f", level=["TIMESTAMPS"], rate=2
    )
    assert overridden == TraceConfig(TraceSetting(TraceLevel.TENSORS, 9), file="g")


def test_off_takes_precedence():
    assert TraceConfig.parse(["level=TIMESTAMPS", "level=OFF"]).setting.level is TraceLevel.OFF


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate", "format is '<trace mode>,<setting>=<value>'. Got rate"),
        ("rate=", "Got rate="),
        (",rate=1", "No trace mode specified"),
        ("zipkin,url=x", "invalid value for trace mode option: zipkin. Available options are"),
        ("mode=x", "invalid value for trace mode option: x"),
        ("level=SOME", "invalid value for trace level option: SOME"),
        ("rate=-1", "rate: expected a number from 0 to 4294967295, got '-1'"),
        ("count=many", "count: expected a number from -1 to"),
        ("file=x", "unknown setting, expected one of rate, level, count, mode"),
        ("opentelemetry,file=x", "unknown setting, expected one of url"),
        ("opentelemetry,resource=x", "expected <key>=<value>, got 'x'"),
        ("opentelemetry,url=ftp://x", "is not an HTTP URL"),
        ("opentelemetry,bsp_schedule_delay=-1", "bsp_schedule_delay: expected a number from 0"),
        ("opentelemetry,bsp_max_queue_size=0", "bsp_max_queue_size: expected a number from 1"),
        ("opentelemetry,bsp_max_export_batch_size=0", "bsp_max_export_batch_size: expected a number from 1"),
    ],
)
def test_errors(text, message):
    with pytest.raises(InvalidArgument) as caught:
        TraceConfig.parse([text])
    assert message in caught.value.message
