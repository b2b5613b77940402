"""Trace settings and their command-line option `--trace-config`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import Annotated, Any
from urllib.parse import urlsplit

from neso.flags import Flag, integer
from neso.server.errors import InvalidArgument

TRACING_UNSUPPORTED = "tracing is not supported with --server-processes greater than 1"


class TraceMode(str, Enum):
    """Trace output: a file in Triton's format, or an OpenTelemetry collector."""

    TRITON = "triton"
    OPENTELEMETRY = "opentelemetry"


class TraceLevel(IntFlag):
    """Contents of a trace, with the names of the trace extension."""

    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    def names(self) -> list[str]:
        """Return the names in the order of the trace extension."""
        return [
            level.name or "" for level in (TraceLevel.TIMESTAMPS, TraceLevel.TENSORS) if level in self
        ] or ["OFF"]


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """Trace one of `rate` requests, up to `count` traces (-1 = no limit).

    `log_frequency`: number of traces per file in mode `triton`; 0 writes all traces to one file.
    """

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0

    def fault(self, mode: TraceMode, file: str) -> str:
        """Return the reason why this setting produces no traces; "" if it produces traces."""
        if not self.level:
            return "tracing is disabled"
        if mode is TraceMode.TRITON and not self.rate:
            return "sample rate must be non-zero"
        if mode is TraceMode.TRITON and not file:
            return "trace file name is not given"
        return ""

    def check(self, mode: TraceMode, file: str) -> None:
        """Raise `InvalidArgument` if tracing is enabled but cannot produce traces."""
        if self.level and (fault := self.fault(mode, file)):
            raise InvalidArgument(f"Attempting to set invalid trace setting :{fault}")


TRACES_PATH = "/v1/traces"

_LEVELS = {
    **dict.fromkeys(("false", "off"), TraceLevel.OFF),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}
_GLOBAL = ("rate", "level", "count", "mode")
_BSP_MINIMUM = {"bsp_max_queue_size": 1, "bsp_schedule_delay": 0, "bsp_max_export_batch_size": 1}
_MODE_SETTINGS = {
    TraceMode.TRITON: ("file", "log-frequency"),
    TraceMode.OPENTELEMETRY: ("url", "resource", *_BSP_MINIMUM),
}


@dataclass(frozen=True, slots=True)
class OtelConfig:
    """Span export options; defaults come from OpenTelemetry's environment variables.

    `resource`: resource attributes of the server. The batch span processor queues up to `bsp_max_queue_size` spans and
    exports them every `bsp_schedule_delay` ms, or when `bsp_max_export_batch_size` are queued. A delay of 0 exports
    without waiting; a batch size greater than the queue exports the whole queue.
    Raises `InvalidArgument`.
    """

    url: str = field(default_factory=lambda: _default_url())
    resource: tuple[tuple[str, str], ...] = ()
    bsp_max_queue_size: int = field(default_factory=lambda: _from_environment("BSP_MAX_QUEUE_SIZE", 2048))
    bsp_schedule_delay: int = field(default_factory=lambda: _from_environment("BSP_SCHEDULE_DELAY", 5000))
    bsp_max_export_batch_size: int = field(
        default_factory=lambda: _from_environment("BSP_MAX_EXPORT_BATCH_SIZE", 512)
    )

    def __post_init__(self) -> None:
        for name, low in _BSP_MINIMUM.items():
            if (value := getattr(self, name)) < low:
                raise InvalidArgument(f"{name} must be at least {low}, got {value}")
        _endpoint(self.url)

    @property
    def endpoint(self) -> str:
        """`url` with the scheme and path of OTLP over HTTP, which a plain `host:port` omits."""
        return _endpoint(self.url)

    def describe(self) -> dict[str, str | list[str]]:
        """Return the settings in the format of the trace extension; the URL as given, as in Triton."""
        described: dict[str, str | list[str]] = {"url": self.url}
        if self.resource:
            described["resource"] = [f"{key}={value}" for key, value in self.resource]
        for name in _BSP_MINIMUM:
            described[name] = str(getattr(self, name))
        return described


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Initial trace setting, and the options that clients cannot change: `mode`, `file` (mode `triton`) and `otel`.

    `otel` None selects the defaults of the environment.
    """

    setting: TraceSetting = field(default_factory=TraceSetting)
    mode: TraceMode = TraceMode.TRITON
    file: str = ""
    otel: OtelConfig | None = None

    @classmethod
    def parse(
        cls,
        settings: Annotated[
            Iterable[str],
            Flag(
                "trace-config",
                "mode=triton|opentelemetry, level=OFF|TIMESTAMPS|TENSORS, rate=N, count=N, triton,file=PATH, "
                "triton,log-frequency=N, opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE.",
                metavar="[MODE,]KEY=VALUE",
                repeated=True,
            ),
        ] = (),
        *,
        file: Annotated[
            str | None, Flag("trace-file", "Deprecated: --trace-config triton,file=PATH.", metavar="FILE")
        ] = None,
        level: Annotated[
            Iterable[str],
            Flag("trace-level", "Deprecated: --trace-config level=OFF|TIMESTAMPS|TENSORS.", repeated=True),
        ] = (),
        rate: Annotated[
            str | int | None, Flag("trace-rate", "Deprecated: --trace-config rate=N.", integer(0))
        ] = None,
        count: Annotated[
            str | int | None, Flag("trace-count", "Deprecated: --trace-config count=N.", integer())
        ] = None,
        log_frequency: Annotated[
            str | int | None,
            Flag("trace-log-frequency", "Deprecated: --trace-config triton,log-frequency=N.", integer(0)),
        ] = None,
    ) -> TraceConfig:
        """Parse the values of `--trace-config`, `SETTING=VALUE` or `MODE,SETTING=VALUE`, and of the deprecated flags.

        `--trace-config` takes precedence. Settings of the unselected mode are checked, but have no effect.
        Raises `InvalidArgument`.
        """
        pairs = [
            *([(TraceMode.TRITON, "file", file)] if file is not None else []),
            *([(TraceMode.TRITON, "log-frequency", str(log_frequency))] if log_frequency is not None else []),
            *([(None, "rate", str(rate))] if rate is not None else []),
            *([(None, "count", str(count))] if count is not None else []),
        ]
        given = [_split(text) for text in settings]
        if not any(name == "level" for _, name, _ in given):
            pairs += [(None, "level", one) for one in level]
        pairs += given
        # The last value applies, except for settings that can be repeated.
        values = {(mode, name): value for mode, name, value in pairs}
        base, mode = TraceSetting(), _mode(values.get((None, "mode"), "triton"))
        of_otel = [(name, value) for of_mode, name, value in pairs if of_mode is TraceMode.OPENTELEMETRY]
        return cls(
            TraceSetting(
                _level([value for _, name, value in pairs if name == "level"]),
                _number("rate", values.get((None, "rate"), str(base.rate)), 0, 2**32 - 1),
                _number("count", values.get((None, "count"), str(base.count)), -1, 2**31 - 1),
                _number(
                    "triton,log-frequency", values.get((TraceMode.TRITON, "log-frequency"), "0"), 0, 2**32 - 1
                ),
            ),
            mode,
            values.get((TraceMode.TRITON, "file"), ""),
            _otel(of_otel) if of_otel or mode is TraceMode.OPENTELEMETRY else None,
        )


def _otel(pairs: list[tuple[str, str]]) -> OtelConfig:
    given: dict[str, Any] = {}
    resource = []
    for name, value in pairs:
        if name == "resource":
            resource.append(_resource(value))
        else:
            given[name] = (
                value
                if name == "url"
                else _number(f"opentelemetry,{name}", value, _BSP_MINIMUM[name], 2**32 - 1)
            )
    return OtelConfig(resource=tuple(resource), **given)


def _split(text: str) -> tuple[TraceMode | None, str, str]:
    """Split `[MODE,]SETTING=VALUE`; the value may contain commas and equals signs."""
    name, equals, value = text.partition("=")
    mode_name, comma, setting = name.rpartition(",")
    if comma and not mode_name:
        raise InvalidArgument(
            "No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
            f"<setting>=<value>. Got {text}"
        )
    if not (equals and setting and value):
        raise InvalidArgument(f"--trace-config option format is '<trace mode>,<setting>=<value>'. Got {text}")
    mode = _mode(mode_name) if comma else None
    known = _GLOBAL if mode is None else _MODE_SETTINGS[mode]
    if setting not in known:
        raise InvalidArgument(f"--trace-config '{text}': unknown setting, expected one of {', '.join(known)}")
    return mode, setting, value


def _mode(text: str) -> TraceMode:
    try:
        return TraceMode(text.lower())
    except ValueError:
        raise InvalidArgument(
            f'invalid value for trace mode option: {text}. Available options are "triton" and "opentelemetry"'
        ) from None


def _level(texts: list[str]) -> TraceLevel:
    """Return the union of the levels; OFF disables all."""
    found = TraceLevel.OFF
    off = False
    for text in texts:
        level = _LEVELS.get(text.lower())
        if level is None:
            raise InvalidArgument(f"invalid value for trace level option: {text}")
        found |= level
        off = off or not level
    return TraceLevel.OFF if off else found


def _number(name: str, text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidArgument(f"--trace-config {name}: expected a number from {low} to {high}, got '{text}'")
    return value


def _resource(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise InvalidArgument(f"--trace-config opentelemetry,resource: expected <key>=<value>, got '{text}'")
    return key, value


def _endpoint(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"opentelemetry,url: '{text}' is not an HTTP URL")
    return url if parts.path.strip("/") else url.rstrip("/") + TRACES_PATH


def _default_url() -> str:
    of_traces = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    return of_traces or base.rstrip("/") + TRACES_PATH


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(f"OTEL_{name}", str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"OTEL_{name}: expected a number, got '{text}'") from None
