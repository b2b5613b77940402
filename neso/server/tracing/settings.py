"""Trace settings: --trace-config at start, and updates by clients."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, IntFlag
from typing import Any
from urllib.parse import urlsplit

from neso.server.errors import InvalidArgument, Unsupported


class TraceMode(str, Enum):
    """Where traces go: to a file in Triton's format, or to a collector by OpenTelemetry's protocol."""

    TRITON = "triton"
    OPENTELEMETRY = "opentelemetry"


class TraceLevel(IntFlag):
    """What a trace holds; the names are those of the trace extension."""

    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    def names(self) -> list[str]:
        """As the trace extension lists them."""
        return [
            level.name or "" for level in (TraceLevel.TIMESTAMPS, TraceLevel.TENSORS) if level in self
        ] or ["OFF"]


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """One of `rate` requests is traced, `count` of them in all (-1: no limit).

    `log_frequency`: traces to a file of their own, in mode `triton`; 0 is one file for all.
    """

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0

    def fault(self, mode: TraceMode, file: str) -> str:
        """Why nothing can be traced by this, "" if something can."""
        if not self.level:
            return "tracing is disabled"
        if mode is TraceMode.TRITON and not self.rate:
            return "sample rate must be non-zero"
        if mode is TraceMode.TRITON and not file:
            return "trace file name is not given"
        return ""

    def check(self, mode: TraceMode, file: str) -> None:
        """Raises `InvalidArgument` for a setting that asks for traces which cannot be taken."""
        if self.level and (fault := self.fault(mode, file)):
            raise InvalidArgument(f"Attempting to set invalid trace setting :{fault}")


TRACES_PATH = "/v1/traces"

_LEVELS = {
    **dict.fromkeys(("false", "off"), TraceLevel.OFF),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}
_GLOBAL = ("rate", "level", "count", "mode")
_OF_MODE = {
    TraceMode.TRITON: ("file", "log-frequency"),
    TraceMode.OPENTELEMETRY: (
        "url",
        "resource",
        "bsp_max_queue_size",
        "bsp_schedule_delay",
        "bsp_max_export_batch_size",
    ),
}


@dataclass(frozen=True, slots=True)
class OtelConfig:
    """Where and how spans are exported. The defaults are those of OpenTelemetry's environment variables.

    `resource`: attributes of the server. The batch processor holds `bsp_max_queue_size` spans at most and sends them
    every `bsp_schedule_delay` ms, or as soon as there are `bsp_max_export_batch_size`. Raises `InvalidArgument`.
    """

    url: str = field(default_factory=lambda: _default_url())
    resource: tuple[tuple[str, str], ...] = ()
    bsp_max_queue_size: int = field(default_factory=lambda: _from_environment("BSP_MAX_QUEUE_SIZE", 2048))
    bsp_schedule_delay: int = field(default_factory=lambda: _from_environment("BSP_SCHEDULE_DELAY", 5000))
    bsp_max_export_batch_size: int = field(
        default_factory=lambda: _from_environment("BSP_MAX_EXPORT_BATCH_SIZE", 512)
    )

    def __post_init__(self) -> None:
        if not 0 < self.bsp_max_export_batch_size <= self.bsp_max_queue_size:
            raise InvalidArgument(
                f"bsp_max_export_batch_size must be positive and at most bsp_max_queue_size "
                f"({self.bsp_max_queue_size}), got {self.bsp_max_export_batch_size}"
            )
        if self.bsp_schedule_delay <= 0:
            raise InvalidArgument(f"bsp_schedule_delay must be positive, got {self.bsp_schedule_delay}")

    def describe(self) -> dict[str, str | list[str]]:
        """As the trace extension tells it."""
        described: dict[str, str | list[str]] = {"url": self.url}
        if self.resource:
            described["resource"] = [f"{key}={value}" for key, value in self.resource]
        for name in ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"):
            described[name] = str(getattr(self, name))
        return described


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The settings at start, and what no client can change: `mode`, `file` (of mode `triton`) and `otel`, whose
    default is that of the environment.
    """

    setting: TraceSetting = field(default_factory=TraceSetting)
    mode: TraceMode = TraceMode.TRITON
    file: str = ""
    otel: OtelConfig | None = None

    @classmethod
    def parse(
        cls,
        settings: Iterable[str] = (),
        *,
        file: str | None = None,
        level: Iterable[str] = (),
        rate: str | int | None = None,
        count: str | int | None = None,
        log_frequency: str | int | None = None,
    ) -> TraceConfig:
        """From the values of `--trace-config`: `SETTING=VALUE` or `MODE,SETTING=VALUE`.

        The others are `--trace-file`, `--trace-level` and so on, which Triton has deprecated; `--trace-config` wins.
        Settings of the mode that is not chosen are checked and have no effect. Raises `InvalidArgument`.
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
        # The last one counts, but for those that may be given several times.
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
                _url(value) if name == "url" else _number(f"opentelemetry,{name}", value, 1, 2**32 - 1)
            )
    return OtelConfig(resource=tuple(resource), **given)


def _split(text: str) -> tuple[TraceMode | None, str, str]:
    """`[MODE,]SETTING=VALUE`; a value may hold commas and equals signs."""
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
    known = _GLOBAL if mode is None else _OF_MODE[mode]
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
    """All that are named; one OFF switches everything off."""
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


def _url(text: str) -> str:
    """`host:port` alone will do: scheme and path are the protocol's then."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"--trace-config opentelemetry,url: '{text}' is no HTTP URL")
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


_INTEGER_TEXT = re.compile(r"\s*[+-]?\d+\s*")


@dataclass(frozen=True, slots=True)
class _NumberField:
    """A number among the settings; Triton tells its range when it is exceeded."""

    name: str
    low: int
    high: int


_NUMBERS = {
    "trace_rate": _NumberField("rate", 0, 2**32 - 1),
    "trace_count": _NumberField("count", -1, 2**31 - 1),
    "log_frequency": _NumberField("log_frequency", 0, 2**32 - 1),
}


@dataclass(frozen=True, slots=True)
class Overrides:
    """What was set explicitly; None is not."""

    level: TraceLevel | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    def over(self, base: TraceSetting) -> TraceSetting:
        """The setting that results where this does not say otherwise than `base`."""
        return TraceSetting(
            *(
                getattr(base, field.name) if (value := getattr(self, field.name)) is None else value
                for field in fields(self)
            )
        )


def read_update(values: Mapping[str, Sequence[str]], mode: TraceMode) -> dict[str, Any]:
    """The fields of `Overrides` that change. No text for a setting clears it. Raises `ServerError`."""
    changes: dict[str, Any] = {}
    for name, texts in values.items():
        if name == "trace_file":
            raise Unsupported("trace file location can not be updated through network protocol")
        if name == "trace_level":
            changes["level"] = _updated_level(texts) if texts else None
        elif name in _NUMBERS:
            field = _NUMBERS[name]
            changes[field.name] = _updated_number(name, field, texts) if texts else None
        elif name == "trace_mode":
            if list(texts) != [mode.value]:
                raise Unsupported("trace mode can not be updated through network protocol")
        else:
            known = ", ".join(("trace_level", *_NUMBERS))
            raise InvalidArgument(f"unknown trace setting '{name}', expected one of {known}")
    return changes


def _updated_level(texts: Sequence[str]) -> TraceLevel:
    level = TraceLevel.OFF
    for text in texts:
        if text not in TraceLevel.__members__:
            raise InvalidArgument(
                f"unknown trace level '{text}', expected one of {', '.join(TraceLevel.__members__)}"
            )
        if text == "OFF" and len(texts) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        level |= TraceLevel[text]
    return level


def _updated_number(name: str, field: _NumberField, texts: Sequence[str]) -> int:
    if len(texts) != 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    (text,) = texts
    if not _INTEGER_TEXT.fullmatch(text):
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}")
    value = int(text)
    if name == "trace_count" and -(2**31) <= value < field.low:
        raise InvalidArgument(f"Unable to parse '{name}'. Expecting value >= {field.low}, got: {text}")
    if not field.low <= value <= field.high:
        raise InvalidArgument(
            f"Unable to parse '{name}', value is out of range [ {field.low}, {field.high} ], got: {text}"
        )
    return value
